"""Every state of a run before its ranks run: the sentence that people read, and its details."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import pytest

from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.shortage import shortage
from hopsgpu.cluster_managers.snapshot import App, Node, Queue, Snapshot, User
from hopsgpu.cluster_managers.wait_message import shortage_reason
from hopsgpu.core import wait_reasons as reasons
from hopsgpu.core.wait_reasons import LONGEST_SENTENCE, NO_WAIT, WaitReason

STARTED = 12 * 3600.0 + 16 * 60.0
NOW = STARTED + 3600.0
NODE = Amount(2, 6, 14336)
GPU = Amount(1, 2, 5120)
WHOLE = Amount(4, 12, 28672)
NONE = Amount(0, 0, 0)
ANN = User("ann")
DIGITS = ("digits", "root", Amount(2, 2, 2048))


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def short(
    demand: Demand,
    *used: Amount,
    apps: tuple[tuple[str, str, Amount], ...] = (),
    queue: Queue | None = None,
    user: User = ANN,
    held: int = 0,
    since: float = STARTED,
    why_requested: str | None = None,
) -> WaitReason:
    """Return the reason on nodes of two GPUs, of which so much is used.

    Args:
        apps: name, user and resources of the applications; "mine" is the gang's own.
    """
    nodes = tuple(Node(f"node{n}:1", f"node{n}", "RUNNING", NODE, u) for n, u in enumerate(used, 1))
    running = tuple(
        App(
            f"application_1_{1 if name == 'mine' else number:04}",
            *(name, owner, "root.a", amount, since),
            containers=3,
        )
        for number, (name, owner, amount) in enumerate(apps, 7)
    )
    root = Queue("root", "RUNNING", False, Amount(99, 999, 10**6), NONE, NONE, WHOLE)
    queues = (root,) if queue is None else (queue, root)
    snapshot = Snapshot("application_1_0001", "", nodes, queues, user, running)
    missing = shortage(demand, snapshot, held)
    return shortage_reason(snapshot, demand, missing, held, NOW, why_requested)


def queue(used: Amount, maximum: Amount = WHOLE) -> Queue:
    return Queue("root.a", "RUNNING", True, maximum, NONE, used, WHOLE)


ALL_OR_NONE = "takes none before it can have all"
BY_DIGITS = "used by 'digits' of root (2 GPUs, application_1_0007, since 12:16)"
SHORT = WaitReason("Needs 1 GPU, 0 are free", ("used by x",), "GPUs")

STATES: list[tuple[str, Callable[[], WaitReason], str, tuple[str, ...]]] = [
    # Preparing.
    (
        "environment",
        lambda: reasons.preparing_environment("cuda"),
        "Preparing the Python environment cuda",
        ("it is built if the lake lacks it",),
    ),
    (
        "script",
        lambda: reasons.storing_script("train.py"),
        "Storing train.py with its directory on the lake",
        ("it is sent again only after a change",),
    ),
    (
        "planning the data",
        lambda: reasons.writing_data("data", 0, 0, 0),
        "Writing data: Spark is planning it",
        (),
    ),
    (
        "writing the data",
        lambda: reasons.writing_data("data", 17, 4, 40),
        "Writing data: 17 of 40 tasks",
        (),
    ),
    (
        "no executor writes",
        lambda: reasons.writing_data("data", 17, 0, 40),
        "Writing data: 17 of 40 tasks; none runs, because Spark waits for executors",
        (),
    ),
    (
        "footers",
        lambda: reasons.reading_footers("data", 100, 2000),
        "Reading the footers of data: 100 of 2000 files",
        (),
    ),
    (
        "another launch",
        reasons.other_launch,
        "Another launch uses the gang; this one runs after it",
        ("the data is ready",),
    ),
    # In a queue of Kueue.
    (
        "Kueue has said nothing yet",
        lambda: reasons.waiting_for_kueue("gangs", ""),
        "Kueue: the gang waits in the LocalQueue gangs",
        (),
    ),
    (
        "Kueue's quota is used",
        lambda: reasons.waiting_for_kueue("gangs", "insufficient unused quota for x in flavor y"),
        "Kueue: insufficient unused quota for x in flavor y",
        ("LocalQueue gangs",),
    ),
    (
        "a long message of Kueue",
        lambda: reasons.waiting_for_kueue("gangs", "quota " * 20),
        f"Kueue: {'quota ' * 15}qu…",
        ("quota " * 20, "LocalQueue gangs"),
    ),
    # In the queue of gangs.
    (
        "another gang asks YARN",
        lambda: reasons.other_gangs_turn("'digits' of root"),
        "Another gang's turn: 'digits' of root requests its executors",
        (),
    ),
    (
        "another gang was faster",
        lambda: reasons.other_gangs_turn(""),
        "Another gang took its turn first",
        (),
    ),
    (
        "behind one gang",
        lambda: reasons.behind_gangs(1, "'fit' of ann", 2, 2),
        "Behind 1 gang in the queue: 'fit' of ann, which needs 4 GPUs",
        (),
    ),
    (
        "behind gangs, short of GPUs too",
        lambda: reasons.behind_gangs(3, "'fit' of ann", 1, 0).before(SHORT),
        "Behind 3 gangs in the queue: the first is 'fit' of ann, which needs 1 executor",
        ("Needs 1 GPU, 0 are free", "used by x"),
    ),
    (
        "the lake refuses the queue",
        lambda: reasons.unreadable_queue("hdfs://nn/x: permission denied"),
        "Cannot read the queue of gangs; tries again",
        ("hdfs://nn/x: permission denied",),
    ),
    (
        "another run of the application",
        reasons.other_run,
        "Another run of this application is acquiring its executors",
        (),
    ),
    (
        "YARN is silent",
        lambda: reasons.silent_manager("http://rm:8088 does not answer"),
        "Cannot read the cluster's state; tries again",
        ("http://rm:8088 does not answer",),
    ),
    # Short of something.
    (
        "GPUs",
        lambda: short(Demand(GPU, 4), Amount(2, 2, 2048), NONE, apps=(DIGITS,)),
        "Needs 4 GPUs, 2 are free; 'digits' of root (started 12:16) uses 2 GPUs",
        (BY_DIGITS, ALL_OR_NONE),
    ),
    (
        "GPUs of several applications, since another day",
        lambda: short(
            Demand(GPU, 2),
            Amount(2, 3, 3072),
            Amount(1, 2, 2048),
            apps=(("", "bob", Amount(1, 1, 1024)), DIGITS),
            since=NOW - 100_000.0,
        ),
        "Needs 2 GPUs, 1 is free; 'digits' of root (started Dec 31 09:29) uses 2 GPUs, others the"
        " rest",
        (
            "used by 'digits' of root (2 GPUs, application_1_0008, since Dec 31 09:29),"
            " application_1_0007 of bob (1 GPU, application_1_0007, since Dec 31 09:29)",
            ALL_OR_NONE,
        ),
    ),
    (
        "GPUs of another run of this application",
        lambda: short(Demand(GPU, 1), NODE, apps=(("mine", "ann", Amount(2, 5, 10240)),)),
        "Needs 1 GPU, 0 are free; this application uses 2 GPUs",
        ("used by this application (2 GPUs)",),
    ),
    (
        "GPUs that the gang itself has do not count",
        lambda: short(
            Demand(GPU, 4), NODE, Amount(1, 1, 1), apps=(("mine", "ann", GPU), DIGITS), held=1
        ),
        "Needs 3 more GPUs, 1 is free; 'digits' of root (started 12:16) uses 2 GPUs",
        ("used by 'digits' of root (2 GPUs, application_1_0008, since 12:16)", ALL_OR_NONE),
    ),
    (
        "a holder that YARN does not show",
        lambda: short(Demand(GPU, 1), NODE),
        "Needs 1 GPU, 0 are free; an application that is not shown or just ended uses 2 GPUs",
        ("used by an application that is not shown or just ended (2 GPUs)",),
    ),
    (
        "a long name, without the time, so that the sentence fits",
        lambda: short(
            Demand(GPU, 4000),
            NODE,
            apps=(("nightly training of all the models", "alexandra", NODE),),
        ),
        "Needs 4000 GPUs, 0 are free; 'nightly training of all the m…' of alexandra uses 2 GPUs",
        (
            "used by 'nightly training of all the m…' of alexandra (2 GPUs, application_1_0007,"
            " since 12:16)",
            ALL_OR_NONE,
        ),
    ),
    (
        "the queue's limit",
        lambda: short(
            Demand(GPU, 3),
            Amount(2, 2, 2048),
            NONE,
            apps=(DIGITS,),
            queue=queue(Amount(2, 2, 2048), maximum=Amount(3, 12, 28672)),
        ),
        "Queue root.a has 1 of 3 GPUs left, 3 are needed; 'digits' of root (started 12:16) uses 2"
        " GPUs",
        (BY_DIGITS, "2 of 4 GPUs free", ALL_OR_NONE),
    ),
    (
        "a queue that may have the whole cluster is no limit",
        lambda: short(
            Demand(GPU, 4), DIGITS[2], NONE, apps=(DIGITS,), queue=queue(DIGITS[2], maximum=WHOLE)
        ),
        "Needs 4 GPUs, 2 are free; 'digits' of root (started 12:16) uses 2 GPUs",
        (BY_DIGITS, ALL_OR_NONE),
    ),
    (
        "the user's limit",
        lambda: short(
            Demand(GPU, 1), NONE, NONE, user=User("ann", Amount(2, 3, 2560), Amount(1, 3, 7168))
        ),
        "User ann is at the user limit in queue root",
        ("ann has 2 GPUs, 3 cores, 2560 MiB; the limit is 1 GPU, 3 cores, 7168 MiB",),
    ),
    (
        "GPUs on one node",
        lambda: short(Demand(Amount(2, 2, 2048), 2), Amount(1, 1, 1024), NONE, Amount(1, 1, 1024)),
        "Room for 1 of 2 executors, each of which needs 2 GPUs on one node",
        (
            "free: node1 1 of 2, node2 2 of 2, node3 1 of 2",
            "used by an application that is not shown or just ended (2 GPUs)",
            "4 of 6 GPUs free",
            ALL_OR_NONE,
        ),
    ),
    (
        "nodes of a spread gang",
        lambda: short(Demand(GPU, 2, is_spread=True), NODE, NONE, apps=(DIGITS,)),
        "Needs 2 nodes with room for an executor, 1 has it; 'digits' of root (started 12:16) uses 2"
        " GPUs",
        ("free: node1 0 of 2, node2 2 of 2", BY_DIGITS, "2 of 4 GPUs free", ALL_OR_NONE),
    ),
    (
        "cores beside GPUs",
        lambda: short(
            Demand(GPU, 1),
            Amount(0, 5, 4096),
            Amount(2, 2, 4096),
            apps=(("fit", "bob", Amount(2, 7, 8192)),),
        ),
        "Node1 has 2 GPUs free but only 1 of 6 cores; 'fit' of bob (started 12:16) uses 7 cores,"
        " 8192 MiB",
        (
            "used by 'fit' of bob (7 cores, 8192 MiB, application_1_0007, since 12:16)",
            "2 of 4 GPUs free",
        ),
    ),
    (
        "cores",
        lambda: short(Demand(Amount(0, 4, 2048), 3), Amount(0, 1, 1024), Amount(0, 1, 1024)),
        "Needs 12 cores, 10 are free; an application that is not shown or just ended uses 2 cores,"
        " 2048 MiB",
        ("used by an application that is not shown or just ended (2 cores, 2048 MiB)",),
    ),
    (
        "memory",
        lambda: short(Demand(Amount(0, 1, 8192), 3), Amount(0, 1, 8192), Amount(0, 1, 1024)),
        "Needs 24576 MiB, 19456 are free",
        (),
    ),
    # Acquiring.
    (
        "asked",
        lambda: reasons.requesting(4),
        "Requesting 4 executors",
        (),
    ),
    (
        "asked, nothing granted though all seems free",
        lambda: reasons.granted_part(0, 4, NO_WAIT),
        "Requesting 4 executors",
        (),
    ),
    (
        "YARN preempts",
        lambda: reasons.granted_part(
            0,
            2,
            short(Demand(GPU, 2), NODE, apps=(DIGITS,), why_requested="YARN preempts other queues"),
        ),
        "Needs 2 GPUs, 0 are free; 'digits' of root (started 12:16) uses 2 GPUs",
        ("requested nevertheless: YARN preempts other queues", BY_DIGITS),
    ),
    (
        "a part is granted",
        lambda: reasons.granted_part(1, 2, SHORT),
        "1 of 2 executors is granted; needs 1 GPU, 0 are free",
        ("used by x",),
    ),
    (
        "starting",
        lambda: reasons.starting_executors(["node2", "node1"], []),
        "Starting 2 executors on node1 and node2",
        (),
    ),
    (
        "starting the last",
        lambda: reasons.starting_executors(["node2"], ["node1", "node1", "node2"]),
        "Starting 1 more executor on node2",
        ("3 ready on node1 and node2",),
    ),
    (
        "starting on many nodes",
        lambda: reasons.starting_executors([f"node{n}" for n in range(9)], []),
        "Starting 9 executors on node0, node1, node2 and 6 more",
        (),
    ),
    (
        "starting in an image",
        lambda: reasons.starting_executors(["node1"], [], "local/train:1"),
        "Starting 1 executor on node1",
        ("a node without the image local/train:1 pulls it first",),
    ),
    (
        "a setting of the node",
        lambda: reasons.ended_executors(
            ["node1"], "container_7", reasons.NO_WAIT, "the image has no bash", "install bash"
        ),
        "1 executor ended unexpectedly on node1: the image has no bash",
        ("install bash", "see the node's log of container_7"),
    ),
    (
        "GPUs of another type",
        lambda: reasons.parked_executors(["node1 has Tesla T4, not 'A100'"], 1).before(
            reasons.starting_executors(["node2"], [])
        ),
        "1 executor gets no rank: node1 has Tesla T4, not 'A100'",
        ("requests another", "Starting 1 executor on node2"),
    ),
    (
        "executors end",
        lambda: reasons.ended_executors(
            ["node1"], "container_7", reasons.starting_executors(["node1"], [])
        ),
        "1 executor ended unexpectedly on node1; starting 1 executor on node1",
        (
            "see the node's log of container_7 (a GPU that cannot be discovered, memory, Python,"
            " the node's clock, preemption?)",
        ),
    ),
    (
        "a surplus executor",
        reasons.ending_surplus,
        "All executors have arrived",
        ("waits until surplus executors of this application end",),
    ),
    (
        "executors share a node",
        lambda: reasons.replacing_executors(["node1"]),
        "Replacing executors that share a node (node1)",
        (),
    ),
    (
        "pause after a part",
        lambda: reasons.gave_back(2, 4, 1),
        "Gave 2 of 4 executors back, so that others go first; asks again soon",
        ("time 1, pauses of up to 31 s",),
    ),
    (
        "pause after nothing",
        lambda: reasons.gave_back(0, 4, 2),
        "No executor was granted; others go first; asks again soon",
        ("time 2, pauses of up to 31 s",),
    ),
    (
        "pause after failures",
        lambda: reasons.withdrew_requests(2, 1),
        "Withdrew 2 requests for executors, which ended repeatedly; asks again soon",
        ("time 1, pauses of up to 31 s",),
    ),
    (
        "pause of an elastic gang",
        reasons.gave_all_back,
        "Gave its executors back, because the others did not arrive; asks again soon",
        (),
    ),
    # Starting ranks.
    (
        "ranks import",
        lambda: reasons.starting_ranks(2),
        "Starting 2 ranks: importing modules",
        (),
    ),
    (
        "ranks unpack",
        lambda: reasons.starting_ranks(1, python_env="cuda"),
        "Starting 1 rank: importing modules in the Python environment cuda",
        ("nodes that lack it unpack it first",),
    ),
    (
        "some ranks run",
        lambda: reasons.starting_ranks(4, 3),
        "Starting 4 ranks: 3 of them run",
        (),
    ),
    (
        "frameworks load",
        lambda: reasons.loading_frameworks(2),
        "2 executors cannot start ranks yet: frameworks load",
        (),
    ),
    # Elastic gangs.
    (
        "restarts larger",
        lambda: reasons.resizing(is_growth=True),
        "The ranks start again as a larger world",
        (),
    ),
    (
        "gives GPUs at a checkpoint",
        lambda: reasons.giving(2, 1),
        "Gives 2 GPUs to waiting gangs at its next checkpoint",
        (),
    ),
    (
        "grows at a checkpoint, and wants more",
        lambda: reasons.growing(1).before(reasons.missing_executors(1, SHORT)),
        "Grows by 1 executor at its next checkpoint",
        ("Wants 1 more executor; needs 1 GPU, 0 are free", "used by x"),
    ),
    (
        "wants more",
        lambda: reasons.missing_executors(2, NO_WAIT),
        "Wants 2 more executors",
        (),
    ),
    # A local master.
    (
        "a process starts",
        reasons.starting_process,
        "Starting a process for the ranks on this machine",
        (),
    ),
    (
        "another gang here",
        reasons.other_gang_here,
        "Another gang on this machine waits for GPUs first",
        (),
    ),
    (
        "GPUs here",
        lambda: reasons.leased_gpus(2, 1, ["GPU-1 is leased to another gang (pid 7)"]),
        "Needs 2 GPUs of this machine, 1 is free",
        ("GPU-1 is leased to another gang (pid 7)",),
    ),
]


@pytest.mark.parametrize(
    ("make", "sentence", "details"), [state[1:] for state in STATES], ids=[s[0] for s in STATES]
)
def test_the_sentence_of_each_state(
    make: Callable[[], WaitReason], sentence: str, details: tuple[str, ...]
) -> None:
    """An empty tuple of details stands for any."""
    reason = make()
    assert reason.sentence == sentence and len(sentence) <= LONGEST_SENTENCE
    assert not details or reason.details == details
    assert sentence[0].isupper() or sentence[0].isdecimal()


def test_reasons_with_other_numbers_lack_the_same() -> None:
    def lack(used: Amount, app: tuple[str, str, Amount] = DIGITS) -> str:
        return short(Demand(GPU, 4), used, NONE, apps=(app,)).lack

    first = lack(Amount(2, 2, 2048))
    assert first and first == lack(Amount(1, 2, 2048))
    assert first != lack(NODE, ("mine", "ann", NODE))


@pytest.mark.parametrize(
    "make",
    [
        lambda: reasons.requesting(4),
        lambda: reasons.granted_part(1, 2, NO_WAIT),
        lambda: reasons.starting_executors(["node1"], []),
        lambda: reasons.starting_ranks(2),
        lambda: reasons.reading_footers("data"),
        lambda: short(Demand(GPU, 2), NONE),
    ],
)
def test_nothing_is_missing_while_the_run_proceeds(make: Callable[[], WaitReason]) -> None:
    assert not make().lack


def test_cpu_executors_of_this_application_end_by_themselves() -> None:
    """Seen on one node with one GPU: two idle CPU executors of the same application."""
    mine = ("mine", "ann", Amount(0, 3, 12288))
    reason = short(Demand(Amount(1, 2, 8192), 1), mine[2], apps=(mine,))
    assert "Spark ends its CPU executors once they are idle" in str(reason)


def test_applications_of_other_queues_do_not_have_what_a_queue_lacks() -> None:
    other = dataclasses.replace(queue(NODE, NODE), path="root.b")
    reason = short(Demand(GPU, 1), NODE, NONE, apps=(DIGITS,), queue=other)
    assert reason.sentence.startswith("Queue root.b is at its limit (2 of 2 GPUs in use)")
    assert "digits" not in str(reason)
