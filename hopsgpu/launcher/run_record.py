"""A run's record on the lake: run.json in the run's directory."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hopsgpu.artifacts.runs import RECORD, SCHEMA
from hopsgpu.core.metrics import for_json
from hopsgpu.core.run_values import RankReport
from hopsgpu.core.spec import GangSpec, LaunchPlan, redacted
from hopsgpu.core.version import __version__
from hopsgpu.errors import StoreError
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.storage.lake import Lake

if TYPE_CHECKING:
    from hopsgpu.backends.backend import Site


@dataclass(frozen=True)
class Standing:
    """How a run stands.

    Attributes:
        plan: what was to be done.
        result: what there is of a result.
        application: YARN's application id.
        user: who submitted it.
        state: a GangState's value.
        attempt: the latest, from 0.
        updated: when this was so, seconds since the epoch.
        error: what ended the run, or None.
        ranks: a report of each that has started, and whether it was seen to end.
        logs: bytes of each log so far, by its path in the run's directory.
        data: what is told of the data that the ranks read, by its name; None without any.
        python_env: that the ranks run with, once it is on the lake; or None.
        search: what is told of a search and its trials; None of another run.
    """

    plan: LaunchPlan
    result: GangResult
    application: str
    user: str
    state: str
    attempt: int
    updated: float
    error: str | None = None
    ranks: tuple[tuple[RankReport, bool], ...] = ()
    logs: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    python_env: PythonEnv | None = None
    search: Mapping[str, Any] | None = None


def content(standing: Standing, environment: Mapping[str, Any]) -> bytes:
    """The record as JSON (RFC 8259), schema 2; metrics as `measures.for_json` gives them.

    Args:
        standing: of the run.
        environment: as the function of this name gives it.
    """
    plan, result = standing.plan, standing.result
    return json.dumps(
        {
            "schema": SCHEMA,
            "run_id": result.run_id,
            "name": plan.spec.name,
            "user": standing.user,
            "application": standing.application,
            "state": standing.state,
            "attempt": standing.attempt,
            "error": standing.error,
            "updated": standing.updated,
            "timeline": asdict(result.timeline),
            "gpu_seconds": asdict(result.gpu_seconds),
            "model": result.model.url if result.model is not None else None,
            "data": standing.data,
            "spec": _spec(plan.spec),
            "python_env": None if standing.python_env is None else standing.python_env.as_fields(),
            "queue": plan.queue,
            "executors": plan.executors,
            "executor": asdict(plan.shape),
            "ranks": [{**asdict(rank), "ended": ended} for rank, ended in standing.ranks],
            "metrics": [{n: for_json(v) for n, v in last.items()} for last in result.metrics],
            "logs": standing.logs,
            "warnings": result.warnings,
            "environment": environment,
            **({} if standing.search is None else {"search": standing.search}),
        },
        indent=1,
        allow_nan=False,
    ).encode()


def _spec(spec: GangSpec) -> dict[str, Any]:
    return {
        **{name: value for name, value in vars(spec).items() if name not in ("gpus", "env_vars")},
        "gpus_per_worker": spec.gpus.per_worker,
        "env_vars": redacted(spec.env_vars),
    }


def environment(application: Site) -> dict[str, Any]:
    """In what a run was started: versions of all that the driver has, and where it is.

    The first call in a process reads the metadata of all installed packages, which takes some
    hundred milliseconds, and asks the JVM.
    """
    return {
        "hopsgpu": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        **application.versions,
        "driver": {"host": socket.gethostname(), "system": platform.platform()},
        "packages": packages(),
    }


@functools.cache
def packages() -> dict[str, str]:
    """Versions of the packages that are installed at the driver, by name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # What lies half removed has no name.
        name = distribution.metadata["Name"] if distribution.metadata is not None else None
        if name is not None:
            # The first is the one that is imported.
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def write(directory: Lake, record: bytes) -> None:
    """Writes a record into a run's directory; who reads it meanwhile gets the one before.

    Raises:
        StoreError: the lake refused.
    """
    try:
        (directory / RECORD).replace(record)
    except StoreError as error:
        raise StoreError(f"the run's record is not on the lake: {error}") from error
