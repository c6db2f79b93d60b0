"""The status of a score while it runs, and its results: frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hopsgpu.core.run_values import GpuSeconds, Timeline
from hopsgpu.core.trials import Moment


@dataclass(frozen=True)
class FailedPart:
    """Rows that were not scored.

    Attributes:
        first: number of the first row in the table, from 0.
        rows: number of rows.
        place: the rows, and where they are on the lake, in words.
        tries: how often they were tried.
        error: what failed last, with the user's traceback.
    """

    __module__ = "hopsgpu.types"

    first: int
    rows: int
    place: str
    tries: int
    error: str


@dataclass(frozen=True)
class ScoreStatus:
    """The status of a score at one moment.

    Attributes:
        run_id: the score's id.
        state: a GangState's value: "requested", "preparing", "waiting" until the first executor
            arrives, "starting", "running", "publishing", "releasing", "succeeded", "failed",
            "cancelled".
        elapsed: seconds since the score began.
        rows: number of rows of the table; 0 until it is known.
        scored: number of rows that have been scored, also by an earlier run of the score or in
            incomplete parts.
        parts: number of parts of the table.
        done: number of parts whose file is on the lake.
        failed: number of parts that were left out.
        rate: rows scored in a second, lately; None while it is unknown.
        seconds_left: expected duration at this rate; None while it is unknown.
        executors: executors that have arrived.
        most: largest number of executors that the score would use now.
        gpus: GPUs of an executor; 0 on CPUs.
        waiting_for: why the score has no more executors, as one sentence; "" if it wants no more.
        moments: GPUs held and used over time.
        gpu_seconds: how the GPU time has been spent so far; `training` is that of scoring.
        application: ID of the Spark application.
        queue: its YARN queue; "" without YARN.
        waiting_details: further phrases about `waiting_for`, the most useful first.
    """

    __module__ = "hopsgpu.types"

    run_id: str
    state: str
    elapsed: float
    rows: int = 0
    scored: int = 0
    parts: int = 0
    done: int = 0
    failed: int = 0
    rate: float | None = None
    seconds_left: float | None = None
    executors: int = 0
    most: int = 0
    gpus: int = 1
    waiting_for: str = ""
    moments: tuple[Moment, ...] = ()
    gpu_seconds: GpuSeconds = GpuSeconds()
    application: str = ""
    queue: str = ""
    waiting_details: tuple[str, ...] = ()

    @property
    def attempt(self) -> int:
        """Return 0, because parts are tried again, but not the score."""
        return 0


@dataclass(frozen=True)
class ScoreOutcome:
    """The outcome of a score, as values; users get it as a `ScoreResult`."""

    run_id: str
    url: str
    rows: int
    schema: Any = field(default=None, repr=False)
    failed_parts: tuple[FailedPart, ...] = ()
    gpu_seconds: GpuSeconds = GpuSeconds()
    timeline: Timeline = Timeline()
    moments: tuple[Moment, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    application: str = ""
    queue: str = ""
