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

from hopsgpu.core.formats import duration
from hopsgpu.core.gang import GangState
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT, JSON_ERRORS
from hopsgpu.storage.lake import FileStatus, LakePath
from hopsgpu.units import MIB

log = logging.getLogger(__name__)

# The directory of runs below a root.
RUNS = "runs"
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
# Records that are read at the same time.
READERS = 8
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

    def is_running(self, now: float) -> bool:
        """Return whether the run's driver is working, as far as the record tells."""
        return not self.has_ended and self.state_at(now) != LOST

    def check_goes_on(self, now: float) -> None:
        """Check that a driver may still do something about the run.

        Raises:
            ConfigError: the run has ended, or is lost.
        """
        if self.has_ended:
            raise ConfigError(f"{self.run_id} has ended already: {self.state}")
        if not self.is_running(now):
            ago = duration(now - self.updated)
            application = self.content.get("application") or "its application"
            raise ConfigError(
                f"{self.run_id} is lost: its driver was last heard from {ago} ago, when it was"
                f" {self.state}. YARN has its GPUs back if {application} has ended"
            )

    def took(self, now: float) -> float | None:
        """Return the seconds from the request to the end, or until now.

        For a lost run, the time ends with the last update of the record. None if the record lacks
        the time of the request.
        """
        began = self.timeline.get("requested")
        if began is None:
            return None
        return max((now if self.is_running(now) else self.updated) - began, 0.0)

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
    except JSON_ERRORS as error:
        raise StoreError(
            f"{url} is not a record of a run ({type(error).__name__}: {error}); another version of"
            f" hopsgpu may have written it; {_LOGS}",
            kind="damaged",
        ) from error
    return record


def _parsed(file: LakePath, largest: int | None) -> RunRecord:
    """Read and parse a record that its driver may be replacing at the moment."""
    for _ in range(_MORE_READINGS):
        content = file.read(largest)
        # Over WebHDFS the length comes from a separate request: it may be that of the previous
        # record.
        with contextlib.suppress(StoreError):
            return parse(content, file.url)
        log.debug("%s cannot be parsed, and may be changing: reads it again", file.url)
    return parse(file.read(largest), file.url)


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


def began(entry: FileStatus) -> float:
    """Return when a run began, in seconds since the epoch.

    The time is in the run's id; without it, it is the modification time of the directory.
    """
    named = began_by_name(entry.name)
    return entry.modified / 1000 if named is None else named


def began_by_name(run_id: str) -> float | None:
    """Return when a run began, in seconds since the epoch, if its id says so."""
    match = _BEGAN.search(run_id)
    if match is None:
        return None
    try:
        when = datetime.datetime.strptime(match[1], "%Y%m%d-%H%M%S")
    except ValueError:
        return None
    return when.replace(tzinfo=datetime.UTC).timestamp()


# For a reader of other users' records.
LARGEST_RECORD = 16 * MIB


class RunStore:
    """The runs below a root on the lake.

    Args:
        root: the root, or its URL.
        largest: bytes that a record may have, for a reader of other users' records; None for any.
    """

    def __init__(self, root: str | LakePath, largest: int | None = None) -> None:
        self._runs = (LakePath(root) if isinstance(root, str) else root) / RUNS
        self._largest = largest

    @property
    def url(self) -> str:
        """Return the URL of the directory of runs."""
        return self._runs.url

    def directory(self, run_id: str) -> LakePath:
        """Return a run's directory.

        Raises:
            ConfigError: `run_id` cannot be a run's id.
        """
        return self._runs / run_name(run_id)

    def modified(self) -> int | None:
        """Return when a run came or went last, in milliseconds since the epoch; None without runs.

        The time is that of the file system's clock; 0 on an object store, which does not know it.
        """
        try:
            return self._runs.stat().modified
        except StoreError as error:
            if error.kind == ABSENT:
                return None
            raise

    def directories(self) -> tuple[FileStatus, ...]:
        """Return the status of each directory here; none before the first run."""
        entries = self._runs.entries() if self._runs.exists() else ()
        return tuple(entry for entry in entries if entry.is_directory)

    def ids(self, changed_since: float | None = None) -> tuple[str, ...]:
        """Return the names of all directories here, those of the newest runs first.

        Args:
            changed_since: leaves out runs whose records were all written before this time, in
                seconds since the epoch by the file system's clock; None for all.
        """
        # A record replaces the one before by a rename, which changes the directory. An object
        # store's directories have no time: any of them may have changed.
        least = 0.0 if changed_since is None else changed_since * 1000
        found = [e for e in self.directories() if e.modified >= least or not e.modified]
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
        record = _parsed(file, self._largest)
        if record.run_id != run_id:
            raise StoreError(f"{file.url} is the record of run {record.run_id}", kind="damaged")
        return record

    def read(self, run_ids: Sequence[str]) -> list[StoredRun]:
        """Return runs with their records, read in parallel; an unreadable one has its problem."""
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.stored, run_ids))

    def stored(self, run_id: str) -> StoredRun:
        """Return a run with its record, or with the problem for which that cannot be read."""
        try:
            return StoredRun(run_id, self.record(run_id))
        except HopsGpuError as error:
            return StoredRun(run_id, None, str(error), getattr(error, "kind", ""))

    def cancel(self, run_id: str, now: float) -> None:
        """Ask the driver of a run that goes on to cancel it.

        Args:
            run_id: the run's id.
            now: seconds since the epoch.

        Raises:
            ConfigError: the run has ended, or is lost.
            StoreError: as `ask_to_cancel`, or the record cannot be read.
        """
        self.record(run_id).check_goes_on(now)
        self.ask_to_cancel(run_id)

    def ask_to_cancel(self, run_id: str) -> None:
        """Leave a request to cancel for the run's driver, which looks for it every few seconds.

        Raises:
            StoreError: the lake refused the operation, for example because the run is another
                user's.
        """
        (self.directory(run_id) / CANCEL).create()
        log.info("asked the driver of %s to cancel it", run_id)

    def is_asked_to_cancel(self, run_id: str) -> bool:
        """Return whether the run's driver was asked to cancel it."""
        return (self.directory(run_id) / CANCEL).exists()

    def remove(self, run_id: str) -> None:
        """Remove a run with its logs and checkpoints, and with what a score has left; models stay.

        Raises:
            StoreError: the lake refused; then the record, which names what is left, is still there.
        """
        record = self.stored(run_id).record
        if record is not None and (parts := parts_elsewhere(record)) is not None:
            parts.remove()
            log.info("removed %s", parts.url)
        self.directory(run_id).remove()
        log.info("removed %s", self.directory(run_id).url)


def parts_elsewhere(record: RunRecord) -> LakePath | None:
    """Return where a score that is not complete has its parts, beside its output; or None.

    Other users may read and write there: only a directory whose name has the run's id counts.
    """
    score = record.content.get("score")
    url = score.get("kept_in") if isinstance(score, Mapping) else None
    if not isinstance(url, str):
        return None
    name = url.rpartition("/")[2]
    if not (name.startswith(".") and name.endswith(f"-{record.run_id}")):
        return None
    try:
        return LakePath(url)
    except ConfigError:
        return None


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
    return not record.has_ended and (record.is_running(now) or now - record.updated < _GONE_SECONDS)


def _resumed(record: RunRecord | None) -> str | None:
    """Return the id of the run whose checkpoints this run resumes from, or None."""
    resumed = None if record is None else record.content["spec"].get("resume")
    return resumed if isinstance(resumed, str) else None
