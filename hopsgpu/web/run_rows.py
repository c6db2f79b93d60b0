"""Runs as the rows of a list: what a page shows of many runs, and nothing else of their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hopsgpu.artifacts.runs import UNREADABLE, RunRecord, StoredRun
from hopsgpu.display import record_phrases
from hopsgpu.storage.error_messages import JSON_ERRORS


@dataclass(frozen=True)
class RunRow:
    """A run in a list.

    Attributes:
        root: key of the root that it is below.
        run_id: its id.
        state: its state, "lost", or "unreadable".
        is_running: whether its driver is working.
        problem: why its record cannot be read, or "".
        name: its name.
        user: user who submitted it.
        queue: YARN's queue, or "".
        application: YARN's id of its application.
        requested: when it began, in seconds since the epoch; or None.
        took: seconds until its end or until now; or None.
        ranks: its world size, or the smallest and the largest.
        gpus: its GPUs.
        gang: ranks and GPUs in words.
        model: name and number of the version that it published, or "".
        error: first line of its error, or "".
        waiting_for: what it waits for, or "".
        kind: "gang", "search" or "score".
    """

    root: str
    run_id: str
    state: str
    is_running: bool = False
    problem: str = ""
    name: str = ""
    user: str = ""
    queue: str = ""
    application: str = ""
    requested: float | None = None
    took: float | None = None
    ranks: str = ""
    gpus: int = 0
    gang: str = ""
    model: str = ""
    error: str = ""
    waiting_for: str = ""
    kind: str = "gang"


def row_of(root: str, run: StoredRun, now: float) -> RunRow:
    """Return the row of a run; one whose record is odd says why instead.

    Args:
        root: key of the root.
        run: the run.
        now: seconds since the epoch.
    """
    if run.record is None:
        return RunRow(root, run.run_id, UNREADABLE, problem=run.problem)
    try:
        return _row(root, run.record, now)
    except JSON_ERRORS as error:
        problem = f"its record is odd: {type(error).__name__}: {error}"
        return RunRow(root, run.run_id, UNREADABLE, problem=problem)


def _row(root: str, record: RunRecord, now: float) -> RunRow:
    content = record.content
    return RunRow(
        root=root,
        run_id=record.run_id,
        state=record.state_at(now),
        is_running=record.is_running(now),
        name=record.name,
        user=record.user,
        queue=str(content.get("queue") or ""),
        application=str(content.get("application") or ""),
        requested=record.timeline.get("requested"),
        took=record.took(now),
        ranks=record_phrases.world_sizes(content["spec"]),
        gpus=record.gpus,
        gang=record_phrases.gang(record),
        model="" if record.model is None else record_phrases.model(record.model),
        error=(record.error or "").partition("\n")[0],
        waiting_for=record_phrases.waiting_for(record, now),
        kind=next((kind for kind in ("search", "score") if kind in content), "gang"),
    )


def newest(rows: Sequence[RunRow], most: int) -> Sequence[RunRow]:
    """Return the newest runs of several roots, the newest first.

    Args:
        rows: the runs.
        most: how many at most.
    """
    return sorted(rows, key=lambda row: (row.requested or 0.0, row.run_id), reverse=True)[:most]
