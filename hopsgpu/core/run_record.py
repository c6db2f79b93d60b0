"""The record of a run: the value, and the content of its file run.json."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.formats import duration
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import Points, UsePoint
from hopsgpu.core.redaction import redact_json, without_secrets
from hopsgpu.core.run_values import GpuSeconds, RankReport, Timeline, WorldReport
from hopsgpu.core.scores import FailedPart
from hopsgpu.core.spec import ExecutorShape, GangSpec, GpuRequest
from hopsgpu.core.trials import RUNNING, Best, TrialReport
from hopsgpu.core.typed_json import OMITTED_DEFAULT, Codec, MisfitError, Range, loads
from hopsgpu.core.waits import Wait
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.units import MIB

SCHEMA = 3
# Readers accept no larger file; `encode` shortens a record until it fits.
LARGEST_RECORD = MIB
# A driver writes its record at least every 20 s. After SILENT_SECONDS, readers ask YARN whether the
# driver's application has ended.
SILENT_SECONDS = 25.0
LOST_SECONDS = 60.0
LOST = "lost"
# YARN's IDs; on a local master, a run's application has another form.
APPLICATION_ID = re.compile(r"application_\d+_\d+|app-\d{14}-\d{4,}")
# Kinds of a StoreError.
OTHER_SCHEMA = "schema"
DAMAGED = "damaged"
_LOGS = "`hopsgpu logs ID` may still work"
_TERMINAL = frozenset(state.value for state in GangState if state.is_terminal)
_STATES = frozenset(state.value for state in GangState)
_MAX_GPUS = 1_000_000
_MAX_LISTED = 4096
_MAX_METRICS = 16_384
_SAMPLES = "gpu."
_STEP = "step"


@dataclass(frozen=True)
class RankRecord(RankReport):
    """A rank in a record; `has_ended` says whether the driver saw its end."""

    has_ended: bool = False


@dataclass(frozen=True)
class FailureRecord:
    """The error that ended a run, in short.

    Attributes:
        summary: the error in one line without places; an exception of the function comes first.
        rank: the rank that failed first; None if no single rank did.
    """

    summary: str
    rank: int | None = None


@dataclass(frozen=True)
class ApplicationReport:
    """YARN's report on the application of a run whose driver is silent.

    Attributes:
        state: NEW, SUBMITTED, ACCEPTED, RUNNING, FINISHED, FAILED or KILLED.
        diagnostics: YARN's reason of the state in one line, or "".
    """

    state: str
    diagnostics: str
    has_ended: bool


@dataclass(frozen=True)
class DataRecord:
    """Data that the ranks read.

    Attributes:
        written: whether it was written for this run.
        kept: whether it stays on the lake after the run.
        schema: Arrow types by column.
        more_columns: number of columns that `schema` lacks.
    """

    url: str
    written: bool
    kept: bool
    rows: int
    bytes: int
    files: int
    schema: Mapping[str, str]
    more_columns: int
    remainder: str
    seed: int | None


@dataclass(frozen=True)
class EnvironmentRecord:
    """The versions with which a run was started; "" if unknown.

    Attributes:
        executable: path of the driver's Python.
        driver: "host" and "system" of the driver, and its YARN "container" if it runs in one.
        packages: versions of the driver's packages, by name.
        commit: Git's commit of the driver's working directory.
        has_changes: whether files that Git tracks there differed from the commit.
    """

    hopsgpu: str
    python: str
    executable: str = ""
    spark: str = ""
    hadoop: str = ""
    driver: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    has_changes: bool = False


@dataclass(frozen=True)
class CallRecord:
    """The function that a run calls, and its arguments.

    Attributes:
        function: its name, with its module unless that is `__main__`.
        code_digest: digest of the function and the user's modules, without arguments.
        arguments: short texts of the values by name; the items of a mapping have names of their
            own, as in "config.width".
    """

    function: str
    code_digest: str
    arguments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchRecord:
    """A search, with the values of its arguments, and its trials in the order of their numbers.

    Attributes:
        gpus_per_trial: GPUs of each rank of a trial.
        space: distributions by parameter, or the name of a function.
    """

    trials_wanted: int
    max_concurrent: int
    min_concurrent: int
    workers_per_trial: int
    gpus_per_trial: float
    max_failures: int | None
    direction: str
    metric: str | None
    sampler: str
    pruner: str
    seed: int | None
    space: Mapping[str, str] | str
    best: Best | None
    trials: tuple[TrialReport, ...]


@dataclass(frozen=True)
class ScoreRecord:
    """A score, with the values of its arguments, and its parts.

    Attributes:
        is_complete: whether the output is there.
        kept_in: URL of the directory of parts while the output is not there; or None.
        columns: columns of the table that are read; None before the plan.
        keep: columns of the table in the output.
        scored: number of rows of the parts that are on the lake.
        done: number of parts that are on the lake.
        rate: rows scored in a second; None if unknown.
        seconds_left: seconds until the end at this rate; None if unknown.
    """

    output: str
    is_complete: bool
    kept_in: str | None
    model: str | None
    columns: tuple[str, ...] | None
    keep: tuple[str, ...]
    batch_size: int
    max_concurrent: int
    gpus_per_worker: int
    on_error: str
    rows: int
    scored: int
    parts: int
    done: int
    rate: float | None
    seconds_left: float | None
    failed_parts: tuple[FailedPart, ...]


@dataclass(frozen=True)
class RunRecord:
    """The record of a run; docs/runs.md describes the fields.

    Attributes:
        error: the whole error that ended the run; None for other runs.
        reason: why the run ended; None before its end.
        failure: the error in short; None for other runs.
        updated: time of writing by the driver's clock, in seconds since the epoch.
        use: its GPU seconds over time, at least one point.
        call: what the ranks call; None for a held gang between its launches.
        spec: the gang, as requested, without values of variables that look secret.
        aside: number of GPUs of parked executors, by host.
        metrics: last values of each rank, by name.
        logs: size of each log in bytes, by its path in the run's directory.
        left_out: number of entries by name that `encode` has left out of long lists.
    """

    run_id: str
    name: str
    user: str
    application: str
    state: str
    attempt: int
    error: str | None
    updated: float
    timeline: Timeline
    gpu_seconds: GpuSeconds
    use: Points
    spec: GangSpec
    queue: str
    executors: int
    executor: ExecutorShape
    environment: EnvironmentRecord
    reason: EndReason | None = field(default=None, metadata=OMITTED_DEFAULT)
    failure: FailureRecord | None = field(default=None, metadata=OMITTED_DEFAULT)
    call: CallRecord | None = field(default=None, metadata=OMITTED_DEFAULT)
    waiting_for: str = ""
    waiting_details: tuple[str, ...] = field(default=(), metadata=OMITTED_DEFAULT)
    waits: tuple[Wait, ...] = field(default=(), metadata=OMITTED_DEFAULT)
    model: str | None = None
    data: Mapping[str, DataRecord] | None = None
    python_env: Mapping[str, Any] | None = None
    aside: Mapping[str, int] = field(default_factory=dict, metadata=OMITTED_DEFAULT)
    ranks: tuple[RankRecord, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    logs: Mapping[str, int] = field(default_factory=dict)
    worlds: tuple[WorldReport, ...] = field(default=(), metadata=OMITTED_DEFAULT)
    warnings: tuple[str, ...] = ()
    search: SearchRecord | None = field(default=None, metadata=OMITTED_DEFAULT)
    score: ScoreRecord | None = field(default=None, metadata=OMITTED_DEFAULT)
    left_out: Mapping[str, int] = field(default_factory=dict, metadata=OMITTED_DEFAULT)

    @property
    def has_ended(self) -> bool:
        """Return whether the driver has recorded the run's end."""
        return self.state in _TERMINAL

    @property
    def kind(self) -> str:
        """Return "search", "score" or "gang"."""
        return "search" if self.search else "score" if self.score else "gang"

    @property
    def gpus(self) -> int:
        return self.executors * self.executor.gpus

    def state_at(self, now: float) -> str:
        """Return the state; "lost" if the run has not ended and its record is over a minute old."""
        if not self.has_ended and now - self.updated > LOST_SECONDS:
            return LOST
        return self.state

    def is_silent(self, now: float) -> bool:
        """Return whether the driver is late with the record of a run that has not ended."""
        return not self.has_ended and now - self.updated > SILENT_SECONDS

    def is_running(self, now: float) -> bool:
        """Return whether the run's driver is working, as far as the record shows."""
        return not self.has_ended and self.state_at(now) != LOST

    def check_is_running(self, now: float) -> None:
        """Check that a driver may still do something about the run.

        Raises:
            ConfigError: the run has ended, or is lost.
        """
        if self.has_ended:
            raise ConfigError(f"{self.run_id} has ended already: {self.state}")
        if not self.is_running(now):
            ago = duration(now - self.updated)
            raise ConfigError(
                f"{self.run_id} is lost: its driver was last heard from {ago} ago, when it was"
                f" {self.state}. The cluster has its GPUs back if"
                f" {self.application or 'its application'} has ended"
            )

    def seconds_taken(self, now: float) -> float | None:
        """Return the seconds from the request to the end, or until now.

        For a lost run, the time ends with the last update of the record. None if the record lacks
        the time of the request.
        """
        if self.timeline.requested is None:
            return None
        end = now if self.is_running(now) else self.updated
        return max(end - self.timeline.requested, 0.0)


