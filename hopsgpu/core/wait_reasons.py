"""Why a run does not train yet: one sentence and details for each state. Pure.

A sentence says what happens now, or what is missing and who has it. The sentences that need the
cluster manager's numbers are in `hopsgpu.cluster_managers.wait_message`, and
tests/unit/cluster_managers/test_wait_reasons.py lists all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hopsgpu.core.html import plain_line
from hopsgpu.units import count_of

LONGEST_SENTENCE = 100
_LONGEST_NAME = 30
_HOSTS_SHOWN = 4


@dataclass(frozen=True)
class WaitReason:
    """Why a run does not train yet; false if it does not wait.

    Attributes:
        sentence: the sentence that people read first, without a full stop; "" for no wait.
        details: further phrases, the most useful first.
        lack: what is missing and who has it, without numbers that change; "" if nothing is
            missing. A run's history keeps only reasons with a lack, and merges equal ones.
    """

    sentence: str = ""
    details: tuple[str, ...] = ()
    lack: str = ""

    def __bool__(self) -> bool:
        return bool(self.sentence)

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.sentence, *self.details)))

    def with_details(self, *details: str) -> WaitReason:
        """Return the reason with further details, of which "" and known ones are left out."""
        new = tuple(d for d in dict.fromkeys(details) if d and d not in self.details)
        return dataclasses.replace(self, details=self.details + new)

    def before(self, other: WaitReason) -> WaitReason:
        """Return this reason with the other one as its details; the other one if this is none."""
        if not self:
            return other
        lack = "; ".join(filter(None, (self.lack, other.lack)))
        combined = self.with_details(other.sentence, *other.details)
        return dataclasses.replace(combined, lack=lack)

    def join(self, other: WaitReason) -> WaitReason:
        """Return what `before` returns, but with both in the sentence if it is short enough."""
        combined = self.before(other)
        sentence = f"{self.sentence}; {_lower_first(other.sentence)}"
        if not (self and other) or len(sentence) > LONGEST_SENTENCE:
            return combined
        details = tuple(d for d in combined.details if d != other.sentence)
        return dataclasses.replace(combined, sentence=sentence, details=details)


NO_WAIT = WaitReason()


def capitalise(text: str) -> str:
    """Return a text with a capital first letter; the other letters stay."""
    return text[:1].upper() + text[1:]


def _lower_first(text: str) -> str:
    """Return a sentence as it is written after a semicolon; a word such as YARN stays."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def name_application(name: str, user: str, application: str) -> str:
    """Return what people call an application: its name if it has one, and its user."""
    shown = f"'{plain_line(name, _LONGEST_NAME)}'" if name else application or "a gang"
    return f"{shown} of {user}"


def list_hosts(hosts: Sequence[str]) -> str:
    """Return hosts without duplicates: "node1", "node1 and node2", "node1, node2 and 7 more"."""
    names = sorted(set(hosts))
    if len(names) > _HOSTS_SHOWN:
        return f"{', '.join(names[: _HOSTS_SHOWN - 1])} and {len(names) - _HOSTS_SHOWN + 1} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))


# Preparing.


def preparing_environment(name: str) -> WaitReason:
    return WaitReason(
        f"Preparing the Python environment {name}", ("it is built if the lake lacks it",)
    )


def storing_script(name: str) -> WaitReason:
    return WaitReason(
        f"Storing {name} with its directory on the lake", ("it is sent again only after a change",)
    )


def writing_data(label: str, ended: int, running: int, tasks: int) -> WaitReason:
    """Return the reason while Spark writes a DataFrame of `label`.

    Args:
        tasks: number of tasks that Spark has planned so far, of which `ended` have ended.
    """
    if not tasks:
        return WaitReason(f"Writing {label}: Spark is planning it")
    sentence = f"Writing {label}: {ended:,} of {count_of(tasks, 'task')}"
    if running or ended == tasks:
        return WaitReason(sentence)
    sentence = f"{sentence}; none runs, because Spark waits for executors"
    return WaitReason(sentence, (), "Spark's executors")


def reading_footers(label: str, read: int = 0, files: int = 0) -> WaitReason:
    progress = f": {read:,} of {count_of(files, 'file')}" if files else ""
    return WaitReason(f"Reading the footers of {label}{progress}")


def other_launch() -> WaitReason:
    return WaitReason(
        "Another launch uses the gang; this one runs after it", ("the data is ready",), "the gang"
    )


