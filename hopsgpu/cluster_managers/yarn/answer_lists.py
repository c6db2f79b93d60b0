"""The form of Hadoop's REST answers: lists of every Hadoop version, and named fields. Pure.

Hadoop 3.5 writes lists. A daemon of Hadoop 3.3 does not for classes that JAXBContextResolver of its
web application does not name. One element is written as the element alone, several as a repeated
field, and none as null, "" or an object without fields.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

# Fields that are always lists.
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
# Pairs of outer and inner field: the inner one is a list there, and a value elsewhere.
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


class FieldTrail(threading.local):
    """The field that this thread has read last, for the explanation of an error.

    Attributes:
        url: the requested URL.
        field: path of the field in its answer, such as "apps.app[3].id"; "" for the whole answer.
    """

    url: str = ""
    field: str = ""

    def explain(self, error: Exception) -> str:
        """Return in words what is wrong with the last field."""
        if not self.field:
            return f"it is not an object with fields ({error})"
        if isinstance(error, KeyError) and self.field.endswith(str(error.args[0])):
            return f"the field {self.field} is missing"
        return f"the field {self.field} has an unexpected form ({type(error).__name__}: {error})"


class Fields(dict[str, Any]):
    """A JSON object of an answer, which records in a trail the field that is read."""

    def __init__(self, fields: dict[str, Any], url: str, path: str, trail: FieldTrail) -> None:
        super().__init__(fields)
        self._url = url
        self._path = path
        self._trail = trail

    def _record(self, field: str) -> None:
        self._trail.url = self._url
        self._trail.field = _join_path(self._path, field)

    def __getitem__(self, field: str) -> Any:
        self._record(field)
        return super().__getitem__(field)

    def get(self, field: str, default: Any = None) -> Any:
        self._record(field)
        return super().get(field, default)


def join_repeated(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose repeated fields are lists; an `object_pairs_hook` of `json`."""
    joined: dict[str, list[Any]] = {}
    for field, value in pairs:
        joined.setdefault(field, []).append(value)
    return {field: values[0] if len(values) == 1 else values for field, values in joined.items()}


def with_lists(answer: Any, url: str = "", trail: FieldTrail | None = None) -> Any:
    """Return an answer in the form of Hadoop 3.5.

    Args:
        trail: records the field that is read; None for no record.
    """
    notes = trail or FieldTrail()

    def convert(value: Any, name: str, path: str) -> Any:
        # `name` is the name of the value's field; "" for the whole answer and in a list.
        if isinstance(value, list):
            return [convert(element, "", f"{path}[{n}]") for n, element in enumerate(value)]
        if not isinstance(value, dict):
            return value
        fields = {}
        for field, inner in value.items():
            is_list = field in _LISTS or (name, field) in _LISTS_IN
            if is_list and not isinstance(inner, list):
                inner = [] if inner in (None, "", {}) else [inner]
            fields[field] = convert(inner, field, _join_path(path, field))
        return Fields(fields, url, path, notes)

    return convert(answer, "", "")


def _join_path(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