_TIME = Range(0.0, 1e11)
_COUNT = Range(0.0, 1e15)
_SECONDS = Range(0.0, 1e12)
_METRIC = Range(-math.inf, math.inf, has_non_finite=True)
_CODEC = Codec(
    hint_names={
        **{"Mapping": Mapping, "Any": Any, "GpuRequest": GpuRequest, "EndReason": EndReason},
    },
    ranges={
        Timeline: _TIME,
        Wait: _TIME,
        UsePoint: _SECONDS,
        (UsePoint, "time"): _TIME,
        # Rounding may make a difference slightly negative.
        GpuSeconds: Range(-1.0, 1e12),
        WorldReport: _TIME,
        RankRecord: Range(-1e6, 1e15),
        (RankRecord, "rank"): _COUNT,
        (RankRecord, "gpu_utilisation"): Range(0.0, 1.1),
        ExecutorShape: _COUNT,
        TrialReport: _TIME,
        (TrialReport, "value"): _METRIC,
        (TrialReport, "metrics"): _METRIC,
        (TrialReport, "step"): Range(-(2.0**63), 2.0**63),
        (Best, "value"): _METRIC,
        SearchRecord: _COUNT,
        (SearchRecord, "seed"): Range(-(2.0**64), 2.0**64),
        ScoreRecord: _COUNT,
        FailedPart: _COUNT,
        (FailureRecord, "rank"): _COUNT,
        (DataRecord, "rows"): _COUNT,
        (DataRecord, "bytes"): _COUNT,
        (RunRecord, "attempt"): _COUNT,
        (RunRecord, "updated"): _TIME,
        (RunRecord, "executors"): Range(0, _MAX_GPUS),
        (RunRecord, "aside"): Range(0, _MAX_GPUS),
        (RunRecord, "logs"): _COUNT,
        (RunRecord, "metrics"): _METRIC,
    },
    json_names={(RankRecord, "has_ended"): "ended", (GangSpec, "gpus"): "gpus_per_worker"},
    bare_fields={GpuRequest: "per_worker"},
)


