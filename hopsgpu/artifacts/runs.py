"""Run records on the lake, `<root>/runs/<run_id>/`, for readers other than the runs' drivers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from hopsgpu.core.run_record import (
    APPLICATION_ID,
    LARGEST_RECORD,
    LOST,
    ApplicationReport,
    RunRecord,
    parse,
)
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT
from hopsgpu.storage.lake import FileStatus, LakePath

log = logging.getLogger(__name__)

# The directory of runs below a root.
RUNS = "runs"
# Files in a run's directory.
RECORD = "run.json"
CANCEL = "cancel"
UNREADABLE = "unreadable"
LATEST = "last"
_ID = re.compile(r"\w[\w.+=-]{0,199}")
_BEGAN = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+")
# Threads that read records in parallel.
READERS = 8
_MORE_READINGS = 3
# Records that are read to find a run by its application.
_MAX_SEARCHED = 200
# A driver without a sign of life for this long is dead; until then it may be suspended.
_DEAD_SECONDS = 3600.0


def _parse_stable(file: LakePath) -> RunRecord:
    """Read and parse a record that its driver may be replacing at the moment."""
    for _ in range(_MORE_READINGS):
        content = file.read(LARGEST_RECORD)
        # Over WebHDFS the length comes from a separate request: it may be that of the previous
        # record.
        with contextlib.suppress(StoreError):
            return parse(content, file.url)
        log.debug("%s cannot be parsed, and may be changing: reads it again", file.url)
    return parse(file.read(LARGEST_RECORD), file.url)


@dataclass(frozen=True)
class StoredRun:
    """A directory in the directory of runs.

    Attributes:
        run_id: name of the directory.
        problem: why the record cannot be read, or "".
        kind: kind of the problem, as of a StoreError.
        report: YARN's report on the application of a silent run, made before the record was read;
            None if YARN was not asked, or does not know the application.
    """

    run_id: str
    record: RunRecord | None
    problem: str = ""
    kind: str = ""
    report: ApplicationReport | None = None

    def state_at(self, now: float) -> str:
        """Return the run's state, "lost", or "unreadable"."""
        if self.record is None:
            return UNREADABLE
        if self.report is not None and self.report.has_ended and not self.record.has_ended:
            return LOST
        return self.record.state_at(now)

    def seconds_taken(self, now: float) -> float | None:
        """Return the seconds from the request to the end, or until now, as far as it is known."""
        if self.record is None:
            return None
        # A lost run's time ends with the last update of the record.
        is_lost = self.state_at(now) == LOST
        return self.record.seconds_taken(self.record.updated if is_lost else now)


def start_time(entry: FileStatus) -> float:
    """Return when a run began, in seconds since the epoch.

    Without a time in the run's id, the result is the modification time of the directory.
    """
    named = start_in_id(entry.name)
    return entry.modified / 1000 if named is None else named


def start_in_id(run_id: str) -> float | None:
    """Return when a run began, in seconds since the epoch, if its id says so."""
    match = _BEGAN.search(run_id)
    if match is None:
        return None
    try:
        when = datetime.datetime.strptime(match[1], "%Y%m%d-%H%M%S")
    except ValueError:
        return None
    return when.replace(tzinfo=datetime.UTC).timestamp()


