"""What the status board of a run tells, from what it was told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hopsgpu.attempts.rank_table import FunctionEntry, RankTable
from hopsgpu.core.gang import GangExecutor, GangState, assign_ranks
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.run_values import Timeline
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.display.base import NoDisplay
from hopsgpu.display.progress import Shielded, progress_of
from hopsgpu.errors import HopsGpuError
from hopsgpu.runs.status_board import GangBoard, gpu_seconds


def board() -> GangBoard:
    return GangBoard("run-1", wanted=2, gpus=1, progress=progress_of("off"))


def two_ranks() -> RankTable:
    containers = [
        GangExecutor(n, f"c{n}", f"node{n}", "10.0.0.1", (), clock=15.0 * n) for n in (0, 1)
    ]
    return RankTable(assign_ranks(containers, 1))


def end(ranks: RankTable, rank: int, exit_code: int = 0) -> None:
    ranks.record_end(
        rank,
        exit_code=exit_code,
        signal=None,
        peak_memory=1,
        gpu_utilisation=None,
        was_stopped=False,
    )


def test_status_follows_the_board() -> None:
    told = board()
    assert told.status().state == "requested"
    told.state(GangState.WAITING, ["node1"], WaitReason("Needs 1 GPU", ("why",)))
    status = told.status()
    assert (status.state, status.granted, status.wanted) == ("waiting", 1, 2)
    assert status.granted_hosts == ("node1",)
    assert (status.waiting_for, status.waiting_details) == ("Needs 1 GPU", ("why",))
    told.state(GangState.GRANTED, ["node1", "node2"])
    assert (told.status().waiting_for, told.status().waiting_details) == ("", ())
    with pytest.raises(HopsGpuError, match="cannot go from"):
        told.state(GangState.PUBLISHING)


def test_gpu_seconds_add_up() -> None:
    timeline = Timeline(requested=0, granted=10, started=12, returned=22, published=24, released=25)
    seconds = gpu_seconds(timeline, [5.0, 10.0], 2, now=99)
    assert seconds.held == (20 + 15) * 2
    assert seconds.training == 10 * 4
    assert seconds.publishing == 2 * 4
    assert seconds.idle == 70 - 40 - 8
    parted = gpu_seconds(timeline, [5.0, 10.0], 2, now=99, departures=[23.0])
    assert parted.held == (20 + 15 - 2) * 2
    assert (parted.training, parted.publishing) == (10 * 4, 2 * 2)
    assert parted.idle == 66 - 40 - 4
    in_vain = replace(timeline, published=None)
    assert gpu_seconds(in_vain, [5.0, 10.0], 2, now=99, uploaded=24).publishing == 2 * 4
    assert gpu_seconds(in_vain, [5.0, 10.0], 2, now=99).publishing == 0
    waiting = gpu_seconds(Timeline(requested=0), [5.0], 2, now=7)
    assert (waiting.held, waiting.training, waiting.idle) == (4, 0, 4)
    assert gpu_seconds(Timeline(requested=0), [], 2, now=7).held == 0


def test_an_upload_that_failed_is_no_idle_time() -> None:
    told = board()
    for state in ("WAITING", "GRANTED", "READY", "STARTING", "RUNNING"):
        told.state(GangState[state], ["node1"])
    told.on_executors_arrived([time.time() - 10])
    told.mark("started")
    told.mark("returned")
    told.state(GangState.PUBLISHING, ["node1"])
    told.state(GangState.RELEASING)
    assert told.result().gpu_seconds.publishing > 0
    assert told.result().timeline.published is None


def test_a_run_that_is_tried_again_begins_anew_with_its_phases() -> None:
    told = board()
    told.state(GangState.PREPARING, why=WaitReason("data"))
    for state in (GangState.WAITING, GangState.GRANTED):
        told.state(state, ["node1"])
    told.mark("granted")
    told.mark("started", 1.0)
    told.record_retry()
    assert told.attempt == told.status().attempt == 1
    timeline = told.status().timeline
    assert (timeline.granted, timeline.started, timeline.returned) == (None, None, None)
    assert timeline.requested <= timeline.prepared <= timeline.retried


def test_a_rank_is_seen_from_its_start_and_reported_once_all_have_ended() -> None:
    told, ranks = board(), two_ranks()
    told.record_placement(ranks)
    assert told.ranks == ()
    ranks.record_start(1, 71)
    end(ranks, 1)
    ranks.record_start(0, 70)
    assert [(r.rank, r.pid, r.exit_code, ended) for r, ended in told.ranks] == [
        (0, 70, None, False),
        (1, 71, 0, True),
    ]
    assert told.status().ranks == () and told.result().ranks == ()
    told.mark("returned")
    (report,) = told.result().ranks
    assert (report.rank, report.host, report.exit_code) == (1, "node1", 0)
    assert told.status().ranks == (report,)


def test_a_function_begins_by_the_clock_of_its_ranks_node() -> None:
    ranks = two_ranks()
    assert ranks.record_entry(1, 20.0) == FunctionEntry(1, 2, 35.0)
    last = ranks.record_entry(0, 30.0)
    assert last == FunctionEntry(2, 2, 35.0) and last.is_complete


def test_an_attempt_leaves_its_ranks_and_warnings_until_the_next_has_its_places() -> None:
    told, first = board(), two_ranks()
    told.record_placement(first)
    told.warn("of the run")
    for _ in range(2):
        told.warn_of_attempt("of the first attempt")
    first.record_start(0, 70)
    told.record_retry()
    assert (told.attempt, told.status().ranks) == (1, ())
    assert [report.pid for report, _ in told.ranks] == [70]
    assert told.warnings == ("of the run", "of the first attempt")
    told.record_placement(two_ranks())
    assert told.ranks == () and told.warnings == ("of the run",)


def test_a_display_that_stopped_is_a_warning() -> None:
    class Broken(NoDisplay):
        def status(self, status: object) -> None:
            raise OSError("the terminal is gone")

    told = GangBoard("run-1", 2, 1, Shielded(Broken()))
    told.warn("a warning")
    told.state(GangState.WAITING)
    assert told.result().warnings == (
        "a warning",
        "the progress display stopped (OSError: the terminal is gone)",
    )


def test_waiting_counts_in_all_attempts_and_while_it_lasts() -> None:
    now = [100.0]
    told = GangBoard("fit-1", 2, 1, progress_of("off"), lambda: now[0])
    assert told.seconds_waited == 0.0

    def goes(at: float, *states: GangState) -> None:
        now[0] = at
        for state in states:
            told.state(state)

    goes(110.0, GangState.WAITING)
    now[0] = 115.0
    assert told.seconds_waited == 5.0
    goes(120.0, GangState.WAITING)
    goes(130.0, GangState.GRANTED, GangState.READY, GangState.STARTING, GangState.RUNNING)
    now[0] = 200.0
    assert told.seconds_waited == 20.0
    told.record_retry()
    goes(200.0, GangState.WAITING)
    goes(207.0, GangState.RELEASING)
    goes(300.0, GangState.FAILED)
    assert told.seconds_waited == 27.0


def test_what_ranks_lost_is_weighed_by_their_gpus() -> None:
    ranks = RankTable(
        assign_ranks(
            [GangExecutor(n, f"c{n}", "node", "10.0.0.1", ("a", "b")) for n in (0, 1)], 2, 1
        )
    )
    ranks.record_blocked(0, 10.0, 1.0)
    ranks.record_blocked(0, 12.0, 2.0)
    ranks.record_unused(0, 30.0)
    ranks.record_unused(3, 5.0)
    ranks.record_blocked(3, 0.0, 8.0)
    # A parameter server has no GPU.
    ranks.record_blocked(4, 99.0, 99.0)
    assert ranks.losses(2) == RankLosses(12.0, 10.0, 16.0)
    assert ranks.losses(1) == RankLosses(6.0, 5.0, 8.0)


class Run:
    """A run of two ranks with a GPU each, by a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.board = GangBoard("fit-1", 2, 1, progress_of("off"), lambda: self.now)
        self.ranks = two_ranks()

    def at(self, now: float, *states: GangState) -> None:
        self.now = now
        for state in states:
            self.board.state(state)

    def starts(self, granted: float, started: float) -> None:
        self.at(granted, GangState.GRANTED, GangState.READY, GangState.STARTING)
        self.board.mark("granted")
        self.ranks = two_ranks()
        self.board.record_placement(self.ranks)
        self.at(started, GangState.RUNNING)
        self.board.mark("started")


