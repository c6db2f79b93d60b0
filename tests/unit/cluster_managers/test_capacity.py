"""What can be granted, ever and now: from answers of real ResourceManagers, and at the borders.

tests/unit/hadoop_answers holds answers of Hadoop 3.5.0, shortened. `granted` is what YARN then gave
to an application that asked for four executors.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.cluster_managers.capacity import check_possible, cores_per_gpu
from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.resources import Amount, exceeds_share
from hopsgpu.cluster_managers.shortage import shortage
from hopsgpu.cluster_managers.snapshot import Master, Node, Queue, Rounding, Snapshot, User
from hopsgpu.cluster_managers.wait_message import shortage_reason
from hopsgpu.cluster_managers.yarn.amounts import multiply_rounding_down
from hopsgpu.cluster_managers.yarn.queues import chain_of, check_queue, queue_path
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.queue_policy import Bound
from hopsgpu.errors import CapacityError, HopsGpuError

NOTHING = Amount(0, 0, 0)
ALICE = User("alice")
DATA = Path(__file__).parents[1] / "hadoop_answers"
MINIMUM = {
    "yarn.scheduler.minimum-allocation-mb": "256",
    "yarn.scheduler.minimum-allocation-vcores": "1",
}


class Recorded(ResourceManager):
    """Answers as a real one did, and counts the questions."""

    def __init__(self, name: str) -> None:
        super().__init__(())
        self.answers = json.loads((DATA / f"{name}.json").read_text())
        self.asked: list[str] = []

    def ask(self, path: str) -> Any:
        self.asked.append(path)
        if path.startswith("/conf?name="):
            name = path.partition("=")[2]
            if name not in MINIMUM:
                raise HopsGpuError("404")
            return {"property": {"key": name, "value": MINIMUM[name]}}
        last = path.rpartition("/")[2].partition("?")[0]
        if last not in self.answers and last == "containers":
            raise HopsGpuError("404")
        return self.answers[{"get-node-labels": "labels"}.get(last, last)]


def yarn_answers(name: str) -> dict[str, Any]:
    said = Recorded(name).answers
    base = "/ws/v1/cluster"
    return {f"{base}/{what}": said[what] for what in ("apps", "scheduler", "nodes")}


def recorded(name: str) -> Snapshot:
    manager = Recorded(name)
    apps = manager.answers["apps"]["apps"]["app"]
    app = next((app for app in apps if app["user"] == "alice"), apps[0])
    return manager.snapshot(app["id"], app["user"])


def most_possible(snapshot: Snapshot, container: Amount, up_to: int = 12) -> int:
    def possible(executors: int) -> bool:
        try:
            check_possible(Demand(container, executors), snapshot)
        except CapacityError:
            return False
        return True

    found = [executors for executors in range(1, up_to) if possible(executors)]
    assert found == list(range(1, len(found) + 1))
    return len(found)


@pytest.mark.parametrize(
    ("name", "container", "granted"),
    [
        # 50 % of 4 GPUs, maximum 50 %: the queue's maximum holds strictly.
        ("capacity_half", Amount(1, 1, 768), 2),
        # 25 % guaranteed (1 GPU), maximum 100 %, user-limit-factor 1: one more than the limit.
        ("capacity_user_limit", Amount(1, 1, 768), 2),
        ("capacity_cpus", Amount(0, 1, 768), 3),
        # 20 % guaranteed is no GPU; user-limit-factor 2.
        ("capacity_no_guarantee", Amount(1, 1, 768), 2),
        # user-limit-factor -1 below a parent with a maximum of 60 %.
        ("capacity_child", Amount(1, 1, 768), 2),
        # The application master alone is above the user's limit.
        ("capacity_too_little", Amount(1, 1, 768), 0),
        # 50 % guaranteed, maximum 100 %, user-limit-factor 1.
        ("capacity_over", Amount(1, 1, 768), 3),
        # 1 GPU of the queue's on nodes without a label, 2 on a node of a label that is shared.
        ("capacity_labels", Amount(1, 1, 768), 3),
        ("fair", Amount(1, 1, 1024), 2),
        # No maximum of its own, its parent has 1 GPU.
        ("fair_child", Amount(1, 1, 1024), 1),
    ],
)
def test_what_is_possible_is_what_yarn_granted(name: str, container: Amount, granted: int) -> None:
    assert most_possible(recorded(name), container) == granted


def test_one_look_at_a_capacity_scheduler() -> None:
    manager = Recorded("capacity_half")
    app = manager.answers["apps"]["apps"]["app"][0]
    snapshot = manager.snapshot(app["id"], "alice")
    assert [node.host for node in snapshot.nodes] == ["node2", "node1"]
    assert snapshot.queues[0] == Queue(
        path="root.a",
        state="RUNNING",
        is_leaf=True,
        maximum=Amount(2, 6, 14336),
        guaranteed=Amount(2, 6, 14336),
        used=Amount(2, 3, 2560),
        largest=Amount(2, 6, 14336),
    )
    assert (snapshot.queues[1].path, snapshot.queues[1].used) == ("root", Amount(2, 3, 2560))
    assert snapshot.user == User("alice", Amount(2, 3, 2560), Amount(2, 6, 14336))
    assert snapshot.master == Master("node2:24317", Amount(0, 1, 1024))
    assert snapshot.rounding == Rounding(Amount(0, 1, 256), Amount(0, 1, 256))
    assert [(a.name, a.user, a.used.gpus) for a in snapshot.applications] == [
        ("probe-a", "alice", 2)
    ]
    assert len(manager.asked) == 3 + 2
    manager.snapshot(app["id"], "alice")
    assert len(manager.asked) == 3 + 2 + 3


def test_a_queue_has_its_own_largest_container() -> None:
    snapshot = recorded("capacity_no_guarantee")
    assert snapshot.largest == Amount(2, 3, 6144)
    with pytest.raises(CapacityError, match="largest container has 2 GPUs, 3 cores, 6144 MiB"):
        check_possible(Demand(Amount(0, 4, 768), 1), snapshot)


def test_a_fair_scheduler_tells_gpus_by_containers() -> None:
    manager = Recorded("fair_child")
    app = manager.answers["apps"]["apps"]["app"][0]
    snapshot = manager.snapshot(app["id"], "alice")
    assert [queue.path for queue in snapshot.queues] == ["root.p.x", "root.p", "root"]
    assert snapshot.queues[1].maximum == Amount(1, 12, 28672)
    assert snapshot.queues[1].used == Amount(1, 2, 2048)
    assert snapshot.master == Master("node1:27153", Amount(0, 1, 1024))
    assert snapshot.applications[0].used == Amount(1, 2, 2048)
    assert snapshot.user.limit is None
    assert snapshot.rounding.step == Amount(0, 1, 1024)
    assert any("appattempt_1795268632168_0004_000001/containers" in path for path in manager.asked)


def test_a_fair_scheduler_that_hides_containers() -> None:
    snapshot = recorded("fair")
    assert snapshot.master is None
    assert snapshot.applications[0].used == Amount(0, 3, 3072)
    missing = shortage(demand := Demand(Amount(1, 1, 1024), 5), snapshot)
    assert "not shown" in str(shortage_reason(snapshot, demand, missing, 0, 0.0))


def test_queues_of_a_fair_scheduler() -> None:
    queues = {queue.path: queue for queue in Recorded("fair").queues()}
    assert queues["root.pct"].maximum == Amount(2, 6, 14336)
    # An old form that names no GPU allows none, and a request for one ends the application.
    assert queues["root.old"].maximum == Amount(0, 4, 10000)
    assert queues["root.old"].largest == Amount(1, 3, 6144)


def test_labels_that_are_shared_are_asked_for() -> None:
    snapshot = recorded("capacity_labels")
    assert {node.host: node.partition for node in snapshot.nodes} == {"node1": "", "node2": "slow"}
    assert snapshot.shared == {"slow"}
    assert snapshot.queues[0].maximum == Amount(1, 3, 7168)
    assert snapshot.queues[0].used == Amount(1, 2, 1792)
    mine = next(app for app in snapshot.applications if app.user == "alice")
    assert mine.used == Amount(3, 4, 3328)
    with pytest.raises(CapacityError, match=r"plus 2 on idle nodes of other labels"):
        check_possible(Demand(Amount(1, 1, 768), 4), snapshot)


def test_a_label_that_is_asked_for() -> None:
    manager = Recorded("capacity_labels")
    app = manager.answers["apps"]["apps"]["app"][0]
    snapshot = manager.snapshot(app["id"], "alice", "slow")
    assert [node.host for node in snapshot.running] == ["node2"]
    assert snapshot.queues[0].maximum == Amount(1, 3, 7168)
    assert snapshot.master_in_queue == Amount(0, 0, 0)
    assert most_possible(snapshot, Amount(1, 1, 768)) == 1


def test_a_draining_queue_serves_those_it_has() -> None:
    snapshot = recorded("capacity_draining")
    assert snapshot.queues[0].state == "DRAINING"
    check_possible(Demand(Amount(1, 1, 768), 2), snapshot)


def test_an_application_that_is_not_running() -> None:
    with pytest.raises(HopsGpuError, match="application_1_1 among the running"):
        Recorded("fair").snapshot("application_1_1", "alice")


def node(name: str, total: Amount, used: Amount = NOTHING, **more: str) -> Node:
    state, partition = more.get("state", "RUNNING"), more.get("partition", "")
    return Node(f"{name}:1", name, state, total, used, partition)


def queue(path: str, maximum: Amount, used: Amount = NOTHING) -> Queue:
    return Queue(path, "RUNNING", "." in path, maximum, maximum, used, Amount(8, 64, 10**6))


def snap(*nodes: Node, queues: tuple[Queue, ...] = (), user: User = ALICE, **more: Any) -> Snapshot:
    whole = Amount(99, 999, 10**6)
    chain = (*queues, queue("root", whole, more.pop("used", Amount(0, 0, 0))))
    return Snapshot("application_1_0001", "", nodes, chain, user, **more)


BIG = Amount(2, 6, 14336)
TWO = (node("node1", BIG), node("node2", BIG))
ONE_GPU = Amount(1, 2, 5120)
LARGE = Amount(8, 16, 200_000)


def refusal(demand: Demand, snapshot: Snapshot) -> str:
    with pytest.raises(CapacityError) as error:
        check_possible(demand, snapshot)
    return str(error.value)


def test_a_container_that_no_node_has() -> None:
    said = refusal(Demand(Amount(3, 1, 1024), 1), snap(*TWO))
    assert "an executor of 3 GPUs, 1 core, 1024 MiB fits on no node" in said
    assert "node1 has 2 GPUs, 6 cores" in said


def test_more_executors_than_places() -> None:
    check_possible(Demand(ONE_GPU, 4), snap(*TWO))
    assert refusal(Demand(ONE_GPU, 9), snap(*TWO)) == (
        "9 executors of 1 GPU, 2 cores, 5120 MiB can never fit: the cluster's nodes have room for"
        " 4 (node1 2, node2 2); together they need 9 GPUs, 18 cores, 46080 MiB. Request at most 4"
        " of them"
    )


def test_a_node_without_room_says_why() -> None:
    broken = replace(node("node2", Amount(0, 6, 14336)), health="2 GPUs cannot be allocated")
    said = refusal(Demand(ONE_GPU, 4), snap(TWO[0], broken))
    assert "have room for 2 (node1 2; node2: 2 GPUs cannot be allocated); together" in said


def test_use_by_others_does_not_count_for_ever() -> None:
    full = (node("node1", BIG, used=BIG), node("node2", BIG, used=BIG))
    check_possible(Demand(ONE_GPU, 4), snap(*full))


def test_what_gets_no_rank_is_no_room() -> None:
    whole = snap(*TWO)
    one = whole.excluding(Exclusions(gpus=frozenset({("node2", "GPU-a")})))
    assert most_possible(one, ONE_GPU) == 3
    assert most_possible(one, Amount(0, 2, 1024)) == most_possible(whole, Amount(0, 2, 1024))
    assert most_possible(whole.excluding(Exclusions(hosts=frozenset({"node1"}))), ONE_GPU) == 2
    assert most_possible(whole.excluding(Exclusions()), ONE_GPU) == 4


@pytest.mark.parametrize("state", ["LOST", "UNHEALTHY", "DECOMMISSIONED", "DECOMMISSIONING"])
def test_only_running_nodes_count(state: str) -> None:
    nodes = (TWO[0], node("node2", BIG, state=state))
    assert most_possible(snap(*nodes), ONE_GPU) == 2


def test_the_application_master_takes_its_place() -> None:
    # 6 cores: three executors of 2 cores, two beside a master.
    master = Master("node1:1", Amount(0, 1, 1024))
    assert most_possible(snap(*TWO), Amount(0, 2, 1024)) == 6
    assert most_possible(snap(*TWO, master=master), Amount(0, 2, 1024)) == 5
    said = refusal(Demand(Amount(0, 6, 1024), 2), snap(*TWO, master=master))
    assert "room for 1 (node2 1) beside this application's master on node1" in said


def test_a_container_for_the_whole_node_of_the_master() -> None:
    alone = snap(TWO[0], master=Master("node1:1", Amount(0, 1, 1024)))
    said = refusal(Demand(Amount(2, 6, 1024), 1), alone)
    assert "room for 0 (on no node)" in said
    assert "Lower memory_per_worker" in said


def test_spread_takes_one_of_each_node() -> None:
    check_possible(Demand(ONE_GPU, 2, is_spread=True), snap(*TWO))
    assert "room for 2 (node1 1, node2 1)" in refusal(
        Demand(ONE_GPU, 3, is_spread=True), snap(*TWO)
    )


def test_containers_are_rounded_up_before_they_are_counted() -> None:
    rounding = Rounding(Amount(0, 1, 1024), Amount(0, 1, 1024))
    wanted = Amount(0, 1, 3600)
    assert most_possible(snap(TWO[0]), wanted) == 3
    assert most_possible(snap(TWO[0], rounding=rounding), wanted) == 3
    assert most_possible(snap(TWO[0], rounding=rounding), Amount(0, 1, 4700)) == 2
    # 14336 / 2389.3 is 6, and 14336 / 3072 is 4.
    assert most_possible(snap(TWO[0]), Amount(0, 1, 2300)) == 6
    assert most_possible(snap(TWO[0], rounding=rounding), Amount(0, 1, 2300)) == 4


def test_rounding_stays_within_the_largest_container() -> None:
    rounding = Rounding(Amount(0, 1, 10000), Amount(0, 1, 10000))
    leaf = dataclasses.replace(queue("root.a", BIG), largest=BIG)
    snapshot = snap(*TWO, queues=(leaf,), rounding=rounding)
    assert snapshot.granted_size(Amount(1, 1, 12000)) == Amount(1, 1, 14336)


@pytest.mark.parametrize(
    ("maximum", "possible"),
    [
        (Amount(2, 12, 28672), 2),
        (Amount(4, 3, 28672), 1),
        (Amount(4, 12, 10240 + 1024), 2),
        (Amount(4, 12, 10240 + 1023), 1),
        (Amount(0, 12, 28672), 0),
    ],
)
def test_a_queues_maximum_holds_for_each_resource(maximum: Amount, possible: int) -> None:
    master = Master("node1:1", Amount(0, 1, 1024))
    leaf = queue("root.a.b", Amount(4, 12, 28672))
    below = snap(*TWO, queues=(leaf, queue("root.a", maximum)), master=master)
    assert most_possible(below, ONE_GPU) == possible
    said = refusal(Demand(ONE_GPU, 3), below)
    assert f"queue root.a may have at most {maximum} (its effective maximum)" in said
    assert "3 executors of 1 GPU" in said
    assert "together they need 3 GPUs, 6 cores, 15360 MiB" in said


def test_the_tightest_bound_is_the_one_that_is_told() -> None:
    chain = (queue("root.a.b", Amount(3, 12, 28672)), queue("root.a", Amount(2, 12, 28672)))
    assert "queue root.a may" in refusal(Demand(ONE_GPU, 9), snap(*TWO, queues=chain))


def test_a_stopped_queue() -> None:
    stopped = dataclasses.replace(queue("root.a", BIG), state="STOPPED")
    assert "queue root.a is STOPPED" in refusal(Demand(ONE_GPU, 1), snap(*TWO, queues=(stopped,)))


@pytest.mark.parametrize(
    ("limit", "container", "possible"),
    [
        (None, ONE_GPU, 4),
        # At the limit, and less of the other resources: one more is granted.
        (Amount(2, 6, 14336), Amount(1, 1, 768), 3),
        (Amount(1, 3, 7168), Amount(1, 1, 768), 2),
        # All shares at the limit or above: none.
        (Amount(1, 1, 256), Amount(2, 1, 768), 1),
        (Amount(0, 1, 256), Amount(1, 1, 768), 0),
        (Amount(0, 2, 256), Amount(1, 1, 768), 1),
        # Cores can be the dominant resource of a gang with GPUs.
        (Amount(2, 4, 14336), Amount(1, 3, 768), 2),
    ],
)
def test_a_users_limit_is_looked_at_before_a_container_is_added(
    limit: Amount | None, container: Amount, possible: int
) -> None:
    master = Master("node1:1", Amount(0, 1, 1024))
    snapshot = snap(*TWO, queues=(queue("root.a", Amount(4, 12, 28672)),), master=master)
    snapshot = dataclasses.replace(snapshot, user=User("alice", limit=limit))
    expected = min(
        possible, most_possible(dataclasses.replace(snapshot, user=User("x")), container)
    )
    assert most_possible(snapshot, container) == expected == possible
    if limit is not None:
        said = refusal(Demand(container, 9), snapshot)
        assert (
            "user alice gets no more containers in queue root.a once above" in said or possible >= 4
        )


def test_equal_shares_are_not_more() -> None:
    cluster = Amount(4, 12, 28672)
    assert not exceeds_share(Amount(2, 6, 14336), Amount(2, 6, 14336), cluster)
    assert not exceeds_share(Amount(1, 6, 14336), Amount(2, 6, 7168), cluster)
    assert exceeds_share(Amount(2, 6, 14337), Amount(2, 6, 14336), cluster)
    assert not exceeds_share(Amount(3, 0, 0), Amount(0, 1, 0), Amount(0, 12, 28672))


def test_factors_are_32_bit_floats() -> None:
    assert multiply_rounding_down(Amount(10, 10, 10), 0.7) == Amount(6, 6, 6)
    assert multiply_rounding_down(Amount(10, 10, 10), 0.5) == Amount(5, 5, 5)
    assert multiply_rounding_down(Amount(1, 3, 7168), 2.0) == Amount(2, 6, 14336)


def test_a_users_weight_multiplies_the_limit() -> None:
    manager = Recorded("capacity_over")
    leaf = manager.answers["scheduler"]["scheduler"]["schedulerInfo"]["queues"]["queue"][0]
    leaf["users"]["user"][0]["userWeight"] = 0.5
    app = manager.answers["apps"]["apps"]["app"][0]
    assert manager.snapshot(app["id"], "alice").user.limit == Amount(1, 3, 7168)


def test_a_gang_without_gpus_uses_all_nodes() -> None:
    nodes = (*TWO, node("node3", Amount(0, 16, 65536)))
    assert most_possible(snap(*nodes), Amount(0, 4, 4096)) == 6
    assert most_possible(snap(*nodes), Amount(1, 4, 4096)) == 2


def test_nodes_with_a_label_are_not_ours_unless_they_are_shared() -> None:
    nodes = (TWO[0], node("node2", BIG, partition="slow"))
    assert most_possible(snap(*nodes), ONE_GPU) == 2
    chain = (queue("root.a", Amount(1, 3, 7168)),)
    assert most_possible(snap(*nodes, queues=chain), ONE_GPU) == 1
    # Idle nodes of a shared partition are granted beside the queue's maximum.
    shared = snap(*nodes, queues=chain, shared=frozenset({"slow"}))
    assert most_possible(shared, ONE_GPU) == 3


def test_wanting_some_nodes_only_changes_nobodys_share() -> None:
    """A user's limit is of the whole cluster, and so are the shares by which it is passed."""
    nodes = (*(node(f"cpu{n}", Amount(0, 100, 400_000)) for n in range(10)), node("gpus", LARGE))
    user = User("alice", limit=Amount(4, 508, 2_100_000))
    there = snap(*nodes, user=user, master=Master("cpu0:1", Amount(0, 1, 1024)))
    few = there.limited_to(frozenset({"gpus"})).excluding(
        Exclusions(gpus=frozenset({("gpus", "GPU-1")}))
    )
    one = Amount(1, 1, 4096)
    assert most_possible(there, one) == most_possible(few, one) == 5
    assert few.master_in_queue == there.master_in_queue == Amount(0, 1, 1024)
    assert [(n.host, n.total.gpus) for n in few.running] == [("gpus", 7)]


