"""Plans of elastic gangs: the largest size that fits, and an error where the smallest cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hopsgpu.core.spec import GangSpec, GpuRequest, LaunchPlan, shape_of
from hopsgpu.errors import CapacityError, ConfigError
from hopsgpu.launcher.arguments import GangArguments
from hopsgpu.launcher.planner import plan_of


class Nodes:
    """A site of nodes with GPUs, of which `fit` tells what they could hold if they were empty.

    Args:
        gpus: GPUs of each node.
        most_executors: how many executors an application may have.
    """

    def __init__(self, gpus: Sequence[int], most_executors: int = 100) -> None:
        self.root = "file:///lake"
        self.asked: list[int] = []
        self._gpus = gpus
        self._most = most_executors

    def fit(self, spec: GangSpec) -> LaunchPlan:
        self.asked.append(spec.workers)
        ranks = spec.gpus.sharing
        if spec.placement == "pack":
            divisors = [n for n in range(1, spec.workers + 1) if not spec.workers % n]
            ranks = max(n for n in divisors if spec.gpus.of(n) <= max(self._gpus))
        executors, each = spec.workers // ranks, spec.gpus.of(ranks)
        if executors > self._most:
            raise ConfigError(f"at most {self._most} executors")
        room = sum(1 if spec.placement == "spread" else gpus // each for gpus in self._gpus)
        if executors > room:
            raise CapacityError(f"{executors} executors do not fit")
        shape = shape_of(spec, 1, ranks)
        return LaunchPlan(spec, executors, ranks, shape, "q", {}, {}, (f"{spec.workers} fit",))


def planned(nodes: Nodes, least: int, most: int, gpus: float = 1, **spec: Any) -> LaunchPlan:
    wanted = GangSpec("fit", workers=most, least_workers=least, gpus=GpuRequest(gpus), **spec)
    site: Any = nodes
    return plan_of(GangArguments(spec=wanted, application=site), "run-1")


def sizes(plan: LaunchPlan) -> tuple[int, int, int, int]:
    """Return the sizes in ranks, the executors of the largest, and the ranks of each."""
    return plan.spec.least, plan.spec.workers, plan.executors, plan.ranks_per_executor


def test_a_gang_that_fits_is_planned_with_both_sizes() -> None:
    plan = planned(Nodes([2, 2]), 2, 4)
    assert sizes(plan) == (2, 4, 4, 1) and plan.least_executors == 2
    assert plan.warnings == ("2 fit", "4 fit")


@pytest.mark.parametrize(("least", "most", "largest"), [(1, 100, 5), (5, 6, 5), (3, 7, 5)])
def test_the_largest_size_that_fits_takes_the_place_of_one_that_cannot(
    least: int, most: int, largest: int
) -> None:
    nodes = Nodes([2, 3])
    plan = planned(nodes, least, most)
    assert sizes(plan) == (least, largest, largest, 1)
    assert any(f"at most {largest} of the {most} ranks " in text for text in plan.warnings)
    assert len(nodes.asked) < 12, "it is a search by halves"


def test_a_limit_of_executors_bounds_the_largest_size_too() -> None:
    assert sizes(planned(Nodes([8], most_executors=3), 1, 8)) == (1, 3, 3, 1)


def test_it_is_an_error_where_the_smallest_cannot_fit() -> None:
    with pytest.raises(CapacityError, match="5 executors"):
        planned(Nodes([2, 2]), 5, 8)
    with pytest.raises(ConfigError, match="3 executors"):
        planned(Nodes([8], most_executors=3), 4, 8)


def test_ranks_with_several_gpus() -> None:
    plan = planned(Nodes([4, 2]), 1, 8, gpus=2)
    assert sizes(plan) == (1, 3, 3, 1) and plan.shape.gpus == 2


def test_ranks_that_share_gpus_stay_together() -> None:
    plan = planned(Nodes([2, 1]), 2, 16, gpus=0.5)
    assert sizes(plan) == (2, 6, 3, 2) and plan.shape.gpus == 1


def test_packed_ranks_are_in_containers_of_one_shape() -> None:
    plan = planned(Nodes([4, 4]), 4, 8, placement="pack")
    assert sizes(plan) == (4, 8, 2, 4) and plan.shape.gpus == 4
    plan = planned(Nodes([4, 4]), 4, 6, placement="pack")
    assert sizes(plan) == (4, 6, 3, 2), "2 is the largest number that divides both sizes"
    plan = planned(Nodes([4, 4]), 2, 12, placement="pack")
    assert sizes(plan) == (2, 8, 4, 2)


def test_spread_ranks_are_at_most_one_on_each_node() -> None:
    assert sizes(planned(Nodes([4, 4, 4]), 2, 8, placement="spread")) == (2, 3, 3, 1)
    with pytest.raises(CapacityError):
        planned(Nodes([4]), 2, 8, placement="spread")


def test_a_gang_of_one_size_is_asked_for_once() -> None:
    nodes = Nodes([2, 2])
    site: Any = nodes
    plan = plan_of(GangArguments(spec=GangSpec("fit", workers=3), application=site), "run-1")
    assert nodes.asked == [3] and sizes(plan) == (3, 3, 3, 1)
