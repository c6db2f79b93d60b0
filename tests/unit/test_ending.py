"""What the ends of an attempt's ranks come to where an executor was lost."""

from __future__ import annotations

import pytest

from hopsgpu.ending import Ends
from hopsgpu.failures import Ended
from hopsgpu.gang import Container, assign_ranks
from hopsgpu.retries import Fault, may_retry
from hopsgpu.spark.jobs import reason_of

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
    ends = Ends(world, "file:///logs/rank-{}.log".format)
    ends.lose(world.processes[1], "closed")
    ends.end(Ended(world.processes[0], 1e12, None, "SIGTERM", {}, (), stopped=True))
    assert not ends.pending
    error = f"{LOST} Reason: {reason}\nDriver stacktrace:\n\tat org"
    conclusion = ends.conclude(None, lambda: reason_of(error))
    assert conclusion is not None
    assert f"(container container_1): {reason.rstrip('.')}" in str(conclusion.failure)
    assert (conclusion.fault, conclusion.avoid.is_any) == (Fault.INFRASTRUCTURE, False)
    assert conclusion.suspect == suspect
    assert may_retry(conclusion.fault, attempt=0, retries=1, code_too=False)