def test_cores_per_gpu_of_nodes_without_gpus() -> None:
    assert cores_per_gpu((node("n", Amount(0, 16, 1)),)) == 1


# Now.


def used(*amounts: Amount) -> tuple[Node, ...]:
    return tuple(node(f"node{i}", BIG, used=amount) for i, amount in enumerate(amounts, 1))


@pytest.mark.parametrize(
    ("container", "executors", "in_use", "bound", "lacks_gpus", "words"),
    [
        ((1, 2, 5120), 4, [(0, 0, 0), (0, 0, 0)], Bound.NONE, True, ""),
        (
            (1, 2, 5120),
            3,
            [(2, 2, 2048), (1, 1, 1024)],
            Bound.CLUSTER,
            True,
            "needs 3 GPUs, 1 is free",
        ),
        (
            *((2, 2, 2048), 1, [(1, 1, 1024), (1, 1, 1024)], Bound.NODES, True),
            "no node has 2 GPUs free",
        ),
        (
            *((1, 2, 2048), 3, [(0, 5, 1024), (0, 1, 1024)], Bound.NODES, False),
            "node1 has 2 GPUs free but only 1 of 6 cores",
        ),
        (
            *((1, 1, 4096), 4, [(0, 1, 10240), (0, 1, 1024)], Bound.NODES, False),
            "node1 has 2 GPUs free but only 4096 of 14336 MiB",
        ),
        (
            *((0, 4, 2048), 3, [(0, 1, 1024), (0, 1, 1024)], Bound.CLUSTER, False),
            "needs 12 cores, 10 are free",
        ),
        (
            *((0, 4, 2048), 1, [(0, 3, 1024), (0, 3, 1024)], Bound.NODES, True),
            "no node has 4 cores and 2048 MiB free",
        ),
    ],
)
def test_what_nodes_lack(
    container: tuple[int, int, int],
    executors: int,
    in_use: list[tuple[int, int, int]],
    bound: Bound,
    lacks_gpus: bool,
    words: str,
) -> None:
    there = snap(*used(*(Amount(*each) for each in in_use)))
    found = shortage(Demand(Amount(*container), executors), there)
    assert (found.bound, found.queue, found.is_gpu_shortage) == (bound, "", lacks_gpus)
    assert found.text.startswith(words)


