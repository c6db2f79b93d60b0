"""A run's record on the lake: run.json in the run's directory."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hopsgpu.errors import StoreError
from hopsgpu.results import GangResult
from hopsgpu.spec import GangSpec, LaunchPlan, redacted
from hopsgpu.stores.lake import Lake
from hopsgpu.worker.measures import for_json

RECORD = "run.json"


def content(
    plan: LaunchPlan,
    result: GangResult,
    *,
    application: str,
    state: str,
    attempt: int,
    error: str | None,
) -> bytes:
    """The record as JSON (RFC 8259), schema 1; metrics as `measures.for_json` gives them.

    Args:
        plan: what was to be done.
        result: what there is of a result.
        application: YARN's application id.
        state: a GangState's value.
        attempt: the latest, from 0.
        error: what ended the run, or None.
    """
    return json.dumps(
        {
            "schema": 1,
            "run_id": result.run_id,
            "application": application,
            "state": state,
            "attempt": attempt,
            "error": error,
            "spec": _spec(plan.spec),
            "queue": plan.queue,
            "executor": asdict(plan.shape),
            "timeline": asdict(result.timeline),
            "gpu_seconds": asdict(result.gpu_seconds),
            "ranks": [asdict(rank) for rank in result.ranks],
            "metrics": [{n: for_json(v) for n, v in last.items()} for last in result.metrics],
            "warnings": result.warnings,
            "model": result.model.url if result.model is not None else None,
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


def write(directory: Lake, record: bytes) -> None:
    """Writes a record into a run's directory.

    Raises:
        StoreError: the lake refused.
    """
    try:
        (directory / RECORD).write(record)
    except StoreError as error:
        raise StoreError(f"the run's record is not on the lake: {error}") from error
