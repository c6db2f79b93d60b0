"""The record of a run on the lake: run.json in the run's directory."""

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
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gpu_use import Points
from hopsgpu.core.metrics import for_json
from hopsgpu.core.run_values import RankReport
from hopsgpu.core.spec import GangSpec, LaunchPlan, redacted
from hopsgpu.core.version import __version__
from hopsgpu.core.waits import Wait
from hopsgpu.errors import StoreError
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.storage.lake import LakePath

if TYPE_CHECKING:
    from hopsgpu.backends.gang_application import GangApplication


@dataclass(frozen=True)
class RunDetails:
    """The part of a run's record that only the run itself knows.

    Attributes:
        data: description of the data that the ranks read, by its name; None without data.
        python_env: the Python environment of the ranks, once it is on the lake; or None.
        search: description of a search and its trials; None if the run is not a search.
        score: description of a score and its parts; None if the run is not a score.
    """

    data: Mapping[str, Any] | None = None
    python_env: PythonEnv | None = None
    search: Mapping[str, Any] | None = None
    score: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run, as its record shows it.

    Attributes:
        plan: the run's plan.
        result: the result, as far as there is one yet.
        application: YARN's application id.
        user: user who submitted the run.
        state: value of a GangState.
        attempt: number of the latest attempt, from 0.
        updated: time of this state, in seconds since the epoch.
        error: the error that ended the run, or None.
        reason: why the run ended; None before its end.
        waiting_for: what the run waits for, or is about to do, in words; "" for nothing.
        aside: number of GPUs that are held aside, and get no rank, by host.
        ranks: for each rank that has started, its report and whether its end is known.
        logs: bytes of each log so far, by its path in the run's directory.
        use: the run's GPU seconds over time, as far as they are recorded.
        waits: what the run waited for, over time.
        details: what only the run itself knows.
    """

    plan: LaunchPlan
    result: GangResult
    application: str
    user: str
    state: str
    attempt: int
    updated: float
    error: str | None = None
    reason: EndReason | None = None
    waiting_for: str = ""
    aside: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[tuple[RankReport, bool], ...] = ()
    logs: Mapping[str, int] = field(default_factory=dict)
    use: Points = ()
    waits: tuple[Wait, ...] = ()
    details: RunDetails = RunDetails()


def content(snapshot: RunSnapshot, environment: Mapping[str, Any]) -> bytes:
    """Return the record as JSON (RFC 8259), schema 2; metrics are encoded by `metrics.for_json`.

    Args:
        snapshot: the run's state.
        environment: the result of the function `environment`.
    """
    plan, result, details = snapshot.plan, snapshot.result, snapshot.details
    return json.dumps(
        {
            "schema": SCHEMA,
            "run_id": result.run_id,
            "name": plan.spec.name,
            "user": snapshot.user,
            "application": snapshot.application,
            "state": snapshot.state,
            "attempt": snapshot.attempt,
            "error": snapshot.error,
            **({} if snapshot.reason is None else {"reason": snapshot.reason.value}),
            "waiting_for": snapshot.waiting_for,
            **({"waits": [asdict(wait) for wait in snapshot.waits]} if snapshot.waits else {}),
            "updated": snapshot.updated,
            "timeline": asdict(result.timeline),
            "gpu_seconds": asdict(result.gpu_seconds),
            **({"use": [point.rounded() for point in snapshot.use]} if snapshot.use else {}),
            "model": result.model.url if result.model is not None else None,
            "data": details.data,
            "spec": _spec(plan.spec),
            "python_env": None if details.python_env is None else details.python_env.as_fields(),
            "queue": plan.queue,
            "executors": plan.executors,
            "executor": asdict(plan.shape),
            **({"aside": snapshot.aside} if snapshot.aside else {}),
            "ranks": [{**asdict(rank), "ended": ended} for rank, ended in snapshot.ranks],
            "metrics": [{n: for_json(v) for n, v in last.items()} for last in result.metrics],
            "logs": snapshot.logs,
            **({"worlds": [asdict(world) for world in result.worlds]} if result.worlds else {}),
            "warnings": result.warnings,
            "environment": environment,
            **({} if details.search is None else {"search": details.search}),
            **({} if details.score is None else {"score": details.score}),
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


def environment(application: GangApplication) -> dict[str, Any]:
    """Return the environment in which a run was started: the driver's host, versions, packages.

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
    """Return the versions of the packages that are installed at the driver, by name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # A package that was removed incompletely has no name.
        name = distribution.metadata["Name"] if distribution.metadata is not None else None
        if name is not None:
            # Of several with one name, Python imports the first.
            versions.setdefault(name, distribution.version)
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def write(directory: LakePath, record: bytes) -> None:
    """Write a record into a run's directory; a concurrent reader gets the previous record.

    Raises:
        StoreError: the lake refused.
    """
    try:
        (directory / RECORD).replace(record)
    except StoreError as error:
        raise StoreError(f"the run's record was not written to the lake: {error}") from error