def test_executors_that_are_there_are_not_missing() -> None:
    assert shortage(Demand(ONE_GPU, 3), snap(*used(Amount(2, 2, 2048), ONE_GPU)), 2).text == ""
    assert shortage(Demand(ONE_GPU, 3), snap(*used(BIG, BIG)), 3).bound is Bound.NONE


def test_a_spread_gang_waits_for_nodes() -> None:
    there = snap(*used(Amount(2, 2, 2048), NOTHING))
    found = shortage(Demand(ONE_GPU, 2, is_spread=True), there)
    assert found.bound is Bound.NODES
    assert found.text == "needs 2 nodes with room for an executor, 1 has it"
    assert found.details == "free: node1 0 of 2, node2 2 of 2"


@pytest.mark.parametrize(
    ("container", "used_gpus", "words"),
    [
        (ONE_GPU, 2, "queue root.a is at its limit (2 of 2 GPUs in use)"),
        (ONE_GPU, 1, "queue root.a has 1 of 2 GPUs left, 2 are needed"),
        (Amount(1, 4, 1024), 0, "queue root.a has 3 of 6 cores left, 8 are needed"),
    ],
)
def test_what_a_queue_lacks(container: Amount, used_gpus: int, words: str) -> None:
    there = snap(*TWO, queues=(queue("root.a", BIG, used=Amount(used_gpus, 3, 2560)),))
    found = shortage(Demand(container, 2), there)
    assert (found.bound, found.text, found.queue) == (Bound.QUEUE, words, "root.a")
    assert found.is_gpu_shortage is ("GPUs" in words)