class RunStore:
    def __init__(self, root: str | LakePath) -> None:
        self._runs = (LakePath(root) if isinstance(root, str) else root) / RUNS

    @property
    def url(self) -> str:
        return self._runs.url

    def directory(self, run_id: str) -> LakePath:
        """Return a run's directory; raise ConfigError if `run_id` cannot be a run's id."""
        return self._runs / run_name(run_id)

    def last_change_ms(self) -> int | None:
        """Return when the last run was created or removed, in milliseconds since the epoch.

        The time is that of the file system's clock. It is None without runs, and 0 on an object
        store, which does not know it.
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
        """Return the names of all directories of runs, the newest first.

        Args:
            changed_since: leaves out runs whose records were all written before this time, in
                seconds since the epoch by the file system's clock.
        """
        # A driver replaces a record by a rename, which changes the directory's time. An object
        # store's directories have no time: any of them may have changed.
        least = 0.0 if changed_since is None else changed_since * 1000
        entries = [e for e in self.directories() if e.modified >= least or not e.modified]
        return tuple(
            e.name for e in sorted(entries, key=lambda e: (start_time(e), e.name), reverse=True)
        )

    def find(self, reference: str) -> str:
        """Return the id of a run.

        Args:
            reference: the id, a prefix of it that no other id has, or "last" for the newest run.
                The id of a YARN application stands for its newest run.

        Raises:
            StoreError: no run matches.
            ConfigError: several runs match.
        """
        if reference == LATEST:
            # Directories whose names are no run ids are listed, but are no runs.
            newest = next((name for name in self.ids() if _is_id(name)), None)
            if newest is None:
                raise StoreError(f"there are no runs in {self.url}", kind=ABSENT)
            return newest
        name = run_name(reference)
        matches = [run_id for run_id in self.ids() if run_id.startswith(name)]
        if name in matches or len(matches) == 1:
            return name if name in matches else matches[0]
        if not matches and APPLICATION_ID.fullmatch(reference):
            if (run_id := self.find_of_application(reference)) is not None:
                return run_id
            raise StoreError(
                f"{reference} has no run in {self.url}: it has one once its script calls launch()",
                kind=ABSENT,
            )
        if not matches:
            raise StoreError(
                f"there is no run {reference!r} in {self.url} (`hopsgpu runs` lists them)",
                kind=ABSENT,
            )
        shown = ", ".join(matches[:3]) + (", …" if len(matches) > 3 else "")
        raise ConfigError(
            f"{len(matches)} runs begin with {reference!r}: {shown}; give more characters of the id"
        )

    def find_of_application(self, application_id: str) -> str | None:
        """Return the id of the newest run of a YARN application.

        Returns:
            None if the application has no run among the newest ones, whose records are read.
        """
        run_ids = self.ids()[:_MAX_SEARCHED]
        for start in range(0, len(run_ids), READERS):
            for run in self.read(run_ids[start : start + READERS]):
                if run.record is not None and run.record.application == application_id:
                    return run.run_id
        return None

    def record(self, run_id: str) -> RunRecord:
        """Return a run's record; raise StoreError if there is none, or it cannot be read."""
        file = self.directory(run_id) / RECORD
        record = _parse_stable(file)
        if record.run_id != run_id:
            raise StoreError(f"{file.url} is the record of run {record.run_id}", kind="damaged")
        return record

    def read(self, run_ids: Sequence[str]) -> list[StoredRun]:
        """Return runs with their records, read in parallel; an unreadable one has its problem."""
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.load, run_ids))

    def load(self, run_id: str) -> StoredRun:
        """Return a run with its record, or with the problem that prevents reading it."""
        try:
            return StoredRun(run_id, self.record(run_id))
        except HopsGpuError as error:
            return StoredRun(run_id, None, str(error), getattr(error, "kind", ""))

    def cancel(self, run_id: str, now: float) -> None:
        """Ask the driver of a running run to cancel it.

        Raises:
            ConfigError: the run has ended, or is lost.
            StoreError: as `ask_to_cancel`, or the record cannot be read.
        """
        self.record(run_id).check_is_running(now)
        self.ask_to_cancel(run_id)

    def ask_to_cancel(self, run_id: str) -> None:
        """Write a request to cancel. The run's driver polls for it every few seconds.

        Raises:
            StoreError: the lake refused the operation, for example because the run is another
                user's.
        """
        (self.directory(run_id) / CANCEL).create()
        log.info("asked the driver of %s to cancel it", run_id)

    def is_asked_to_cancel(self, run_id: str) -> bool:
        return (self.directory(run_id) / CANCEL).exists()

    def remove(self, run_id: str) -> LakePath | None:
        """Remove a run with its logs and checkpoints, and a score's remaining parts; models stay.

        Returns:
            Parts that stay, because the record that names them is not this user's; or None.

        Raises:
            StoreError: the lake refused the operation. The record, which names what is left, still
                exists.
        """
        record = self.load(run_id).record
        parts = None if record is None else parts_elsewhere(record)
        if parts is not None and self.is_own(run_id):
            parts.remove()
            log.info("removed %s", parts.url)
            parts = None
        self.directory(run_id).remove()
        log.info("removed %s", self.directory(run_id).url)
        return parts

    def is_own(self, run_id: str) -> bool:
        """Return whether this process's user owns the record of a run.

        Another user's record may name any directory of this user. The answer is False on an object
        store, where files have no owners.
        """
        owner = (self.directory(run_id) / RECORD).stat().owner
        return owner != "" and owner == self._runs.user()


def parts_elsewhere(record: RunRecord) -> LakePath | None:
    """Return where an incomplete score has its parts, beside its output; or None.

    The name of the directory has the run's id, but whoever wrote the record chose that id: see
    `RunStore.is_own` before a removal.
    """
    url = None if record.score is None else record.score.kept_in
    if url is None:
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
        ConfigError: `text` is neither.
    """
    name = unicodedata.normalize("NFC", text)
    if not _is_id(name):
        raise ConfigError(
            f"{text!r} is not a run id: a run id consists of letters, digits and '_.+=-'"
        )
    return name


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and ".." not in name


def prunable(
    runs: Sequence[StoredRun], older_than: float | None, keep: int, now: float
) -> tuple[str, ...]:
    """Return the ids of runs that may be removed. Pure.

    Runs that are running, runs whose driver was active within the last hour, and unreadable runs
    are kept, with the runs that they resume, directly or through other runs.

    Args:
        runs: the runs, the newest first.
        older_than: minimum age of the record, in seconds.
        keep: number of the newest runs to keep.
    """

    def may_be_active(record: RunRecord) -> bool:
        is_recent = record.is_running(now) or now - record.updated < _DEAD_SECONDS
        return not record.has_ended and is_recent

    records = {run.run_id: run.record for run in runs if run.record is not None}
    needed = {run_id for run_id, record in records.items() if may_be_active(record)}
    reached = list(needed)
    while reached:
        record = records.get(reached.pop())
        resumed = None if record is None else record.spec.resume
        if resumed is not None and resumed not in needed:
            needed.add(resumed)
            reached.append(resumed)
    return tuple(
        run.run_id
        for run in runs[keep:]
        if run.record is not None
        and run.run_id not in needed
        and now - run.record.updated >= (older_than or 0.0)
    )
