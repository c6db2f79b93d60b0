"""Run records on the lake, `<root>/runs/<run_id>/`, for readers other than the runs' drivers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import logging
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.core.gang import GangState
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ODD_JSON
from hopsgpu.storage.lake import Lake, Status

log = logging.getLogger(__name__)

# Files in a run's directory.
RECORD = "run.json"
CANCEL = "cancel"
SCHEMA = 2
# A driver writes at least every 20 s while its run goes on.
LOST_SECONDS = 60.0
LOST = "lost"
UNREADABLE = "unreadable"
# The kind of the error if another version of hopsgpu has written the record.
OTHER_SCHEMA = "schema"
LATEST = "last"
_ID = re.compile(r"\w[\w.+=-]{0,199}")
_BEGAN = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+")
_TERMINAL = frozenset(state.value for state in GangState if state.is_terminal)
_READERS = 8
_MORE_READINGS = 3
_LOGS = "`hopsgpu logs ID` may still work"


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json.

    Attributes:
        content: the complete record.
        run_id: name of the run and of its directory.
        state: value of a GangState.
        attempt: number of the latest attempt, from 0.
        updated: time of writing by the driver's clock, in seconds since the epoch.
        name: name of the run.
        user: user who submitted it.
        error: error that ended the run, or None.
        model: URL of the version that the run published, or None.
        timeline: time at which each point was passed, in seconds since the epoch.
        ranks: outcome of each rank: the fields of RankReport, and "ended".
        logs: size of each log in bytes, by its path in the run's directory.
    """

    content: Mapping[str, Any]
    run_id: str
    state: str
    attempt: int
    updated: float
    name: str
    user: str
    error: str | None
    model: str | None
    timeline: Mapping[str, float]
    ranks: tuple[Mapping[str, Any], ...]
    logs: Mapping[str, int]

    @property
    def has_ended(self) -> bool:
        """Return whether the driver has recorded the run's end."""
        return self.state in _TERMINAL

    def state_at(self, now: float) -> str:
        """Return the state; "lost" if the run has not ended and its record is over a minute old."""
        if not self.has_ended and now - self.updated > LOST_SECONDS:
            return LOST
        return self.state

    def goes_on(self, now: float) -> bool:
        """Return whether the run's driver is working, as far as the record tells."""
        return not self.has_ended and self.state_at(now) != LOST

    def took(self, now: float) -> float | None:
        """Return the seconds from the request to the end, or until now.

        For a lost run, the time ends with the last update of the record. None if the record lacks
        the time of the request.
        """
        began = self.timeline.get("requested")
        if began is None:
            return None
        return max((now if self.goes_on(now) else self.updated) - began, 0.0)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the gang."""
        return int(self.content["executors"]) * int(self.content["executor"]["gpus"])


def parse(content: bytes, url: str = RECORD) -> RunRecord:
    """Parse a record.

    Args:
        content: content of the file.
        url: URL of the file, for the error.

    Raises:
        StoreError: the content is no record, or its schema is unknown to this version of hopsgpu.
    """
    try:
        fields = json.loads(
            content, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded
        )
        if fields["schema"] != SCHEMA:
            raise StoreError(
                f"{url} was written by another version of hopsgpu: it has schema"
                f" {fields['schema']!r:.99}, and this version reads schema {SCHEMA}; {_LOGS}",
                kind=OTHER_SCHEMA,
            )
        record = RunRecord(
            content=fields,
            run_id=_text(fields["run_id"]),
            state=GangState(fields["state"]).value,
            attempt=int(fields["attempt"]),
            updated=_time(fields["updated"]),
            name=_text(fields["name"]),
            user=_text(fields["user"]),
            error=None if fields["error"] is None else _text(fields["error"]),
            model=None if fields["model"] is None else _text(fields["model"]),
            timeline={n: _time(t) for n, t in fields["timeline"].items() if t is not None},
            ranks=tuple(_rank(rank) for rank in fields["ranks"]),
            logs={_text(name): int(size) for name, size in fields["logs"].items()},
        )
        _ = record.gpus, fields["spec"]["workers"]
    except ODD_JSON as error:
        raise StoreError(
            f"{url} is not a record of a run ({type(error).__name__}: {error}); another version of"
            f" hopsgpu may have written it; {_LOGS}",
            kind="damaged",
        ) from error
    return record


def _parsed(file: Lake) -> RunRecord:
    """Read and parse a record that its driver may be replacing at the moment."""
    for _ in range(_MORE_READINGS):
        content = file.read()
        # Over WebHDFS the length comes from a separate request: it may be that of the previous
        # record.
        with contextlib.suppress(StoreError):
            return parse(content, file.url)
        log.debug("%s cannot be parsed, and may be changing: reads it again", file.url)
    return parse(file.read(), file.url)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.99} is not a finite number")
    return number


def _bounded(text: str) -> int:
    number = int(text)
    float(number)  # raises OverflowError for a number that readers cannot calculate with
    return number


def _time(value: object) -> float:
    """Return seconds since the epoch; refuse NaN and the infinities.

    A text that `float()` reads is accepted too.
    """
    return _finite(str(float(value)))  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _rank(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **fields,
        "rank": int(fields["rank"]),
        "host": _text(fields["host"]),
        "ended": bool(fields["ended"]),
    }


@dataclass(frozen=True)
class StoredRun:
    """A directory in the directory of runs.

    Attributes:
        run_id: its name.
        record: its record, or None.
        problem: why the record cannot be read, or "".
        kind: kind of the problem, as of a StoreError.
    """

    run_id: str
    record: RunRecord | None
    problem: str = ""
    kind: str = ""

    def state_at(self, now: float) -> str:
        """Return the run's state, "lost", or "unreadable"."""
        return UNREADABLE if self.record is None else self.record.state_at(now)