@pytest.mark.parametrize(
    ("in_use", "held", "words"),
    [
        (4, 2, "queue root.a has 2 of 4 GPUs left, 4 are needed"),
        (4, 0, "queue root.a is at its limit (4 of 4 GPUs in use)"),
        (5, 1, "queue root.a is at its limit (4 of 4 GPUs in use)"),
    ],
)
def test_what_the_gang_has_of_a_limit_is_no_reason(in_use: int, held: int, words: str) -> None:
    """Seen: a gang of 4 that had 2 waited because "4 of 4 GPUs" of its queue were in use."""
    limit = queue("root.a", Amount(4, 40, 80000), used=Amount(in_use, 10, 25600))
    free = node("node3", Amount(8, 24, 57344))
    assert shortage(Demand(ONE_GPU, 4), snap(free, queues=(limit,)), held).text == words


def test_what_the_gang_has_of_a_users_limit_is_no_reason() -> None:
    user = User("alice", Amount(3, 6, 15360), Amount(2, 4, 10240))
    there = snap(node("node1", Amount(8, 24, 57344)), queues=(queue("root.a", LARGE),), user=user)
    found = shortage(Demand(ONE_GPU, 4), there, held=2)
    assert found.text.startswith("user alice gets 2 more of 4 executors in queue root.a")
    assert found.details.startswith("alice has 1 GPU, 2 cores, 5120 MiB; the limit is 2 GPUs")


