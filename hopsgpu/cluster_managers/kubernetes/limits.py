"""The limits of the pods of a namespace: quotas and limit ranges. Pure.

Source: the Kubernetes documentation, "Resource Quotas" and "Limit Ranges".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from hopsgpu.cluster_managers.kubernetes.amounts import ExactAmount
from hopsgpu.cluster_managers.kubernetes.pods import list_of, mapping_of, text_of
from hopsgpu.cluster_managers.kubernetes.quantities import parse_quantity
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Queue

# More than all nodes have, so that it never binds.
_UNLIMITED = 2**53
_NO_LIMIT = ExactAmount(*(Fraction(_UNLIMITED),) * 3)
_CPU, _MEMORY = ("requests.cpu", "cpu"), ("requests.memory", "memory", "limits.memory")
CPU_LIMIT = "limits.cpu"


def quota_limits(
    quotas: Iterable[Mapping[str, Any]], gpu_resource: str, largest: Amount
) -> tuple[Queue, ...]:
    """Return the quotas that count executors, as limits.

    A quota with scopes counts only some pods, of which executors may be none: it is left out, and
    the pods' own events tell if it binds.

    Args:
        largest: the largest executor that a node or a limit range allows.
    """
    limits = []
    for quota in quotas:
        if mapping_of(quota, "spec").get("scopes") or quota_selector(quota):
            continue
        status = mapping_of(quota, "status")
        hard = mapping_of(status, "hard") or mapping_of(mapping_of(quota, "spec"), "hard")
        maximum, used = _amounts(hard, mapping_of(status, "used"), gpu_resource)
        if maximum != _NO_LIMIT:
            metadata = mapping_of(quota, "metadata")
            name, namespace = text_of(metadata, "name"), text_of(metadata, "namespace")
            free, most = (maximum - used).round_down(), maximum.round_down()
            limits.append(_limit(f"ResourceQuota {namespace}/{name}", most, most - free, largest))
    return tuple(limits)


def quota_selector(quota: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping_of(mapping_of(quota, "spec"), "scopeSelector")


def namespace_limit(namespace: str, largest: Amount) -> Queue:
    """Return the limit of a namespace without quotas, which never binds."""
    unlimited = Amount(_UNLIMITED, _UNLIMITED, _UNLIMITED)
    return _limit(f"namespace {namespace}", unlimited, NOTHING, largest)


def _limit(name: str, maximum: Amount, used: Amount, largest: Amount) -> Queue:
    return Queue(
        path=name,
        state="RUNNING",
        is_leaf=True,
        maximum=maximum,
        guaranteed=NOTHING,
        used=used,
        largest=largest,
        is_setting=True,
    )


def _amounts(
    hard: Mapping[str, Any], used: Mapping[str, Any], gpu_resource: str
) -> tuple[ExactAmount, ExactAmount]:
    """Return a quota's limit and its use, by the key that leaves least for each resource."""
    pairs = []
    for keys in ((f"requests.{gpu_resource}",), _CPU, _MEMORY):
        candidates = [
            (parse_quantity(hard[key]), parse_quantity(used.get(key) or 0))
            for key in keys
            if key in hard
        ]
        pairs.append(
            min(candidates, key=lambda p: p[0] - p[1], default=(Fraction(_UNLIMITED), Fraction(0)))
        )
    return ExactAmount(*(most for most, _ in pairs)), ExactAmount(*(use for _, use in pairs))


def largest_executor(
    ranges: Sequence[Mapping[str, Any]], nodes: Amount, gpu_resource: str
) -> Amount:
    """Return the largest executor: that of the nodes, within the limit ranges of the namespace."""
    largest = nodes
    for limit in (
        limit
        for limit_range in ranges
        for limit in list_of(mapping_of(limit_range, "spec"), "limits")
    ):
        if limit.get("type") not in ("Container", "Pod"):
            continue
        most = mapping_of(limit, "max")
        bound = ExactAmount(
            *(
                parse_quantity(most[name]) if name in most else Fraction(_UNLIMITED)
                for name in (gpu_resource, "cpu", "memory")
            )
        )
        largest = largest.min_with(bound.round_down())
    return largest


def quotas_with_cpu_limits(quotas: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the quotas that refuse every pod without a limit of its cores."""
    return [
        text_of(mapping_of(quota, "metadata"), "name")
        for quota in quotas
        if CPU_LIMIT in mapping_of(mapping_of(quota, "spec"), "hard")
    ]
