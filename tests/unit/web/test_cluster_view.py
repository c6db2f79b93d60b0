"""The cluster and the line as values, from answers of real ResourceManagers and from records."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from hopsgpu.core.queue_policy import Bound, Offer, QueueSnapshot, Ticket, TurnHolder, queue_tag
from hopsgpu.display.run_view import RunSummary
from hopsgpu.web.cluster_view import FREE, UNKNOWN, USED, cluster_view, queue_view
from tests.unit.cli.test_gpus import FOUND
from tests.unit.cluster_managers.test_cluster_gpus import seen

NAMES = [
    *("capacity_half", "capacity_labels", "capacity_user_limit", "capacity_over", "fair"),
    *("fair_child", "capacity_child", "capacity_cpus"),
]


def row(run_id: str, application: str, state: str = "running", **given: str) -> RunSummary:
    return RunSummary(run_id, state, "me", is_running=True, application=application, **given)  # type: ignore[arg-type]


def ticket(number: int, application: str, bound: Bound = Bound.CLUSTER, **given: object) -> Ticket:
    parts: dict[str, object] = {
        **{"filed": 1000 * number, "id": f"{number:08x}", "is_growth": False, "executors": 2},
        **{"gpus": 1, "queue": queue_tag("root.a"), "bound": bound, "passed": 0},
    }
    return Ticket(application=application, **(parts | given))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_each_gpu_is_one_cell(name: str) -> None:
    gpus = seen(name)
    view = cluster_view(gpus, [])
    for node in view.nodes:
        assert len(node.cells) == node.node.total
    states = Counter(cell.state for node in view.nodes for cell in node.cells)
    assert states[USED] + states[UNKNOWN] == gpus.used and states[FREE] == gpus.free
    assert len(view.holders) == len(gpus.users)


def test_cells_name_who_has_them() -> None:
    view = cluster_view(seen("fair_child"), [])
    (node,) = (one for one in view.nodes if one.node.host == "node2")
    assert [cell.who for cell in node.cells if cell.state == USED] == [1]
    assert view.holders[0].hosts == "node2 (1)"


def test_a_node_that_is_behind_has_no_more_cells_than_gpus() -> None:
    """YARN grants a container before its node reports it."""
    user = dataclasses.replace(FOUND.users[0], hosts={"node1": 9})
    view = cluster_view(dataclasses.replace(FOUND, users=(user,)), [])
    assert [len(row.cells) for row in view.nodes] == [2, 2]
    assert [cell.state for cell in view.nodes[1].cells] == ["unhealthy", "unhealthy"]


def test_runs_are_beside_the_applications_that_they_are_of() -> None:
    runs = [row("fit-1", "application_1_0001"), row("fit-2", "application_9"), row("fit-3", "")]
    first, second = cluster_view(FOUND, runs).holders
    assert [one.run_id for one in first.runs] == ["fit-1"] and second.runs == ()


def test_the_line_in_its_order_and_then_who_waits_without_a_ticket() -> None:
    one = ticket(1, "application_1_0001", Bound.QUEUE, passed=2)
    grows = ticket(2, "application_1_0002", is_growth=True, gpus=0)
    runs = [
        row("fit-1", "application_1_0001", "waiting", waiting_for="queue root.a is full"),
        row("fit-2", "application_1_0002", "running", waiting_for="2 more"),
        row("fit-3", "local-1", "waiting", waiting_for="GPU leased", user="eve", gang="2 ranks"),
        row("fit-4", "local-2"),
    ]
    view = queue_view(
        {"default": QueueSnapshot(((one, "ann"), (grows, "bob")), 2, None)}, FOUND, runs
    )
    first, second, third = view.waiting
    assert (first.place, first.user, first.since, first.passed) == (1, "ann", 1.0, 2)
    assert (first.why, first.queue, first.name) == ("queue root.a is full", "root.a", "nightly")
    assert first.wants == "2 executors with 1 GPU each" and first.partition == ""
    assert (second.can_grow, second.wants) == (True, "2 executors with no GPU each")
    assert [one.run_id for one in second.runs] == ["fit-2"]
    assert (third.place, third.user, third.why, third.wants) == (
        None,
        "eve",
        "GPU leased",
        "2 ranks",
    )
    assert view.asking == ()


def test_without_yarn_the_line_says_what_tickets_say() -> None:
    view = queue_view(
        {
            "a": QueueSnapshot(
                ((ticket(1, "application_7"), "ann"),), 1, TurnHolder("application_6", "bob")
            )
        },
        None,
        [],
    )
    (only,) = view.waiting
    assert (only.why, only.name, only.queue) == ("the cluster has not enough free", "", "")
    assert view.asking == ("application_6 of bob requests its executors now",)


def test_partitions_and_what_comes_back() -> None:
    offer = Offer("1" * 8, 2, 1, 2, queue_tag("root.a"), "application_1", "resnet")
    snapshots = {
        "slow": QueueSnapshot((), 0, None, ((offer, "ann"),)),
        "default": QueueSnapshot(((ticket(1, "application_7"), "bob"),), 0, None),
    }
    view = queue_view(snapshots, None, [])
    assert view.waiting[0].partition == "default"
    assert view.promised == ("slow: 2 GPUs come from ann's 'resnet' at its next checkpoint",)


def test_passes_beyond_those_that_count_are_not_told_apart() -> None:
    told = [
        queue_view(
            {"": QueueSnapshot(((ticket(1, "a", passed=passed), "u"),), 0, None)}, None, ()
        ).waiting[0]
        for passed in (2, 3)
    ]
    assert [one.passes for one in told] == ["2 times", "3 times or more"]