# In the queue of gangs.


def other_gangs_turn(who: str) -> WaitReason:
    """Return the reason while another gang may request executors; `who` is "" if it is unknown."""
    if not who:
        return WaitReason("Another gang took its turn first", (), "the turn")
    return WaitReason(
        f"Another gang's turn: {who} requests its executors", (), f"the turn of {who}"
    )


def behind_gangs(ahead: int, first: str, executors: int, gpus: int) -> WaitReason:
    """Return the reason while other gangs go first.

    Args:
        ahead: number of gangs ahead in the queue, at least 1.
        first: who has the first one, which needs `executors` with `gpus` each.
    """
    needed = count_of(executors * gpus, "GPU") if gpus else count_of(executors, "executor")
    first_gang = f"{first}, which needs {needed}"
    if ahead > 1:
        first_gang = f"the first is {first_gang}"
    sentence = f"Behind {count_of(ahead, 'gang')} in the queue: {first_gang}"
    return WaitReason(sentence, (), f"the gangs ahead, first {first}")


def unreadable_queue(error: str) -> WaitReason:
    return WaitReason("Cannot read the queue of gangs; tries again", (error,), "the queue of gangs")


def other_run() -> WaitReason:
    return WaitReason(
        "Another run of this application is acquiring its executors", (), "the other run's end"
    )


def silent_manager(error: str) -> WaitReason:
    lack = "the cluster manager's answer"
    return WaitReason("Cannot read the cluster's state; tries again", (error,), lack)


def waiting_for_kueue(queue: str, message: str) -> WaitReason:
    """Return the reason while Kueue does not admit a gang.

    Args:
        queue: name of the LocalQueue.
        message: what Kueue says; "" if it has said nothing yet.
    """
    says = message or f"the gang waits in the LocalQueue {queue}"
    sentence = plain_line(f"Kueue: {says}", LONGEST_SENTENCE)
    details = (f"LocalQueue {queue}",) if message else ()
    if len(says) + len("Kueue: ") > LONGEST_SENTENCE:
        details = (message, *details)
    return WaitReason(sentence, details, f"quota of Kueue's LocalQueue {queue}")


# Acquiring.


def requesting(executors: int) -> WaitReason:
    return WaitReason(f"Requesting {count_of(executors, 'executor')}")


def granted_part(granted: int, wanted: int, short: WaitReason) -> WaitReason:
    """Return the reason while a part of the executors is granted.

    Args:
        short: why the rest is not granted; `NO_WAIT` if all seems free.
    """
    if not granted and short:
        return short
    if not granted:
        return requesting(wanted)
    verb = "is" if granted == 1 else "are"
    sentence = f"{granted:,} of {count_of(wanted, 'executor')} {verb} granted"
    return WaitReason(sentence).join(short)


def starting_executors(
    starting: Sequence[str], ready: Sequence[str], image: str | None = None
) -> WaitReason:
    """Return the reason while granted executors start.

    Args:
        starting: host of each executor that is granted and has not arrived.
        ready: host of each executor that has arrived.
        image: container image of the executors, or None.
    """
    if not starting:
        return NO_WAIT
    more = " more" if ready else ""
    count = f"{len(starting):,}{more} {'executor' if len(starting) == 1 else 'executors'}"
    sentence = f"Starting {count} on {list_hosts(starting)}"
    present = f"{len(ready)} ready on {list_hosts(ready)}" if ready else ""
    pull = f"a node without the image {image} pulls it first" if image else ""
    return WaitReason(sentence, tuple(filter(None, (present, pull))))


def parked_executors(reasons: Sequence[str], count: int) -> WaitReason:
    """Return the reason while executors are kept that cannot get a rank."""
    text = ", ".join(sorted(set(reasons)))
    verb = "gets" if count == 1 else "get"
    sentence = f"{count_of(count, 'executor')} {verb} no rank: {text}"
    return WaitReason(sentence, ("requests another",), f"a usable GPU: {text}")


