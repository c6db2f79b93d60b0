"""Exact amounts, which are rounded once."""

from __future__ import annotations

from hopsgpu.cluster_managers.kubernetes.amounts import amount_of, sum_exact
from hopsgpu.cluster_managers.resources import Amount
from tests.unit.cluster_managers.kubernetes.cluster_objects import GPU, exact


def test_parts_of_cores_are_rounded_after_the_subtraction() -> None:
    free = exact(2, "3.92", "15000.5") - exact(0, "0.2", "0.25")
    assert free.round_down() == Amount(2, 3, 15000)
    assert (exact(cores="3.92") - exact(cores="0.93")).round_down() == Amount(0, 2, 0)


def test_a_use_is_rounded_up() -> None:
    assert exact(1, "0.1", "0.5").round_up() == Amount(1, 1, 1)
    assert exact(1, 2, 3).round_up() == exact(1, 2, 3).round_down() == Amount(1, 2, 3)


def test_ten_tenths_of_a_core_are_one() -> None:
    assert sum_exact([exact(cores="0.1")] * 10) == exact(cores=1)
    assert sum_exact([]) == exact()


def test_the_larger_amount_of_each_resource() -> None:
    assert exact(1, 2, 3).max_with(exact(3, 1, 3)) == exact(3, 2, 3)


def test_only_the_resource_that_counts_gpus_is_gpus() -> None:
    resources = {"cpu": "500m", "memory": "1Gi", GPU: "2", "example.com/gpu": "7", "pods": "110"}
    assert amount_of(resources, GPU) == exact(2, "0.5", 1024)
    assert amount_of(resources, "example.com/gpu").gpus == 7
    assert amount_of(None, GPU) == amount_of({}, GPU) == exact()
