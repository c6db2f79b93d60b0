"""Executors, worlds and GPU seconds on the board of an elastic gang, with a clock of the test."""

from __future__ import annotations

import pytest

from hopsgpu.attempts.rank_table import RankTable
from hopsgpu.core.gang import GangExecutor, GangState, assign_ranks
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.display.progress import progress_of
from hopsgpu.launcher.elastic_board import ElasticBoard
from hopsgpu.launcher.elastic_policy import WorldEnd


class Gang:
    """A board of executors with two GPUs each, one rank per GPU, and the clock that it reads.

    Args:
        executors: number of executors of a first world, which starts at once; 0 for no world.
    """

    def __init__(self, gpus: int = 2, executors: int = 0) -> None:
        self.now = 1000.0
        progress = progress_of("off")
        self.board = ElasticBoard("run-1", 4, gpus, progress, (2, 8), lambda: self.now)
        self.board.state(GangState.WAITING)
        if executors:
            self.hold(executors)
            self.begin(executors)

    def at(self, second: float) -> ElasticBoard:
        """Set the clock to so many seconds after the request."""
        self.now = 1000.0 + second
        return self.board

    def hold(self, held: int, ready: int | None = None, wanted: int = 4, why: str = "") -> None:
        hosts = [f"node{n}" for n in range(held if ready is None else ready)]
        self.board.record_executors(held, hosts, wanted, WaitReason(why))

    def begin(self, executors: int) -> None:
        self.board.start_world([f"node{n}" for n in range(executors)], 2 * executors)
        if self.board.status().state == "waiting":
            self.board.mark("granted")
            self.board.state(GangState.GRANTED)
        self.board.state(GangState.READY)
        self.board.state(GangState.STARTING)

    def enter(self, second: float) -> None:
        self.at(second).record_entry(1000.0 + second)
        self.board.state(GangState.RUNNING)

    def finish(self, second: float, how: WorldEnd) -> None:
        self.at(second).record_return()
        self.board.mark("returned")
        self.board.record_end(how, "")

    def release(self, second: float) -> None:
        self.at(second).state(GangState.RELEASING)
        self.board.mark("released")


def spent(gang: Gang) -> tuple[float, float, float, float]:
    seconds = gang.board.result().gpu_seconds
    return seconds.held, seconds.training, seconds.publishing, seconds.idle


def grown() -> Gang:
    """Return a gang with a world of 2 executors from 12 s to 30 s, and of 3 from 34 s to 50 s."""
    gang = Gang()
    gang.at(5).record_executors(1, ["node0"], 4, NO_WAIT)
    gang.at(10).record_executors(2, ["node0", "node1"], 4, NO_WAIT)
    gang.begin(2)
    gang.enter(12)
    gang.at(20)
    gang.hold(3)
    gang.at(28).record_stop()
    gang.finish(30, WorldEnd.GREW)
    gang.at(31)
    gang.begin(3)
    gang.enter(34)
    gang.at(50).record_return()
    gang.board.mark("returned")
    return gang


def test_gpu_seconds_of_a_gang_that_grew() -> None:
    gang = grown()
    gang.board.record_end(WorldEnd.RETURNED, "")
    gang.release(52)
    gang.at(99)
    held = ((52 - 5) + (52 - 10) + (52 - 20)) * 2
    training = ((30 - 12) * 2 + (50 - 34) * 3) * 2
    assert spent(gang) == (held, training, 0.0, held - training)
    first, second = gang.board.result().worlds
    assert (first.generation, first.ranks, first.end) == (0, 4, "grew")
    assert (first.began, first.started, first.ended) == (1010.0, 1012.0, 1030.0)
    assert (first.resize_seconds, first.gpu_seconds) == (None, (30 - 10) * 4)
    assert (second.generation, second.ranks, second.end) == (1, 6, "returned")
    assert (second.resize_seconds, second.gpu_seconds) == (34 - 28, (50 - 31) * 6)
    assert first.gpu_seconds + second.gpu_seconds <= held


def test_executors_that_import_the_frameworks_are_starting_and_wait_for_nobody() -> None:
    gang = Gang()
    gang.at(5).record_executors(1, ["node0"], 1, NO_WAIT, warming=1)
    gang.at(20).record_executors(2, ["node0", "node1"], 2, NO_WAIT, warming=1)
    gang.at(22).record_executors(2, ["node0", "node1"], 2, NO_WAIT, warming=0)
    gang.at(23)
    gang.begin(2)
    gang.enter(24)
    gang.finish(30, WorldEnd.RETURNED)
    gang.release(30)
    seconds = gang.board.result().gpu_seconds
    assert seconds.starting == ((22 - 5) + (24 - 23) * 2) * 2
    assert seconds.idle - seconds.starting == ((22 - 20) + (23 - 22) * 2) * 2


def test_the_timeline_is_of_all_worlds() -> None:
    gang = grown()
    gang.release(52)
    assert gang.board.result().timeline.phases() == (
        ("waited", 10.0),
        ("started", 2.0),
        ("trained", 38.0),
        ("released", 2.0),
    )


