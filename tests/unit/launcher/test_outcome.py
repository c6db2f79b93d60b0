"""What the ends of an attempt's ranks come to where an executor was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from hopsgpu.backends.spark.barrier_job import reason_of
from hopsgpu.core.gang import Container, Exclusions, World, assign_ranks
from hopsgpu.gpu.driver_events import GpuEvent
from hopsgpu.launcher.failures import EndedRank
from hopsgpu.launcher.outcome import Conclusion, RankEnds
from hopsgpu.launcher.retry_policy import Fault, may_retry

LOST = "ExecutorLostFailure (executor 1 exited unrelated to the running tasks)"


@pytest.mark.parametrize(
    ("reason", "suspect"),
    [
        # Spark's words (YarnAllocator) for YARN's exit codes.
        ("Container container_1 on host: node1 was preempted.", None),
        ("Container killed by YARN for exceeding physical memory limits. 5 GB of 4 GB used.", None),
        ("Container from a bad node: container_1 on host: node1. Exit status: 143.", "node1"),
        ("Executor heartbeat timed out after 200000 ms", "node1"),
    ],
)
def test_a_lost_executor_is_infrastructure_and_its_node_blamed_where_it_may_be_to_blame(
    reason: str, suspect: str | None
) -> None:
    containers = [Container(n, f"container_{n}", f"node{n}", "10.0.0.1", ()) for n in (0, 1)]
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
    assert may_retry(conclusion.fault, attempt=0, retries=1, code_too=False)


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
    world = assign_ranks([Container(n, *names[n]) for n in (0, 1)], 1)
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
