"""When the ranks of an attempt are stopped, given up, or taken for lost, by any clock."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.attempts.attempt_watcher import AttemptWatcher, Step, WatchBounds
from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.outcome import RankEnds
from hopsgpu.control.channel import Message
from hopsgpu.core.gang import GangExecutor, World, assign_ranks

BOUNDS = WatchBounds(stop=10.0, alike=1.0, quiet=2.0, saving=60.0)
OUTPUT = Message("output", {"rank": 1})
SAVING = Message("saving", {"rank": 1})


class Watched:
    """An attempt of two ranks, which began at 0, and its watcher."""

    def __init__(self, timeout: float | None = None, servers: int = 0) -> None:
        names = ("c", "node", "10.0.0.1", ())
        self.world: World = assign_ranks([GangExecutor(n, *names) for n in (0, 1)], 1, servers)
        self.ends = RankEnds(self.world, str)
        self.watcher = AttemptWatcher(self.ends, timeout, BOUNDS)
        self.watcher.start_timeout(0.0)

    def decide(
        self, now: float, *, is_cancelled: bool = False, have_gpus_idled: bool = False
    ) -> Step:
        return self.watcher.decide(
            is_cancelled=is_cancelled, now=now, have_gpus_idled=have_gpus_idled
        )

    def end(self, rank: int, now: float, status: str = "returned", **known: Any) -> bool:
        place, stopped = self.world.processes[rank], known.get("stopped", False)
        outcome = {"status": status, "error": "E"}
        return self.watcher.record_end(RankExit(place, now, 1, None, outcome, (), stopped), now)

    def lose(self, rank: int, now: float) -> bool:
        return self.watcher.record_loss(self.world.processes[rank], "closed", at=1e9 + now, now=now)


def test_ranks_that_run_are_waited_for() -> None:
    watched = Watched()
    assert watched.decide(1e6) is Step.WAIT
    assert not watched.end(0, 1e6)
    assert watched.decide(1e6) is Step.WAIT and watched.ends.pending == {1}


def test_a_cancelled_run_is_stopped_once_and_given_up_when_nobody_answers() -> None:
    watched = Watched()
    assert watched.decide(5.0, is_cancelled=True) is Step.STOP
    assert watched.decide(15.0, is_cancelled=True) is Step.WAIT
    assert watched.decide(15.1, is_cancelled=True) is Step.GIVE_UP


def test_signs_of_life_put_off_the_end_but_not_for_ever_those_of_an_upload() -> None:
    watched = Watched()
    watched.watcher.record_message(SAVING, 1.0)
    assert watched.decide(5.0, is_cancelled=True) is Step.STOP
    watched.watcher.record_message(OUTPUT, 14.0)
    assert watched.decide(24.0) is Step.WAIT
    watched.watcher.record_message(SAVING, 24.0)
    assert watched.decide(34.0) is Step.WAIT
    watched.watcher.record_message(SAVING, 61.0)
    assert watched.decide(61.0) is Step.GIVE_UP


def test_ranks_that_are_late_are_stopped_with_their_stacks_except_those_that_only_save() -> None:
    watched = Watched(timeout=8.0)
    watched.watcher.record_message(SAVING, 7.0)
    assert watched.decide(7.9) is Step.WAIT
    assert watched.decide(8.0) is Step.DUMP_AND_STOP
    assert watched.watcher.overdue == (0,)
    only_saves = Watched(timeout=8.0)
    only_saves.end(0, 7.0)
    only_saves.watcher.record_message(SAVING, 7.0)
    assert only_saves.decide(9.0) is Step.WAIT and not only_saves.watcher.overdue


@pytest.mark.parametrize(
    ("status", "waits"), [("raised", True), ("exited", False), ("over memory", False)]
)
def test_others_have_a_moment_to_raise_the_same_exception(status: str, waits: bool) -> None:
    watched = Watched()
    assert watched.end(0, 3.0, status)
    assert watched.decide(3.9) is (Step.WAIT if waits else Step.STOP)
    assert watched.decide(4.0) is (Step.STOP if waits else Step.WAIT)


def test_a_rank_that_is_about_to_fail_has_the_others_stopped_while_it_saves() -> None:
    watched = Watched(timeout=3.5)
    watched.watcher.record_failure(3.0, has_raised=False)
    # It has failed, and is not too late.
    assert watched.decide(4.0) is Step.STOP and not watched.watcher.overdue
    assert not watched.end(0, 5.0, "raised"), "the failure was seen before"


def test_a_lost_executor_has_the_others_stopped_at_once() -> None:
    watched = Watched()
    watched.end(0, 1.0)
    assert not watched.lose(0, 2.0), "its rank had returned"
    assert watched.decide(2.0) is Step.WAIT
    assert watched.lose(1, 3.0) and not watched.lose(1, 3.0)
    assert watched.decide(3.0) is Step.STOP and not watched.ends.pending


def test_rank_that_hopsgpu_stopped_is_no_failure() -> None:
    watched = Watched()
    assert not watched.end(0, 1.0, "raised", stopped=True)
    assert watched.decide(9.0) is Step.WAIT


def test_parameter_servers_are_stopped_once_the_chief_has_returned() -> None:
    watched = Watched(servers=1)
    watched.end(1, 1.0)
    assert watched.decide(1.0) is Step.WAIT
    watched.end(0, 2.0)
    assert watched.decide(2.0) is Step.STOP


def test_an_agent_is_taken_for_lost_when_its_job_has_ended_and_all_is_quiet() -> None:
    watcher = Watched().watcher

    def presumed(now: float, *, has_event: bool = False, ended: bool = True) -> int | None:
        return watcher.find_presumed_lost({4, 3} if ended else set(), has_event=has_event, now=now)

    assert presumed(1.0, ended=False) is None and presumed(9.0) is None
    assert presumed(10.9) is None and presumed(11.0) == 3 and presumed(11.0) == 3
    assert presumed(12.0, has_event=True) is None and presumed(13.0) is None
    assert presumed(15.0) == 3
    assert watcher.find_presumed_lost(set(), has_event=False, now=99.0) is None


def test_ranks_that_leave_their_gpus_idle_are_stopped_once_with_their_stacks() -> None:
    watched = Watched()
    assert watched.decide(5.0, have_gpus_idled=True) is Step.DUMP_AND_STOP
    assert watched.decide(6.0, have_gpus_idled=True) is Step.WAIT
    assert not watched.watcher.has_failed and not watched.watcher.overdue
