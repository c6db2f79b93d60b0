"""What the ends of an attempt's ranks come to where an executor was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.outcome import AttemptFailure, IdleEnd, RankEnds
from hopsgpu.attempts.retry_policy import FailureCause, should_retry
from hopsgpu.backends.spark.barrier_job import reason_of
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import Exclusions, GangExecutor, World, assign_ranks
from hopsgpu.core.gpu_idle import IdleStep, IdleVerdict
from hopsgpu.errors import GpusIdle, RankFailed
from hopsgpu.gpu.driver_events import GpuEvent

LOST = "ExecutorLostFailure (executor 1 exited unrelated to the running tasks)"


@pytest.mark.parametrize(
    ("reason", "suspect", "word"),
    [
        # Spark's words (YarnAllocator) for YARN's exit codes.
        ("Container container_1 on host: node1 was preempted.", None, EndReason.PREEMPTED),
        (
            "Container killed by YARN for exceeding physical memory limits. 5 GB of 4 GB used.",
            None,
            EndReason.OUT_OF_MEMORY,
        ),
        (
            "Container from a bad node: container_1 on host: node1. Exit status: 143.",
            "node1",
            EndReason.EXECUTOR_LOST,
        ),
        ("Executor heartbeat timed out after 200000 ms", "node1", EndReason.EXECUTOR_LOST),
    ],
)
def test_a_lost_executor_is_infrastructure_and_its_node_blamed_where_it_may_be_to_blame(
    reason: str, suspect: str | None, word: EndReason
) -> None:
    containers = [GangExecutor(n, f"container_{n}", f"node{n}", "10.0.0.1", ()) for n in (0, 1)]
    world = assign_ranks(containers, 1)
    ends = RankEnds(world, "file:///logs/rank-{}.log".format)
    ends.lose(world.processes[1], "closed", time.time())
    ends.end(RankExit(world.processes[0], 1e12, None, "SIGTERM", {}, (), was_stopped=True))
    assert not ends.pending
    error = f"{LOST} Reason: {reason}\nDriver stacktrace:\n\tat org"
    failure = ends.conclude(lambda host: reason_of(error))
    assert failure is not None
    assert f"(container container_1): {reason.rstrip('.')}" in str(failure.error)
    assert (failure.cause, failure.exclusions.is_any) == (FailureCause.INFRASTRUCTURE, False)
    assert failure.suspect_host == suspect
    assert failure.was_preempted == ("preempted" in reason)
    assert failure.reason is word
    assert should_retry(failure.cause, retried=0, retries=1, retry_user_errors=False)


FELL = GpuEvent("GPU-1", "bad", "XID 79, GPU has fallen off the bus: reboot the node")
BLAMED = Exclusions(gpus=frozenset({("node1", "GPU-1")}))


def raised(world: World, rank: int, at: float = 10.0, *events: GpuEvent) -> RankExit:
    outcome = {"status": "raised", "error": "RuntimeError: NCCL remote error", "traceback": ""}
    return RankExit(world.processes[rank], at, 1, None, outcome, (), False, 0, events)


def stopped(world: World, rank: int, *events: GpuEvent) -> RankExit:
    return RankExit(world.processes[rank], 13.0, None, "SIGTERM", {}, (), True, 0, events)


Happens = Callable[[RankEnds, World], Sequence[int]]


def a_peer_raises_first(ends: RankEnds, world: World) -> Sequence[int]:
    ends.end(raised(world, 0))
    ends.end(stopped(world, 1, FELL))
    return ()


def all_raise_alike(ends: RankEnds, world: World) -> Sequence[int]:
    ends.end(raised(world, 0))
    ends.end(raised(world, 1, 10.2, FELL))
    return ()


def time_is_over(ends: RankEnds, world: World) -> Sequence[int]:
    ends.end(stopped(world, 0))
    ends.end(stopped(world, 1, FELL))
    return (0, 1)


def a_peers_executor_is_lost(ends: RankEnds, world: World) -> Sequence[int]:
    ends.lose(world.processes[0], "closed", time.time())
    ends.end(RankExit(world.processes[1], time.time(), None, "SIGTERM", {}, (), True, 0, (FELL,)))
    return ()


def concluded(happens: Happens) -> AttemptFailure:
    """Returns the failure from what happens; that returns the ranks that were too late."""
    names = [(f"container_{n}", f"node{n}", "10.0.0.1", (f"GPU-{n}",)) for n in (0, 1)]
    world = assign_ranks([GangExecutor(n, *names[n]) for n in (0, 1)], 1)
    ends = RankEnds(world, "file:///logs/rank-{}.log".format)
    overdue = happens(ends, world)
    failure = ends.conclude(lambda host: "", overdue, 60.0)
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("happens", "cause"),
    [
        (a_peer_raises_first, FailureCause.RANK),
        (all_raise_alike, FailureCause.RANK),
        (time_is_over, FailureCause.RANK),
        (a_peers_executor_is_lost, FailureCause.INFRASTRUCTURE),
    ],
)
def test_a_gpu_that_failed_is_to_blame_whoever_fails_first(
    happens: Happens, cause: FailureCause
) -> None:
    failure = concluded(happens)
    assert (failure.error.rank, failure.exclusions, failure.cause) == (0, BLAMED, cause)
    assert failure.reason is EndReason.GPU_FAILED
    first_line = str(failure.error).splitlines()[0]
    assert f"GPU-1 of node1: {FELL.reason} (rank 1)" in first_line


def test_a_rank_that_fails_of_its_own_gpu_tells_of_no_other() -> None:
    def happens(ends: RankEnds, world: World) -> Sequence[int]:
        own = GpuEvent("GPU-0", "bad", "XID 74, NVLink error: reset it")
        ends.end(raised(world, 0, 10.0, own))
        ends.end(stopped(world, 1, FELL))
        return ()

    failure = concluded(happens)
    message = str(failure.error)
    assert "GPU-0 of node0: XID 74" in message and "XID 79" not in message
    assert failure.exclusions == BLAMED | Exclusions(gpus=frozenset({("node0", "GPU-0")}))


def test_the_time_that_is_over_is_the_reason() -> None:
    def happens(ends: RankEnds, world: World) -> Sequence[int]:
        ends.end(stopped(world, 0))
        ends.end(stopped(world, 1))
        return (0, 1)

    assert concluded(happens).reason is EndReason.TIMEOUT


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"outcome": {"status": "raised", "error": "ValueError: x"}}, EndReason.USER_ERROR),
        ({"exit_code": None, "signal": "SIGSEGV"}, EndReason.USER_ERROR),
        ({"outcome": {"status": "unpicklable", "error": "x"}}, EndReason.USER_ERROR),
        ({"exit_code": None, "signal": "SIGKILL"}, EndReason.KILLED),
        ({"exit_code": None, "signal": "SIGKILL", "oom_kills": 1}, EndReason.OUT_OF_MEMORY),
        ({"outcome": {"status": "over memory", "error": "9 GB"}}, EndReason.OUT_OF_MEMORY),
        (
            {
                "outcome": {
                    "status": "raised",
                    "error": "OutOfMemoryError: CUDA out of memory.",
                }
            },
            EndReason.OUT_OF_MEMORY,
        ),
        ({"outcome": {"status": "raised", "error": "MemoryError: "}}, EndReason.OUT_OF_MEMORY),
        (
            {"outcome": {"status": "raised", "error": "RuntimeError: CUDA error: GPU is lost"}},
            EndReason.GPU_FAILED,
        ),
        ({"outcome": {"status": "not started", "error": "no fork"}}, EndReason.NOT_STARTED),
    ],
)
def test_the_first_failure_says_why_a_run_ended(end: dict[str, Any], reason: EndReason) -> None:
    def happens(ends: RankEnds, world: World) -> Sequence[int]:
        told: dict[str, Any] = {"exit_code": 1, "signal": None, "outcome": {}, **end}
        ends.end(RankExit(world.processes[0], 10.0, log_tail=(), was_stopped=False, **told))
        ends.end(stopped(world, 1))
        return ()

    assert concluded(happens).reason is reason


def test_a_gang_whose_gpus_idled_is_not_tried_again() -> None:
    containers = [GangExecutor(n, f"container_{n}", f"node{n}", "10.0.0.1", ()) for n in (0, 1)]
    world = assign_ranks(containers, 1)
    ends = RankEnds(world, "file:///logs/rank-{}.log".format)
    ends.end(RankExit(world.processes[0], 9.0, 0, None, {"status": "returned"}, (), False))
    tail = ("Thread 0x1 (most recent call first):",)
    ends.end(RankExit(world.processes[1], 13.0, None, "SIGTERM", {}, tail, True))
    verdict = IdleVerdict(IdleStep.END, 1804.0, 2, 2, (0, 1))
    failure = ends.conclude(str, idle=IdleEnd(verdict, 1800.0, 1))
    assert failure is not None and not failure.is_loss and not failure.exclusions.is_any
    assert failure.reason is EndReason.GPUS_IDLE
    error = failure.error
    assert isinstance(error, GpusIdle) and isinstance(error, RankFailed)
    assert (error.seconds, error.rank, error.host) == (1804.0, 1, "node1")
    assert (error.signal, error.log_tail) == ("SIGTERM", tail)
    assert "gpu_idle_timeout=1800 s" in str(error) and tail[0] in str(error)
    assert str(error).endswith("whole log: file:///logs/rank-1.log")
    assert not should_retry(failure.cause, retried=0, retries=3, retry_user_errors=True)
