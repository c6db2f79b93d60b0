"""Run records on the lake, as others than their drivers see them: `<root>/runs/<run_id>/`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
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

# In a run's directory.
RECORD = "run.json"
CANCEL = "cancel"
SCHEMA = 2
# A driver writes at least every 20 s while its run goes on.
LOST_SECONDS = 60.0
LOST = "lost"
UNREADABLE = "unreadable"
# The kind of the error where another version of hopsgpu has written a record.
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
    """What run.json says.

    Attributes:
        content: all of it.
        run_id: names the run and its directory.
        state: a GangState's value.
        attempt: the latest, from 0.
        updated: when it was written, by the driver's clock, seconds since the epoch.
        name: of the run.
        user: who submitted it.
        error: what ended it, or None.
        model: URL of the version that it published, or None.
        timeline: seconds since the epoch of each point passed.
        ranks: how each rank fared: the fields of RankReport, and "ended".
        logs: bytes of each log, by its path in the run's directory.
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
        """Whether the driver said so."""
        return self.state in _TERMINAL

    def state_at(self, now: float) -> str:
        """The state, or "lost" of one that goes on and was not written for a minute."""
        if not self.has_ended and now - self.updated > LOST_SECONDS:
            return LOST
        return self.state

    def goes_on(self, now: float) -> bool:
        """Whether its driver is at work, as far as the record tells."""
        return not self.has_ended and self.state_at(now) != LOST

    def took(self, now: float) -> float | None:
        """Seconds from the request to the end, or until now; None where it does not tell."""
        began = self.timeline.get("requested")
        if began is None:
            return None
        return max((now if self.goes_on(now) else self.updated) - began, 0.0)

    @property
    def gpus(self) -> int:
        """GPUs of the gang."""
        return int(self.content["executors"]) * int(self.content["executor"]["gpus"])


def parse(content: bytes, url: str = RECORD) -> RunRecord:
    """Reads a record.

    Args:
        content: of the file.
        url: of the file, for the error.

    Raises:
        StoreError: it is not one, or of a schema that this version does not know.
    """
    try:
        told = json.loads(content, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded)
        if told["schema"] != SCHEMA:
            raise StoreError(
                f"{url} was written by another version of hopsgpu: it has schema"
                f" {told['schema']!r:.99}, and this one reads schema {SCHEMA}; {_LOGS}",
                kind=OTHER_SCHEMA,
            )
        record = RunRecord(
            content=told,
            run_id=_text(told["run_id"]),
            state=GangState(told["state"]).value,
            attempt=int(told["attempt"]),
            updated=_time(told["updated"]),
            name=_text(told["name"]),
            user=_text(told["user"]),
            error=None if told["error"] is None else _text(told["error"]),
            model=None if told["model"] is None else _text(told["model"]),
            timeline={n: _time(t) for n, t in told["timeline"].items() if t is not None},
            ranks=tuple(_rank(rank) for rank in told["ranks"]),
            logs={_text(name): int(size) for name, size in told["logs"].items()},
        )
        _ = record.gpus, told["spec"]["workers"]
    except ODD_JSON as error:
        raise StoreError(
            f"{url} is no record of a run ({type(error).__name__}: {error}): written by another"
            f" version of hopsgpu? {_LOGS}",
            kind="damaged",
        ) from error
    return record


def _parsed(file: Lake) -> RunRecord:
    """What a record says that may be replaced just now."""
    for _ in range(_MORE_READINGS):
        content = file.read()
        # Over WebHDFS the length is another request's: it may be that of the record before.
        with contextlib.suppress(StoreError):
            return parse(content, file.url)
    return parse(file.read(), file.url)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.99} is no finite number")
    return number


def _bounded(text: str) -> int:
    number = int(text)
    float(number)  # an OverflowError: no reader can reckon with it
    return number


def _time(told: object) -> float:
    """Seconds since the epoch; of a text too, as float() reads it, but no NaN nor infinity."""
    return _finite(str(float(told)))  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _rank(told: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **told,
        "rank": int(told["rank"]),
        "host": _text(told["host"]),
        "ended": bool(told["ended"]),
    }