def test_a_parents_limit_is_told_rather_than_full_nodes() -> None:
    """More nodes would not help. They bind too."""
    chain = (queue("root.a.b", BIG), queue("root.a", BIG, used=Amount(2, 3, 2560)))
    found = shortage(Demand(ONE_GPU, 1), snap(*used(BIG, BIG), queues=chain))
    assert (found.bound, found.queue) == (Bound.CLUSTER, "root.a") and "at its limit" in found.text


def test_what_a_user_lacks() -> None:
    user = User("alice", Amount(2, 3, 2560), Amount(1, 3, 7168))
    there = snap(*TWO, queues=(queue("root.a", Amount(4, 12, 28672)),), user=user)
    found = shortage(Demand(ONE_GPU, 1), there)
    assert (found.bound, found.queue) == (Bound.USER, "root.a")
    assert "alice is at the user limit" in found.text and "is 1 GPU, 3 cores" in found.details


def test_no_node_runs() -> None:
    gone = snap(node("node1", BIG, state="LOST"))
    found = shortage(Demand(ONE_GPU, 1), gone)
    assert (found.bound, found.text) == (Bound.CLUSTER, "needs 1 GPU, 0 are free")


# Queues.


def queues_there() -> tuple[Queue, ...]:
    return Recorded("capacity_half").queues()


