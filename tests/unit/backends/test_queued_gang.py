"""Where a gang's executors are to be: nodes on which none starts come last."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.gang_request import AcquisitionClock
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.queued_gang import QueuedGang
from hopsgpu.cluster_managers.resources import Amount
from tests.unit import plans
from tests.unit.cluster_managers.test_capacity import node, snap

WHOLE = Amount(2, 8, 16384)


@pytest.mark.parametrize(
    ("placement", "failing", "wanted", "hosts"),
    [
        (None, 0, 2, ()),
        (None, 1, 2, ()),
        (None, 2, 2, ("node2", "node2")),
        (None, 2, 3, ()),
        ("pack", 2, 2, ("node2", "node2")),
        ("pack", 2, 3, ("node1", "node1", "node2")),
        ("spread", 2, 2, ("node1", "node2")),
    ],
)
def test_nodes_on_which_executors_end_are_asked_for_last(
    placement: str | None, failing: int, wanted: int, hosts: tuple[str, ...]
) -> None:
    ended = FailingHosts()
    for number in range(failing):
        ended.record_end(f"c{number}", "node1", time.monotonic())
    snapshot = snap(node("node1", WHOLE), node("node2", WHOLE))
    application: Any = SimpleNamespace(
        failing=ended, can_prefer_hosts=True, snapshot=lambda seconds: snapshot
    )
    request = plans.request(SimpleNamespace(), plan=plans.plan(wanted, placement=placement))
    place = QueuedGang(application, request, AcquisitionClock(request), ExecutorAdmission(), None)
    assert place.hosts(wanted) == hosts