def began(entry: Status) -> float:
    """Return when a run began, in seconds since the epoch.

    The time is in the run's id; without it, it is the modification time of the directory.
    """
    if (match := _BEGAN.search(entry.name)) is not None:
        try:
            when = datetime.datetime.strptime(match[1], "%Y%m%d-%H%M%S")
        except ValueError:
            pass
        else:
            return when.replace(tzinfo=datetime.UTC).timestamp()
    return entry.modified / 1000


class RunStore:
    """The runs below a root on the lake.

    Args:
        root: URL of the root.
    """

    def __init__(self, root: str) -> None:
        self._runs = Lake(root) / "runs"

    @property
    def url(self) -> str:
        """Return the URL of the directory of runs."""
        return self._runs.url

    def directory(self, run_id: str) -> Lake:
        """Return a run's directory.

        Raises:
            ConfigError: `run_id` cannot be a run's id.
        """
        return self._runs / run_name(run_id)

    def ids(self) -> tuple[str, ...]:
        """Return the names of all directories here, those of the newest runs first."""
        # Before the first run the directory does not exist.
        entries = self._runs.entries() if self._runs.exists() else ()
        found = [entry for entry in entries if entry.is_directory]
        return tuple(e.name for e in sorted(found, key=lambda e: (began(e), e.name), reverse=True))

    def find(self, reference: str) -> str:
        """Return the id of a run.

        Args:
            reference: the id, a prefix of it that no other id has, or "last" for the newest run.

        Raises:
            ConfigError: no run matches, or several do.
        """
        if reference == LATEST:
            # A directory whose name is no run id is listed, but is no run.
            newest = next((name for name in self.ids() if _is_id(name)), None)
            if newest is None:
                raise ConfigError(f"there are no runs in {self.url}")
            return newest
        name = run_name(reference)
        found = [run_id for run_id in self.ids() if run_id.startswith(name)]
        if name in found or len(found) == 1:
            return name if name in found else found[0]
        if not found:
            raise ConfigError(
                f"there is no run {reference!r} in {self.url} (`hopsgpu runs` lists them)"
            )
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise ConfigError(
            f"{len(found)} runs begin with {reference!r}: {shown}; give more characters of the id"
        )

    def record(self, run_id: str) -> RunRecord:
        """Return a run's record.

        Raises:
            StoreError: the record does not exist, or it cannot be read.
        """
        file = self.directory(run_id) / RECORD
        record = _parsed(file)
        if record.run_id != run_id:
            raise StoreError(f"{file.url} is the record of run {record.run_id}", kind="damaged")
        return record

    def read(self, run_ids: Sequence[str]) -> list[StoredRun]:
        """Return runs with their records, read in parallel; an unreadable one has its problem."""
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self._stored, run_ids))

    def _stored(self, run_id: str) -> StoredRun:
        try:
            return StoredRun(run_id, self.record(run_id))
        except HopsGpuError as error:
            return StoredRun(run_id, None, str(error), getattr(error, "kind", ""))

    def ask_to_cancel(self, run_id: str) -> None:
        """Leave a request to cancel for the run's driver, which looks for it every few seconds.

        Raises:
            StoreError: the lake refused the operation, for example because the run is another
                user's.
        """
        (self.directory(run_id) / CANCEL).create()
        log.info("asked the driver of %s to cancel it", run_id)

    def remove(self, run_id: str) -> None:
        """Remove a run with its logs and checkpoints; its models stay."""
        self.directory(run_id).remove()
        log.info("removed %s", self.directory(run_id).url)


def run_name(text: str) -> str:
    """Return a run's id, or a prefix of one, that is safe as one component of a path.

    Raises:
        ConfigError: `text` cannot be one.
    """
    name = unicodedata.normalize("NFC", text)
    if not _is_id(name):
        raise ConfigError(
            f"{text!r} is not a run id: a run id consists of letters, digits and '_.+=-'"
        )
    return name


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and ".." not in name


# A driver may have been suspended.
_GONE_SECONDS = 3600.0


def prunable(
    runs: Sequence[StoredRun], older_than: float | None, keep: int, now: float
) -> tuple[str, ...]:
    """Return the ids of runs that may be removed. Pure.

    A run is kept if it is going on, if its driver was at work within the last hour, or if its
    record cannot be read. The run that such a run resumes is kept too, as is the run that that one
    resumed, and so on.

    Args:
        runs: the runs, the newest first.
        older_than: least time since the record was last written, in seconds; None for any.
        keep: number of the newest runs to keep.
        now: seconds since the epoch.
    """

    records = {run.run_id: run.record for run in runs if run.record is not None}
    needed = {run_id for run_id, record in records.items() if _may_be_at_work(record, now)}
    reached = list(needed)
    while reached:
        resumed = _resumed(records.get(reached.pop()))
        if resumed is not None and resumed not in needed:
            needed.add(resumed)
            reached.append(resumed)

    def may_go(run: StoredRun) -> bool:
        if run.record is None or run.run_id in needed:
            return False
        return now - run.record.updated >= (older_than or 0.0)

    return tuple(run.run_id for run in runs[keep:] if may_go(run))


def _may_be_at_work(record: RunRecord, now: float) -> bool:
    return not record.has_ended and (record.goes_on(now) or now - record.updated < _GONE_SECONDS)


def _resumed(record: RunRecord | None) -> str | None:
    """Return the id of the run whose checkpoints this run resumes from, or None."""
    resumed = None if record is None else record.content["spec"].get("resume")
    return resumed if isinstance(resumed, str) else None
