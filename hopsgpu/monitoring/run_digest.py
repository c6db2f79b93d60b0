"""The part of a run's record that metrics need. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hopsgpu.artifacts.run_uses import use_of
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.core.run_record import LOST_SECONDS, RunRecord, ScoreRecord

# No run has a longer phase; a forged one would spoil the sums of a histogram.
_MAX_SECONDS = 1e8
_MAX_RANKS = 4096
_MAX_GPUS_OF_RANK = 16
# Users may write any numbers into records; no GPU has larger readings.
_MAX_OF_READING = {
    "utilisation": 1.0,
    "memory_used": float(2**50),
    "memory_total": float(2**50),
    "power": 1e5,
}
# Points that end a phase before a run waits, or after which it may wait again.
_BEFORE_WAITING = ("requested", "prepared", "retried", "granted", "started", "returned")


@dataclass(frozen=True)
class GpuReading:
    """The last sample of a GPU of a rank that trains; None for what NVML does not report.

    Attributes:
        utilisation: share in [0, 1].
        power: W.
    """

    rank: int
    host: str
    gpu: str
    utilisation: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    power: float | None = None


@dataclass(frozen=True)
class ScoreProgress:
    """How far a score is.

    Attributes:
        scored: number of rows that are on the lake.
        rows_left: number of the other rows, without those of failed parts.
    """

    scored: int
    rows_left: int
    failed_parts: int


@dataclass(frozen=True)
class RunDigest:
    """The part of a run's record that metrics need.

    Attributes:
        queue: YARN's queue, as the session named it; "" on a local master.
        reason: why it ended; None before its end.
        updated: when its record was written, in seconds since the epoch.
        use: its GPU seconds until then.
        requested: when it began, in seconds since the epoch; or None. A search or a score that is
            resumed begins again.
        waits_since: since when it waits for executors, in seconds since the epoch; None if it does
            not wait.
        trains_since: since when its function runs, in seconds since the epoch; None if it does not,
            and for a search or a score, which save no checkpoints.
        waited: seconds from the request until the gang was whole; None if it never was.
        started: seconds from then until the function ran in all ranks; None if it never did.
        released: seconds from the end of training and publishing until the ResourceManager showed
            that the GPUs were released; None if that was not confirmed.
        aside: number of GPUs of parked executors, by host.
        readings: samples of its GPUs while it trains.
        score: how far it is, if it is a score.
        application: YARN's ID of its application; another text on a local master.
    """

    run_id: str
    user: str
    queue: str
    state: str
    reason: EndReason | None
    updated: float
    gpus: int
    use: GpuUse
    requested: float | None = None
    waits_since: float | None = None
    trains_since: float | None = None
    waited: float | None = None
    started: float | None = None
    released: float | None = None
    aside: Mapping[str, int] = dataclasses.field(default_factory=dict)
    readings: tuple[GpuReading, ...] = ()
    score: ScoreProgress | None = None
    application: str = ""

    def is_lost(self, now: float) -> bool:
        """Return whether the run's driver is gone, as far as the record tells."""
        return self.reason is None and now - self.updated > LOST_SECONDS


def digest_of(record: RunRecord) -> RunDigest:
    use = use_of(record, record.updated)
    last, timeline = use.points[-1], record.timeline
    phases = {name: s for name, s in timeline.phases() if s <= _MAX_SECONDS}
    is_training = record.state == GangState.RUNNING.value and record.kind == "gang"
    waits_since = max(
        (at for name in _BEFORE_WAITING if (at := getattr(timeline, name)) is not None),
        default=None,
    )
    return RunDigest(
        run_id=record.run_id,
        user=use.user,
        queue=use.queue,
        state=record.state,
        reason=record.reason if record.has_ended else None,
        updated=record.updated,
        gpus=record.gpus,
        use=last.total,
        requested=timeline.requested,
        waits_since=waits_since if record.state == GangState.WAITING.value else None,
        trains_since=timeline.started if is_training else None,
        # A run that gave up waiting also has this phase.
        waited=None if timeline.granted is None else phases.get("waited"),
        started=None if timeline.started is None else phases.get("started"),
        released=None if timeline.returned is None else phases.get("released"),
        aside={} if record.has_ended else record.aside,
        readings=tuple(_readings(record)) if is_training else (),
        score=None if record.score is None else _progress_of(record.score),
        application=record.application,
    )


def _progress_of(score: ScoreRecord) -> ScoreProgress:
    failed_rows = sum(part.rows for part in score.failed_parts)
    rows_left = score.rows - score.scored - failed_rows
    return ScoreProgress(score.scored, rows_left, len(score.failed_parts))


def _readings(record: RunRecord) -> Iterator[GpuReading]:
    for rank in record.ranks[:_MAX_RANKS]:
        if rank.has_ended or rank.rank >= len(record.metrics):
            continue
        values = record.metrics[rank.rank]
        for index, gpu in enumerate(rank.gpus[:_MAX_GPUS_OF_RANK]):
            readings = {
                name: value
                for name, most in _MAX_OF_READING.items()
                if 0 <= (value := values.get(f"gpu.{index}.{name}", -1.0)) <= most
            }
            if readings:
                yield GpuReading(rank=rank.rank, host=rank.host, gpu=gpu, **readings)
