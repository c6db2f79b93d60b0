"""A standalone master's JSON, read as values. Pure.

Source of the fields: answers of PySpark 4.3.0, kept in tests/unit/spark_answers, and Spark's
JsonProtocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node

ALIVE = "ALIVE"
# Spark's state of a worker → the state that the decisions know.
_STATES = {"ALIVE": "RUNNING", "DEAD": "LOST", "UNKNOWN": "LOST"}
_MAX_NUMBER = 10**15
_MAX_TEXT = 200
_ID = re.compile(r"[\w.:\[\]-]{1,300}")


@dataclass(frozen=True)
class ListedApplication:
    """An application in the master's JSON.

    Attributes:
        started: in seconds since the epoch.
        ended: in seconds since the epoch; the present for one that runs.
        cores: number of cores of its executors.
        has_gpu_request: whether its default executors request GPUs; others are not listed.
    """

    id: str
    name: str
    user: str
    state: str
    started: float
    ended: float
    cores: int
    has_gpu_request: bool


@dataclass(frozen=True)
class MasterState:
    """The report of a master.

    Attributes:
        status: ALIVE, STANDBY, RECOVERING or COMPLETING_RECOVERY.
        active: applications that wait or run.
        completed: those that have ended, of which a master keeps the last 200 by default.
    """

    status: str
    nodes: tuple[Node, ...]
    active: tuple[ListedApplication, ...]
    completed: tuple[ListedApplication, ...]


def read_master(answer: Any, gpu_resource: str) -> MasterState:
    """Return what a master's JSON means.

    Raises:
        ValueError: a field is missing or has an unexpected form; the message names the field.
    """
    root = _object(answer, "the answer")
    workers = [
        (_object(worker, f"workers[{n}]"), f"workers[{n}]")
        for n, worker in enumerate(_list(root, "workers", ""))
    ]
    return MasterState(
        status=_text(root, "status", ""),
        nodes=tuple(
            _node(fields, where, gpu_resource)
            for fields, where in workers
            if not _was_restarted(fields, [other for other, _ in workers])
        ),
        active=_applications(root, "activeapps", gpu_resource),
        completed=_applications(root, "completedapps", gpu_resource),
    )


def _was_restarted(worker: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a worker is the dead predecessor of one that lives."""

    def is_successor(other: Mapping[str, Any]) -> bool:
        is_same = any(worker.get(name) == other.get(name) for name in ("port", "webuiaddress"))
        return other.get("state") == ALIVE and worker.get("host") == other.get("host") and is_same

    return worker.get("state") == "DEAD" and any(map(is_successor, workers))


def _node(worker: Mapping[str, Any], where: str, gpu_resource: str) -> Node:
    state = _text(worker, "state", where)
    sizes = _resources(worker, "resources", where)
    used = Amount(
        _resources(worker, "resourcesused", where).get(gpu_resource, 0),
        _number(worker, "coresused", where),
        _number(worker, "memoryused", where),
    )
    return Node(
        id=_id(worker, where),
        host=_text(worker, "host", where),
        state=_STATES.get(state, state),
        total=Amount(
            sizes.get(gpu_resource, 0),
            _number(worker, "cores", where),
            _number(worker, "memory", where),
        ),
        # The master never subtracts what executors of a dead worker had.
        used=NOTHING if state == "DEAD" else used,
        web=_host_and_port(_text(worker, "webuiaddress", where)),
        other_resources=frozenset(sizes) - {gpu_resource},
    )


def _applications(
    root: Mapping[str, Any], field: str, gpu_resource: str
) -> tuple[ListedApplication, ...]:
    return tuple(
        _application(_object(app, f"{field}[{n}]"), f"{field}[{n}]", gpu_resource)
        for n, app in enumerate(_list(root, field, ""))
    )


def _application(app: Mapping[str, Any], where: str, gpu_resource: str) -> ListedApplication:
    started = _number(app, "starttime", where)
    requested = _list(app, "resourcesperexecutor", where)
    return ListedApplication(
        id=_id(app, where),
        name=_text(app, "name", where),
        user=_text(app, "user", where),
        state=_text(app, "state", where),
        started=started / 1000,
        ended=(started + _number(app, "duration", where)) / 1000,
        cores=_number(app, "cores", where),
        has_gpu_request=any(
            isinstance(resource, Mapping) and resource.get("name") == gpu_resource
            for resource in requested
        ),
    )


def _host_and_port(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def _resources(worker: Mapping[str, Any], name: str, where: str) -> dict[str, int]:
    """Return the number of addresses of each resource; a worker without any may list none."""
    listed = _object(worker.get(name) or {}, f"{where}.{name}")
    return {
        resource: len(_list(_object(entry, f"{where}.{name}.{resource}"), "addresses", where))
        for resource, entry in listed.items()
    }


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is not an object with fields")
    return value


def _field(fields: Mapping[str, Any], name: str, where: str) -> tuple[Any, str]:
    path = f"{where}.{name}" if where else name
    if name not in fields:
        raise ValueError(f"the field {path} is missing")
    return fields[name], path


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value, path = _field(fields, name, where)
    if not isinstance(value, list):
        raise ValueError(f"the field {path} is not a list")
    return value


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value, path = _field(fields, name, where)
    if not isinstance(value, str):
        raise ValueError(f"the field {path} is not a text")
    return value[:_MAX_TEXT]


def _id(fields: Mapping[str, Any], where: str) -> str:
    value = fields.get("id")
    if not (isinstance(value, str) and _ID.fullmatch(value)):
        raise ValueError(f"the field {where}.id is not an ID")
    return value


def _number(fields: Mapping[str, Any], name: str, where: str) -> int:
    value, path = _field(fields, name, where)
    is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER
    if not is_valid:
        raise ValueError(f"the field {path} is not a whole number from 0 to {_MAX_NUMBER}")
    return int(value)
