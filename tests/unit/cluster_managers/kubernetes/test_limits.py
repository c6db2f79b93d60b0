"""Quotas and limit ranges of a namespace as limits of executors."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes.limits import (
    largest_executor,
    namespace_limit,
    quota_limits,
    quota_selector,
    quotas_with_cpu_limits,
)
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Queue
from hopsgpu.errors import HopsGpuError
from tests.unit.cluster_managers.kubernetes import api_server
from tests.unit.cluster_managers.kubernetes.cluster_objects import GPU

LARGEST = Amount(8, 64, 10**6)
GPUS = f"requests.{GPU}"


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    status = {"hard": hard, "used": used or {}}
    return {"metadata": {"name": "q"}, "spec": {"hard": hard, **spec}, "status": status}


def limit_of(hard: dict[str, str], used: dict[str, str] | None = None) -> Queue:
    (limit,) = quota_limits([quota(hard, used)], GPU, LARGEST)
    return limit


def free_of(hard: dict[str, str], used: dict[str, str] | None = None) -> Amount:
    limit = limit_of(hard, used)
    return limit.maximum - limit.used


def range_of(*limits: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"limits": list(limits)}}


def test_the_recorded_quotas() -> None:
    quotas = api_server.recorded_list("quotas")["items"]
    (limit,) = quota_limits(quotas, GPU, LARGEST)
    assert limit.path == limit.title == "ResourceQuota recorded/team"
    assert limit.maximum == Amount(3, 6, 4096)
    # Pods without a node count too, so that more than the limit is used.
    assert limit.maximum - limit.used == Amount(-8, 2, 2528)
    assert limit.largest == LARGEST and limit.state == "RUNNING"


def test_a_quota_of_gpus_limits_nothing_else() -> None:
    free = free_of({GPUS: "4"}, {GPUS: "1"})
    assert free.gpus == 3
    assert free.cores > 10**6 and free.memory_mib > 10**9


def test_a_quota_of_another_resource_is_no_limit() -> None:
    assert quota_limits([quota({"pods": "5", "requests.amd.com/gpu": "1"})], GPU, LARGEST) == ()


@pytest.mark.parametrize("key", ["cpu", "requests.cpu"])
def test_parts_of_cores_are_rounded_after_the_subtraction(key: str) -> None:
    assert free_of({key: "3920m"}, {key: "200m"}).cores == 3
    assert free_of({key: "3920m"}, {key: "930m"}).cores == 2


@pytest.mark.parametrize("key", ["memory", "requests.memory", "limits.memory"])
def test_each_key_of_memory_limits(key: str) -> None:
    assert free_of({key: "8Gi"}, {key: "1Gi"}).memory_mib == 7168


def test_the_key_that_leaves_least_counts() -> None:
    hard = {"requests.memory": "8Gi", "limits.memory": "10Gi"}
    assert free_of(hard, {"requests.memory": "1Gi", "limits.memory": "9Gi"}).memory_mib == 1024


def test_a_quota_without_a_status_is_unused() -> None:
    new = {"metadata": {"name": "q"}, "spec": {"hard": {GPUS: "2"}}}
    (limit,) = quota_limits([new], GPU, LARGEST)
    assert (limit.maximum.gpus, limit.used.gpus) == (2, 0)


def test_a_quota_of_no_gpus_is_a_limit() -> None:
    assert free_of({GPUS: "0"}).gpus == 0


def test_quotas_with_scopes_are_left_out() -> None:
    selector = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "Exists"}]}
    with_scopes = quota({GPUS: "0"}, scopes=["BestEffort"])
    with_selector = quota({GPUS: "0"}, scopeSelector=selector)
    assert quota_limits([with_scopes, with_selector], GPU, LARGEST) == ()
    assert quota_selector(with_selector) == selector and not quota_selector(with_scopes)


def test_each_quota_is_a_limit_of_its_own() -> None:
    limits = quota_limits([quota({GPUS: "4"}), quota({"cpu": "8"})], GPU, LARGEST)
    assert [limit.maximum.gpus == 4 for limit in limits] == [True, False]


def test_a_quota_of_another_form_is_refused() -> None:
    with pytest.raises(HopsGpuError, match="'many' where a quantity is expected"):
        limit_of({GPUS: "many"})


def test_a_namespace_without_quotas_has_a_limit_that_never_binds() -> None:
    limit = namespace_limit("team", LARGEST)
    assert limit.title == "namespace team" and limit.used == NOTHING
    assert Amount(10**6, 10**9, 10**12).is_within(limit.maximum)
    assert limit.largest == LARGEST


def test_the_recorded_limit_range() -> None:
    ranges = api_server.recorded_list("limitranges")["items"]
    assert largest_executor(ranges, Amount(2, 7, 16334), GPU) == Amount(2, 2, 2048)


@pytest.mark.parametrize(
    ("ranges", "largest"),
    [
        ([], LARGEST),
        ([range_of()], LARGEST),
        ([range_of({"type": "Container", "max": {GPU: "2"}})], Amount(2, 64, 10**6)),
        ([range_of({"type": "Pod", "max": {"cpu": "1500m"}})], Amount(8, 1, 10**6)),
        ([range_of({"type": "Pod", "max": {"memory": "1Gi"}})], Amount(8, 64, 1024)),
        ([range_of({"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}})], LARGEST),
        ([range_of({"type": "Container", "min": {"cpu": "1"}, "default": {"cpu": "2"}})], LARGEST),
        (
            [
                range_of(
                    {"type": "Container", "max": {"cpu": "4"}}, {"type": "Pod", "max": {"cpu": "9"}}
                ),
                range_of({"type": "Pod", "max": {"cpu": "3", GPU: "1"}}),
            ],
            Amount(1, 3, 10**6),
        ),
        ([range_of({"type": "Container", "max": {"cpu": "1000"}})], LARGEST),
    ],
)
def test_limit_ranges_bound_the_largest_executor(ranges: list[Any], largest: Amount) -> None:
    assert largest_executor(ranges, LARGEST, GPU) == largest


def test_quotas_that_require_a_limit_of_cores() -> None:
    quotas = [quota({"limits.cpu": "8"}), quota({"requests.cpu": "8"}), quota({GPUS: "1"})]
    assert quotas_with_cpu_limits(quotas) == ["q"]
    assert quotas_with_cpu_limits(api_server.recorded_list("quotas")["items"]) == []
