"""What metrics need of a run's record: a value with checked numbers. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.artifacts.run_uses import use_of
from hopsgpu.artifacts.runs import LOST_SECONDS, RunRecord
from hopsgpu.core.end_reason import EndReason, recorded_reason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import GpuUse, UsePoint
from hopsgpu.core.run_values import Timeline
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import JSON_ERRORS

# Who may write records may write any numbers: larger ones are no run's.
_MOST_GPU_SECONDS = 1e12
_MOST_GPUS = 1_000_000
_LATEST = 1e11
_MOST_SECONDS = 1e8
_MOST_RANKS = 4096
_MOST_GPUS_OF_RANK = 16
_MOST_BYTES = float(2**50)
_MOST_WATTS = 1e5
_MOST_ROWS = 1e15
_POINTS = frozenset(field.name for field in dataclasses.fields(Timeline))
# Points that end a phase before a run waits, or after which it may wait again.
_BEFORE_WAITING = ("requested", "prepared", "retried", "granted", "started", "returned")


@dataclass(frozen=True)
class GpuReading:
    """The last sample of a GPU of a rank that trains; None for what NVML does not report.

    Attributes:
        rank: the rank.
        host: its node.
        gpu: the GPU's UUID.
        utilisation: share in [0, 1].
        memory_used: bytes.
        memory_total: bytes.
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
        left: number of the other rows, without those of failed parts.
        failed_parts: number of parts that failed and are left out.
    """

    scored: int
    left: int
    failed_parts: int


@dataclass(frozen=True)
class RunDigest:
    """What metrics need of a run.

    Attributes:
        run_id: the run's id.
        user: the user who submitted it.
        queue: YARN's queue, as the session named it; "" on a local master.
        state: value of a GangState.
        reason: why it ended; None before its end.
        updated: when its record was written, in seconds since the epoch.
        gpus: number of GPUs of the gang.
        use: its GPU seconds until then.
        requested: when it began, in seconds since the epoch; a search or a score that is resumed
            begins again.
            None if the record does not say so.
        waits_since: since when it waits for executors, in seconds since the epoch; None if it does
            not wait.
        trains_since: since when its function runs, in seconds since the epoch; None if it does not,
            and for a search or a score, which save no checkpoints.
        waited: seconds from the request until the gang was whole; None if it never was.
        started: seconds from then until the function ran in all ranks; None if it never did.
        released: seconds from the end of training and publishing until the ResourceManager showed
            that the GPUs were released; None if that was not confirmed.
        aside: number of GPUs that are held aside, by host.
        readings: samples of its GPUs while it trains.
        score: how far it is, if it is a score.
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

    def is_lost(self, now: float) -> bool:
        """Return whether the run's driver is gone, as far as the record tells."""
        return self.reason is None and now - self.updated > LOST_SECONDS


def digest_of(record: RunRecord) -> RunDigest:
    """Return what metrics need of a run.

    Raises:
        StoreError: the record has odd numbers (kind "damaged").
    """
    try:
        return _digest(record)
    except JSON_ERRORS as error:
        raise StoreError(
            f"the record of {record.run_id} has odd values ({type(error).__name__}: {error})",
            kind="damaged",
        ) from error


def total_of(last: UsePoint) -> GpuUse:
    """Return the GPU seconds until a run's last point.

    Raises:
        ValueError: they are more than any run can have.
    """
    use = GpuUse(last.held, last.training, last.publishing, last.waited)
    if max(dataclasses.astuple(use)) > _MOST_GPU_SECONDS:
        raise ValueError(f"{use} is too much")
    return use


def _digest(record: RunRecord) -> RunDigest:
    content, state = record.content, record.state
    use = use_of(record, record.updated)
    is_gang = "search" not in content and "score" not in content
    if not 0 <= record.updated <= _LATEST or not 0 <= record.gpus <= _MOST_GPUS:
        raise ValueError(f"updated {record.updated!r:.99}, {record.gpus!r:.99} GPUs")
    passed = {
        name: at for name, at in record.timeline.items() if name in _POINTS and 0 <= at <= _LATEST
    }
    timeline = Timeline(**passed)
    phases = {name: s for name, s in timeline.phases() if 0 <= s <= _MOST_SECONDS}
    waits = state == GangState.WAITING.value
    runs = state == GangState.RUNNING.value
    return RunDigest(
        run_id=record.run_id,
        user=use.user,
        queue=use.queue,
        state=state,
        reason=recorded_reason(content.get("reason"), state) if record.has_ended else None,
        updated=record.updated,
        gpus=record.gpus,
        use=total_of(use.points[-1]),
        requested=timeline.requested,
        waits_since=max((passed[n] for n in _BEFORE_WAITING if n in passed), default=None)
        if waits
        else None,
        trains_since=timeline.started if runs and is_gang else None,
        # A run that gave up waiting has such a phase too.
        waited=None if timeline.granted is None else phases.get("waited"),
        started=None if timeline.started is None else phases.get("started"),
        released=None if timeline.returned is None else phases.get("released"),
        aside={} if record.has_ended else _aside(content.get("aside")),
        readings=tuple(_readings(content)) if runs and is_gang else (),
        score=_score(content["score"]) if "score" in content else None,
    )


def _score(fields: Any) -> ScoreProgress:
    rows, scored, failed = int(fields["rows"]), int(fields["scored"]), fields["failed_parts"]
    without = sum(int(part["rows"]) for part in failed)
    if min(scored, without) < 0 or not scored + without <= rows <= _MOST_ROWS:
        raise ValueError(f"{scored!r:.99} of {rows!r:.99} rows")
    return ScoreProgress(scored, max(rows - scored - without, 0), len(failed))


def _aside(fields: Any) -> Mapping[str, int]:
    return {
        str(host): int(gpus) for host, gpus in (fields or {}).items() if 0 < int(gpus) <= _MOST_GPUS
    }


def _readings(content: Mapping[str, Any]) -> Iterator[GpuReading]:
    metrics = content["metrics"]
    for rank in content["ranks"][:_MOST_RANKS]:
        number = int(rank["rank"])
        if rank["ended"] or not 0 <= number < len(metrics):
            continue
        for index, gpu in enumerate(rank["gpus"][:_MOST_GPUS_OF_RANK]):

            def last(
                name: str, most: float, values: Any = metrics[number], prefix: str = f"gpu.{index}."
            ) -> float | None:
                value = values.get(prefix + name)
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    return None
                return float(value) if 0 <= value <= most else None

            reading = GpuReading(
                rank=number,
                host=str(rank["host"]),
                gpu=str(gpu),
                utilisation=last("utilisation", 1.0),
                memory_used=last("memory_used", _MOST_BYTES),
                memory_total=last("memory_total", _MOST_BYTES),
                power=last("power", _MOST_WATTS),
            )
            if dataclasses.astuple(reading)[3:] != (None,) * 4:
                yield reading