def test_an_executor_counts_until_it_is_lost() -> None:
    gang = Gang(executors=3)
    gang.enter(1)
    gang.at(10).record_loss()
    gang.hold(2)
    gang.at(14).record_return()
    gang.board.record_end(WorldEnd.LOST, "the executor on node2 was lost")
    (world,) = gang.board.result().worlds
    assert world.gpu_seconds == (14 + 14 + 10) * 2
    assert (world.end, world.why) == ("lost", "the executor on node2 was lost")
    assert spent(gang) == ((14 + 14 + 10) * 2, (13 + 13 + 9) * 2, 0.0, 3 * 2)
    gang.begin(2)
    gang.enter(17)
    assert gang.board.result().worlds[1].resize_seconds == 17 - 10


def test_executors_that_are_given_back_count_until_they_are_gone() -> None:
    gang = Gang()
    gang.at(0)
    gang.hold(3)
    gang.at(4)
    gang.hold(3, ready=2)
    assert gang.board.status().granted == 2
    gang.at(6)
    gang.hold(2)
    gang.at(10)
    assert spent(gang)[0] == (10 + 10 + 6) * 2


def test_a_world_that_runs_is_accounted_until_now() -> None:
    gang = Gang(executors=2)
    gang.enter(2)
    gang.at(7)
    (world,) = gang.board.status().worlds
    assert (world.ended, world.end, world.gpu_seconds) == (None, "", 7 * 4)
    assert spent(gang) == (7 * 4, 5 * 4, 0.0, 2 * 4)
    assert gang.board.status().sizes == (2, 8)


def test_uploads_are_publishing_of_the_last_world() -> None:
    gang = grown()
    gang.at(50).state(GangState.PUBLISHING, ["node0"])
    gang.at(53)
    assert spent(gang)[2] == 3 * 6
    gang.at(55).state(GangState.RELEASING)
    gang.board.record_end(WorldEnd.RETURNED, "")
    gang.at(56).mark("released")
    held, training, publishing, idle = spent(gang)
    assert publishing == 5 * 6
    assert held == training + publishing + idle == ((56 - 5) + (56 - 10) + (56 - 20)) * 2
    assert gang.board.result().worlds[1].gpu_seconds == (50 - 31) * 6


def test_on_cpus_there_are_no_gpu_seconds() -> None:
    gang = Gang(gpus=0, executors=2)
    gang.enter(2)
    gang.at(9)
    assert spent(gang) == (0.0, 0.0, 0.0, 0.0)
    assert gang.board.status().worlds[0].gpu_seconds == 0.0


def test_each_world_is_an_attempt() -> None:
    gang = grown()
    assert gang.board.attempt == gang.board.status().attempt == 1
    assert "2 worlds of [4, 6] ranks" in repr(gang.board.result())


@pytest.mark.parametrize(("wanted", "shown"), [(4, 4), (0, 2)])
def test_what_is_wanted_includes_what_is_here(wanted: int, shown: int) -> None:
    gang = Gang()
    gang.hold(2, wanted=wanted, why="queue full")
    status = gang.board.status()
    assert (status.granted, status.wanted, status.waiting_for) == (2, shown, "queue full")


def placed(gang: Gang, executors: int) -> RankTable:
    """The table of a world's ranks, which its attempt gives."""
    containers = [
        GangExecutor(n, f"c{n}", f"node{n}", "10.0.0.1", ("a", "b")) for n in range(executors)
    ]
    ranks = RankTable(assign_ranks(containers, 2))
    gang.board.record_placement(ranks)
    return ranks


def test_what_ranks_lost_is_that_of_all_worlds() -> None:
    gang = Gang(executors=2)
    placed(gang, 2).record_blocked(0, 3.0, 1.0)
    gang.enter(4)
    gang.finish(20, WorldEnd.GREW)
    gang.at(21)
    gang.hold(3)
    gang.begin(3)
    assert gang.board.result().gpu_seconds.waiting_for_data == 3.0, "of the world before"
    last = placed(gang, 3)
    last.record_blocked(5, 2.0, 0.0)
    gang.enter(23)
    gang.at(30).record_return()
    last.record_blocked(5, 2.5, 0.0)
    gang.board.mark("returned")
    gang.board.record_end(WorldEnd.RETURNED, "")
    gang.release(31)
    seconds = gang.board.result().gpu_seconds
    assert (seconds.waiting_for_data, seconds.checkpointing) == (5.5, 1.0)
    assert seconds.starting == (4 * 2 + 2 * 3) * 2
    assert sum(seconds.kinds().values()) == pytest.approx(seconds.held)


def test_a_world_that_never_ran_was_starting() -> None:
    gang = Gang(executors=2)
    gang.at(6).record_return()
    gang.board.record_end(WorldEnd.LOST, "")
    assert gang.board.result().gpu_seconds.starting == 6 * 2 * 2