def test_gpu_seconds_have_parts_that_add_up_over_attempts() -> None:
    run = Run()
    run.at(100.0, GangState.WAITING)
    run.board.on_executors_arrived([105.0, 110.0])
    run.starts(110.0, 116.0)
    run.ranks.record_blocked(0, 4.0, 1.0)
    run.ranks.record_unused(1, 3.0)
    run.at(140.0)
    run.board.mark("returned")
    run.at(141.0)
    run.board.record_retry()
    first = run.board.result().gpu_seconds
    assert (first.held, first.training, first.idle) == (36.0 + 31.0, 48.0, 19.0)
    assert (first.starting, first.waiting_for_data, first.checkpointing) == (12.0, 4.0, 1.0)
    run.at(141.0, GangState.WAITING)
    run.starts(150.0, 151.0)
    run.ranks.record_blocked(1, 10.0, 0.0)
    run.at(171.0)
    run.board.mark("returned")
    run.at(173.0, GangState.RELEASING)
    run.board.mark("released")
    run.at(174.0, GangState.SUCCEEDED)
    whole = run.board.result().gpu_seconds
    assert whole.kinds() == {
        "training": 88.0 - 18.0,
        "waiting for data": 14.0,
        "checkpointing": 1.0,
        "unused": 3.0,
        "publishing": 0.0,
        "starting": 14.0,
        "idle": whole.idle - 14.0,
    }
    assert sum(whole.kinds().values()) == pytest.approx(whole.held)
    assert run.board.status().gpu_seconds == whole


def test_a_run_that_ends_while_it_starts_was_starting() -> None:
    timeline = Timeline(requested=0, granted=10, returned=22, released=25)
    seconds = gpu_seconds(timeline, [5.0, 10.0], 2, now=99)
    assert (seconds.starting, seconds.idle) == (12 * 4, (20 + 15) * 2)
    assert gpu_seconds(replace(timeline, granted=None), [5.0], 2, now=99).starting == 0.0


def test_a_status_has_gpu_seconds_that_are_a_second_old_at_most() -> None:
    run = Run()
    run.at(100.0, GangState.WAITING)
    run.board.on_executors_arrived([100.0])
    run.at(110.0)
    assert run.board.status().gpu_seconds.held == 10.0
    run.at(110.9)
    assert run.board.status().gpu_seconds.held == 10.0
    run.at(111.0)
    assert run.board.status().gpu_seconds.held == 11.0
    run.at(111.5, GangState.RELEASING)
    assert run.board.status().gpu_seconds.held == 11.5