@pytest.mark.parametrize("name", ["a", "root.a", "x", "root.p.x", "default"])
def test_a_queue_that_takes_applications(name: str) -> None:
    check_queue(name, queues_there())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nosuch", "there is no queue nosuch"),
        ("p.x", "there is no queue p.x"),
        ("p", "queue root.p is a parent"),
        ("root", "queue root is a parent"),
        ("closed", "queue root.closed is STOPPED"),
    ],
)
def test_a_queue_that_takes_none(name: str, why: str) -> None:
    with pytest.raises(CapacityError, match=why) as error:
        check_queue(name, queues_there())
    assert "Running queues: root.a, root.b, root.c, root.p.x, root.p.y; name" in str(error.value)


def test_a_name_that_several_queues_have() -> None:
    both = (queue("root", BIG), queue("root.a.x", BIG), queue("root.b.x", BIG))
    with pytest.raises(CapacityError, match=r"root\.a\.x, root\.b\.x"):
        check_queue("x", both)
    check_queue("root.b.x", both)


def test_a_fair_scheduler_makes_queues() -> None:
    queues = Recorded("fair").queues()
    for name in ("a", "root.a", "p.x", "new", "root.p.new"):
        check_queue(name, queues)
    with pytest.raises(CapacityError, match=r"root\.p is a parent"):
        check_queue("p", queues)


def test_a_draining_queue_takes_no_new_applications() -> None:
    with pytest.raises(CapacityError, match=r"root\.a is DRAINING"):
        check_queue("a", Recorded("capacity_draining").queues())


def test_the_chain_of_a_queue() -> None:
    assert [q.path for q in chain_of(queues_there(), "x")] == ["root.p.x", "root.p", "root"]
    with pytest.raises(HopsGpuError, match="has no queue nosuch; it has: root"):
        chain_of(queues_there(), "nosuch")


def test_a_queue_has_its_path() -> None:
    paths = ["root", "root.a", "root.ml", "root.ml.prod", "root.b", "root.b.a"]
    assert queue_path("root.ml.prod", paths) == "root.ml.prod"
    assert queue_path("prod", paths) == "root.ml.prod"
    assert queue_path("a", paths) == "root.a"  # of two the one below the root
    assert queue_path("gone", []) == "root.gone"
    assert queue_path("", paths) == ""