def ended_executors(
    hosts: Sequence[str], last: str, rest: WaitReason, cause: str = "", remedy: str = ""
) -> WaitReason:
    """Return the reason after executors have ended before they arrived.

    Args:
        hosts: host of each executor that ended.
        last: ID of the last of their containers.
        rest: what happens now.
        cause: why the last of them ended whose end is explained; "" if it explains none.
        remedy: what helps, or "".
    """
    where = list_hosts(hosts)
    sentence = f"{count_of(len(hosts), 'executor')} ended unexpectedly on {where}"
    if cause:
        details = tuple(filter(None, (remedy, f"see the node's log of {last}")))
        return WaitReason(f"{sentence}: {cause}", details, f"executors that stay on {where}").join(
            rest
        )
    see = (
        f"see the node's log of {last} (a GPU that cannot be discovered, memory, Python, the node's"
        " clock, preemption?)"
    )
    return WaitReason(sentence, (see,), f"executors that stay on {where}").join(rest)


def ending_surplus() -> WaitReason:
    return WaitReason(
        "All executors have arrived", ("waits until surplus executors of this application end",)
    )


def replacing_executors(hosts: Sequence[str]) -> WaitReason:
    return WaitReason(
        f"Replacing executors that share a node ({list_hosts(hosts)})", (), "separate nodes"
    )


def gave_back(granted: int, wanted: int, times: int) -> WaitReason:
    """Return the reason in the pause after a partial allocation was given back."""
    what = "No executor was granted; others go first"
    if granted:
        what = f"Gave {granted:,} of {count_of(wanted, 'executor')} back, so that others go first"
    sentence = f"{what}; asks again soon"
    return WaitReason(sentence, (f"time {times}, pauses of up to 31 s",), "the rest of the gang")


def gave_all_back() -> WaitReason:
    return WaitReason(
        "Gave its executors back, because the others did not arrive; asks again soon",
        (),
        "the rest of the gang",
    )


def withdrew_requests(executors: int, times: int) -> WaitReason:
    """Return the reason in the pause after executors have ended repeatedly."""
    requests = count_of(executors, "request")
    sentence = f"Withdrew {requests} for executors, which ended repeatedly; asks again soon"
    return WaitReason(sentence, (f"time {times}, pauses of up to 31 s",), "executors that stay")


# Starting ranks.


def starting_ranks(ranks: int, running: int = 0, python_env: str = "") -> WaitReason:
    """Return the reason until the function runs in all ranks.

    Args:
        python_env: name of the Python environment that nodes unpack first; "" for none.
    """
    start = f"Starting {count_of(ranks, 'rank')}"
    if running:
        return WaitReason(f"{start}: {running:,} of them run{'s' if running == 1 else ''}")
    if python_env:
        start = f"{start}: importing modules in the Python environment {python_env}"
        return WaitReason(start, ("nodes that lack it unpack it first",))
    return WaitReason(f"{start}: importing modules")


# Elastic gangs, searches and scores.


def loading_frameworks(executors: int) -> WaitReason:
    verb = "cannot start ranks yet: frameworks load"
    return WaitReason(f"{count_of(executors, 'executor')} {verb}")


def resizing(*, is_growth: bool) -> WaitReason:
    size = "larger" if is_growth else "smaller"
    return WaitReason(f"The ranks start again as a {size} world")


def giving(executors: int, gpus: int) -> WaitReason:
    what = count_of(executors * gpus, "GPU") if gpus else count_of(executors, "executor")
    return WaitReason(f"Gives {what} to waiting gangs at its next checkpoint")


def growing(executors: int) -> WaitReason:
    return WaitReason(f"Grows by {count_of(executors, 'executor')} at its next checkpoint")


def missing_executors(executors: int, short: WaitReason) -> WaitReason:
    """Return the reason of a run that works and wants more executors."""
    more = f"{executors:,} more {'executor' if executors == 1 else 'executors'}"
    return WaitReason(f"Wants {more}", (), "more executors").join(short)


# On a local master.


def starting_process() -> WaitReason:
    return WaitReason("Starting a process for the ranks on this machine")


def other_gang_here() -> WaitReason:
    return WaitReason("Another gang on this machine waits for GPUs first", (), "the turn here")


def leased_gpus(wanted: int, leased: int, reasons: Sequence[str]) -> WaitReason:
    """Return the reason while other processes have this machine's GPUs.

    Args:
        leased: how many of the wanted GPUs are leased for the run.
        reasons: who has which GPU, in words.
    """
    verb = "is" if leased == 1 else "are"
    sentence = f"Needs {count_of(wanted, 'GPU')} of this machine, {leased} {verb} free"
    details = tuple(reasons) or ("another process has just leased a GPU",)
    return WaitReason(sentence, details, "GPUs of this machine")
