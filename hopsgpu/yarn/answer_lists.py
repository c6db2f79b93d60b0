"""The lists in Hadoop's REST answers, whatever version of Hadoop wrote them. Pure.

A daemon of Hadoop 3.3 writes some lists (of the classes that JAXBContextResolver, in the web
applications of the ResourceManager and the NodeManager, does not name) in three forms: one element
as the element alone, several as a field that an object has several times, none as null, "" or an
object without fields. Hadoop 3.5 writes lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Fields that are lists wherever they are.
_LISTS = frozenset(
    {
        "entry",
        "resourceInformation",
        "resourceUsagesByPartition",
        "queueCapacitiesByPartition",
        "nodeLabels",
        "nodeLabelInfo",
        "appAttempt",
        "container",
        "assignedGpuDevices",
        "totalGpuDevices",
    }
)
# Fields that are lists within another one; elsewhere a field of this name is a value.
_LISTS_IN = frozenset(
    {
        ("nodes", "node"),
        ("apps", "app"),
        ("queues", "queue"),
        ("childQueues", "queue"),
        ("users", "user"),
        ("gpuDeviceInformation", "gpu"),
        ("gpuDeviceInformation", "gpus"),
    }
)


def join_repeated(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose repeated fields are lists; an `object_pairs_hook` of `json`."""
    joined: dict[str, list[Any]] = {}
    for field, value in pairs:
        joined.setdefault(field, []).append(value)
    return {field: values[0] if len(values) == 1 else values for field, values in joined.items()}


def with_lists(answer: Any, name: str = "") -> Any:
    """Return an answer in the form of Hadoop 3.5, in which every list is a list.

    Args:
        answer: a JSON value.
        name: of the field that has it; "" for the whole answer.
    """
    if isinstance(answer, list):
        return [with_lists(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {
        field: _as_list(value, field)
        if field in _LISTS or (name, field) in _LISTS_IN
        else with_lists(value, field)
        for field, value in answer.items()
    }


def _as_list(value: Any, field: str) -> list[Any]:
    if isinstance(value, list):
        return [with_lists(one) for one in value]
    return [] if value in (None, "", {}) else [with_lists(value)]