def fields_of(record: RunRecord) -> dict[str, Any]:
    return {"schema": SCHEMA, **_CODEC.encode(record)}


def encode(record: RunRecord) -> bytes:
    """Return the content of run.json, at most `LARGEST_RECORD` bytes.

    Entries of long lists are left out until the record fits; `left_out` counts them. All who may
    read the run see the record, so its texts have no secrets.
    """
    # Before the texts are cut: a part of a secret would not be recognised.
    error = None if record.error is None else without_secrets(record.error)
    warnings = tuple(map(without_secrets, record.warnings))
    record = dataclasses.replace(record, error=error, warnings=warnings)
    most = _MAX_LISTED
    while True:
        fields = redact_json(fields_of(_shorten(record, most)))
        content = json.dumps(fields, allow_nan=False).encode()
        if len(content) <= LARGEST_RECORD or most == 1:
            return content
        most //= 2


def _shorten(record: RunRecord, most: int) -> RunRecord:
    """Return a record with at most so many entries in each list.

    Later entries are kept where they say more: of trials those that run, the best and the newest;
    of worlds the last. Samples of GPUs are kept before metrics of the user's own.
    """
    ranks = record.metrics[:most]
    names = min(most, max(_MAX_METRICS // max(len(ranks), 1), 1))
    short: dict[str, Any] = {
        "ranks": record.ranks[:most],
        "metrics": tuple(_first_metrics(values, names) for values in ranks),
        "logs": dict([*record.logs.items()][:most]),
        "worlds": record.worlds[-most:],
        "warnings": tuple(text[: most * 16] for text in record.warnings[:most]),
    }
    counts = {
        name: len(getattr(record, name)) - len(short[name])
        for name in ("ranks", "logs", "worlds", "warnings")
    }
    counts["metrics"] = sum(map(len, record.metrics)) - sum(map(len, short["metrics"]))
    if record.call is not None:
        arguments = dict([*record.call.arguments.items()][:most])
        short["call"] = dataclasses.replace(record.call, arguments=arguments)
        counts["arguments"] = len(record.call.arguments) - len(arguments)
    if record.error is not None:
        short["error"] = record.error[: most * 64]
    if record.failure is not None:
        short["failure"] = dataclasses.replace(
            record.failure, summary=record.failure.summary[: most * 16]
        )
    if record.search is not None:
        trials = _newest_trials(record.search, most)
        short["search"] = dataclasses.replace(record.search, trials=trials)
        kept = {trial.number for trial in trials}
        states = Counter(t.state for t in record.search.trials if t.number not in kept)
        counts |= {f"{state} trials": count for state, count in states.items()}
    if record.score is not None:
        failed = record.score.failed_parts[:most]
        short["score"] = dataclasses.replace(record.score, failed_parts=failed)
        counts["failed parts"] = len(record.score.failed_parts) - len(failed)
    left_out = {name: count for name, count in counts.items() if count}
    return dataclasses.replace(record, **short, left_out=left_out)


def _first_metrics(values: Mapping[str, float], most: int) -> Mapping[str, float]:
    if len(values) <= most:
        return values
    first = sorted(values, key=lambda name: not (name == _STEP or name.startswith(_SAMPLES)))[:most]
    return {name: values[name] for name in values if name in set(first)}


def _newest_trials(search: SearchRecord, most: int) -> tuple[TrialReport, ...]:
    best = None if search.best is None else search.best.number
    kept = {trial.number for trial in search.trials[-most:]}
    return tuple(
        trial
        if len(trial.error) <= most * 16
        else dataclasses.replace(trial, error=trial.error[-most * 16 :])
        for trial in search.trials
        if trial.number in kept or trial.number == best or trial.state == RUNNING
    )


def parse(content: bytes, url: str = "run.json") -> RunRecord:
    """Parse the content of run.json.

    Args:
        url: URL of the file, for the error.

    Raises:
        StoreError: the content has another form; the error names the field, what it has and what is
            expected. The kind is "schema" if another version of hopsgpu wrote it, else "damaged".
    """
    try:
        if len(content) > LARGEST_RECORD:
            raise ValueError(f"it has more than {LARGEST_RECORD} bytes")
        fields = loads(content)
        if not isinstance(fields, dict) or "schema" not in fields:
            raise ValueError("it is no object with a schema")
        schema = fields["schema"]
        if schema != SCHEMA:
            raise StoreError(
                f"{url} was written by another version of hopsgpu: it has schema"
                f" {schema!r:.99}, and this version reads schema {SCHEMA}; {_LOGS}",
                kind=OTHER_SCHEMA,
            )
        record = _CODEC.decode(RunRecord, fields)
        _check(record)
    except ValueError as error:
        raise StoreError(
            f"{url} is not a record of a run: {error}; {_LOGS}", kind=DAMAGED
        ) from error
    return record


def _check(record: RunRecord) -> None:
    """Check what depends on several values.

    Raises:
        MisfitError: the record contradicts itself.
    """
    if record.state not in _STATES:
        raise MisfitError("state", record.state, f"one of {', '.join(sorted(_STATES))}")
    if record.has_ended and record.reason is None:
        raise MisfitError("reason", None, f"the reason of a run that is {record.state}")
    times = [point.time for point in record.use]
    if not times or times != sorted(times):
        raise MisfitError("use", times, "points in the order of their times, at least one")
    if record.gpus > _MAX_GPUS:
        raise MisfitError("executors", record.executors, f"at most {_MAX_GPUS} GPUs in all")
    score = record.score
    if score is not None:
        without = sum(part.rows for part in score.failed_parts)
        if score.scored + without > score.rows:
            raise MisfitError("score.scored", score.scored, f"at most {score.rows} rows in all")