@dataclass(frozen=True)
class StoredRun:
    """A directory among the runs.

    Attributes:
        run_id: its name.
        record: what it tells, or None.
        problem: why it tells nothing, or "".
        kind: of the problem, as of a StoreError.
    """

    run_id: str
    record: RunRecord | None
    problem: str = ""
    kind: str = ""

    def state_at(self, now: float) -> str:
        """The run's state, "lost", or "unreadable"."""
        return UNREADABLE if self.record is None else self.record.state_at(now)


def began(entry: Status) -> float:
    """When a run began by its id, else when its directory changed; seconds since the epoch."""
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
        root: URL.
    """

    def __init__(self, root: str) -> None:
        self._runs = Lake(root) / "runs"

    @property
    def url(self) -> str:
        """Where they are."""
        return self._runs.url

    def directory(self, run_id: str) -> Lake:
        """A run's directory.

        Raises:
            ConfigError: it cannot be a run's id.
        """
        return self._runs / run_name(run_id)

    def ids(self) -> tuple[str, ...]:
        """Names of all directories here, those of the newest runs first."""
        # Where nothing has run there is no directory.
        entries = self._runs.entries() if self._runs.exists() else ()
        found = [entry for entry in entries if entry.is_directory]
        return tuple(e.name for e in sorted(found, key=lambda e: (began(e), e.name), reverse=True))

    def find(self, given: str) -> str:
        """The id of a run.

        Args:
            given: the id, a beginning of it that no other has, or "last" for the newest.

        Raises:
            ConfigError: there is none, or there are several.
        """
        if given == LATEST:
            # What bears no run's name is none, though it is listed.
            newest = next((name for name in self.ids() if _is_id(name)), None)
            if newest is None:
                raise ConfigError(f"there are no runs in {self.url}")
            return newest
        name = run_name(given)
        found = [run_id for run_id in self.ids() if run_id.startswith(name)]
        if name in found or len(found) == 1:
            return name if name in found else found[0]
        if not found:
            raise ConfigError(
                f"there is no run {given!r} in {self.url} (`hopsgpu runs` lists them)"
            )
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise ConfigError(f"{len(found)} runs begin with {given!r}: {shown}; give more of the id")

    def record(self, run_id: str) -> RunRecord:
        """What a run's record says.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        file = self.directory(run_id) / RECORD
        record = _parsed(file)
        if record.run_id != run_id:
            raise StoreError(f"{file.url} is the record of {record.run_id}", kind="damaged")
        return record

    def read(self, run_ids: Sequence[str]) -> list[StoredRun]:
        """Runs with their records, several at a time; one that cannot be read says why."""
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self._stored, run_ids))

    def _stored(self, run_id: str) -> StoredRun:
        try:
            return StoredRun(run_id, self.record(run_id))
        except HopsGpuError as error:
            return StoredRun(run_id, None, str(error), getattr(error, "kind", ""))

    def ask_to_cancel(self, run_id: str) -> None:
        """Leaves word for the run's driver, which looks for it every few seconds.

        Raises:
            StoreError: the lake refuses, since the run is another user's, say.
        """
        (self.directory(run_id) / CANCEL).create()

    def remove(self, run_id: str) -> None:
        """Removes a run with its logs and checkpoints; models are not among them."""
        self.directory(run_id).remove()


def run_name(given: str) -> str:
    """A run's id, or a beginning of it, that is safe as one component of a path.

    Raises:
        ConfigError: it cannot be one.
    """
    name = unicodedata.normalize("NFC", given)
    if not _is_id(name):
        raise ConfigError(f"{given!r} is not a run id: it consists of letters, digits and '_.+=-'")
    return name


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and ".." not in name


# A driver may have been suspended.
_GONE_SECONDS = 3600.0


def prunable(
    runs: Sequence[StoredRun], older_than: float | None, keep: int, now: float
) -> tuple[str, ...]:
    """Ids of runs that may be removed. Pure.

    Never one that goes on, or whose driver was at work within the last hour, or that cannot be
    read; nor one that such a run resumes, nor what that one resumed.

    Args:
        runs: the newest first.
        older_than: seconds since the last that was heard of a run; None for any.
        keep: so many of the newest stay.
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
    """The run from whose checkpoints one goes on."""
    resumed = None if record is None else record.content["spec"].get("resume")
    return resumed if isinstance(resumed, str) else None
