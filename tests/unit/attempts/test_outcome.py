"""What the ends of an attempt's ranks come to where an executor was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hopsgpu.attempts.failures import EndedRank
from hopsgpu.attempts.outcome import Conclusion, IdleEnd, RankEnds
from hopsgpu.attempts.retry_policy import Fault, may_retry
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
    ends.end(EndedRank(world.processes[0], 1e12, None, "SIGTERM", {}, (), stopped=True))
    assert not ends.pending
    error = f"{LOST} Reason: {reason}\nDriver stacktrace:\n\tat org"
    conclusion = ends.conclude(lambda host: reason_of(error))
    assert conclusion is not None
    assert f"(container container_1): {reason.rstrip('.')}" in str(conclusion.failure)
    assert (conclusion.fault, conclusion.avoid.is_any) == (Fault.INFRASTRUCTURE, False)
    assert conclusion.suspect == suspect
    assert conclusion.was_preempted == ("preempted" in reason)
    assert conclusion.reason is word
    assert may_retry(conclusion.fault, retried=0, retries=1, code_too=False)


FELL = GpuEvent("GPU-1", "bad", "XID 79, GPU has fallen off the bus: reboot the node")
BLAMED = Exclusions(gpus=frozenset({("node1", "GPU-1")}))


def raised(world: World, rank: int, at: float = 10.0, *events: GpuEvent) -> EndedRank:
    outcome = {"status": "raised", "error": "RuntimeError: NCCL remote error", "traceback": ""}
    return EndedRank(world.processes[rank], at, 1, None, outcome, (), False, 0, events)


def stopped(world: World, rank: int, *events: GpuEvent) -> EndedRank:
    return EndedRank(world.processes[rank], 13.0, None, "SIGTERM", {}, (), True, 0, events)


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
    ends.end(EndedRank(world.processes[1], time.time(), None, "SIGTERM", {}, (), True, 0, (FELL,)))
    return ()


def concluded(happens: Happens) -> Conclusion:
    """Returns the conclusion from what happens; that returns the ranks that were too late."""
    names = [(f"container_{n}", f"node{n}", "10.0.0.1", (f"GPU-{n}",)) for n in (0, 1)]
    world = assign_ranks([GangExecutor(n, *names[n]) for n in (0, 1)], 1)
    ends = RankEnds(world, "file:///logs/rank-{}.log".format)
    overdue = happens(ends, world)
    conclusion = ends.conclude(lambda host: "", overdue, 60.0)
    assert conclusion is not None
    return conclusion


@pytest.mark.parametrize(
    ("happens", "fault"),
    [
        (a_peer_raises_first, Fault.RANK),
        (all_raise_alike, Fault.RANK),
        (time_is_over, Fault.RANK),
        (a_peers_executor_is_lost, Fault.INFRASTRUCTURE),
    ],
)
def test_a_gpu_that_failed_is_to_blame_whoever_fails_first(happens: Happens, fault: Fault) -> None:
    conclusion = concluded(happens)
    assert (conclusion.failure.rank, conclusion.avoid, conclusion.fault) == (0, BLAMED, fault)
    assert conclusion.reason is EndReason.GPU_FAILED
    first_line = str(conclusion.failure).splitlines()[0]
    assert (
        f"likely because the NVIDIA driver reported GPU-1 of node1: {FELL.reason} (rank 1)"
        in first_line
    )


def test_a_rank_that_fails_of_its_own_gpu_tells_of_no_other() -> None:
    def happens(ends: RankEnds, world: World) -> Sequence[int]:
        own = GpuEvent("GPU-0", "bad", "XID 74, NVLink error: reset it")
        ends.end(raised(world, 0, 10.0, own))
        ends.end(stopped(world, 1, FELL))
        return ()

    conclusion = concluded(happens)
    told = str(conclusion.failure)
    assert "the NVIDIA driver reported GPU-0 of node0: XID 74" in told and "XID 79" not in told
    assert conclusion.avoid == BLAMED | Exclusions(gpus=frozenset({("node0", "GPU-0")}))


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
        ends.end(EndedRank(world.processes[0], 10.0, log_tail=(), stopped=False, **told))
        ends.end(stopped(world, 1))
        return ()

    assert concluded(happens).reason is reason


def test_a_gang_whose_gpus_idled_is_not_tried_again() -> None:
    containers = [GangExecutor(n, f"container_{n}", f"node{n}", "10.0.0.1", ()) for n in (0, 1)]
    world = assign_ranks(containers, 1)
    ends = RankEnds(world, "file:///logs/rank-{}.log".format)
    ends.end(EndedRank(world.processes[0], 9.0, 0, None, {"status": "returned"}, (), False))
    tail = ("Thread 0x1 (most recent call first):",)
    ends.end(EndedRank(world.processes[1], 13.0, None, "SIGTERM", {}, tail, True))
    verdict = IdleVerdict(IdleStep.END, 1804.0, 2, 2, (0, 1))
    conclusion = ends.conclude(str, idle=IdleEnd(verdict, 1800.0, 1))
    assert conclusion is not None and not conclusion.is_loss and not conclusion.avoid.is_any
    assert conclusion.reason is EndReason.GPUS_IDLE
    failure = conclusion.failure
    assert isinstance(failure, GpusIdle) and isinstance(failure, RankFailed)
    assert (failure.seconds, failure.rank, failure.host) == (1804.0, 1, "node1")
    assert (failure.signal, failure.log_tail) == ("SIGTERM", tail)
    said = str(failure)
    assert said.startswith(
        "all 2 GPUs have idled for 30 min (utilisation under 5 %), and"
        " gpu_idle_timeout=1800 s ended the run; rank 1 on node1"
    )
    assert tail[0] in said and said.endswith("whole log: file:///logs/rank-1.log")
    assert not may_retry(conclusion.fault, retried=0, retries=3, code_too=True)
