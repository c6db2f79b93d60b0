"""The GPU time of runs, read from their records, and kept for runs that were removed.

Each line of the files in `<root>/usage/` is the JSON of one run. `UsageFiles.keep` writes a
complete new file before the runs are removed, so a killed removal loses no run. A run that is in
several files, or in a file and still in `<root>/runs/`, counts once. A held gang has a file with
the time between its launches, which is in no run's record.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hopsgpu.artifacts.runs import READERS, RUNS, RunStore
from hopsgpu.core.gpu_use import Points, UsePoint
from hopsgpu.core.run_record import RunRecord
from hopsgpu.core.typed_json import Codec, Range, loads
from hopsgpu.core.usage_report import ACTIVE, CANCELLED, FAILED, HELD, LOST, SUCCEEDED, RunUse
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import FileStatus, LakePath, is_draft
from hopsgpu.units import MIB, count_of

log = logging.getLogger(__name__)

_DIRECTORY = "usage"
_SUFFIX = ".jsonl"
_HELD = "held-"
_TAKEN = "taken-"
_LISTINGS = 3
_SCHEMA = 1
# Bytes of a file that readers accept.
LARGEST_FILE = 16 * MIB
_STATES = (SUCCEEDED, FAILED, CANCELLED, LOST, ACTIVE, HELD)
# How far the clocks of a driver, the lake and a reader may be apart.
_CLOCKS_SECONDS = 3600.0


def use_of(record: RunRecord, now: float) -> RunUse:
    return RunUse(
        run_id=record.run_id,
        name=record.name,
        user=record.user,
        queue=record.queue,
        state=ACTIVE if record.is_running(now) else record.state_at(now),
        points=record.use,
    )


_CODEC = Codec(
    hint_names={"Points": Points},
    ranges={UsePoint: Range(0.0, 1e12), (UsePoint, "time"): Range(0.0, 1e11)},
)


def _line(run: RunUse) -> str:
    rounded = replace(run, points=tuple(point.round_values() for point in run.points))
    return json.dumps({"schema": _SCHEMA, **_CODEC.encode(rounded)}, allow_nan=False)


def _run_of(line: bytes) -> RunUse:
    """Parse a line; raise ValueError if it has another form."""
    fields = loads(line)
    if not isinstance(fields, dict) or fields.get("schema") != _SCHEMA:
        raise ValueError(f"it has another schema than {_SCHEMA}")
    run = _CODEC.decode(RunUse, fields)
    times = [point.time for point in run.points]
    if run.state not in _STATES or not times or times != sorted(times):
        raise ValueError(f"state {run.state!r:.99}, times {times!r:.99}")
    return run


def _contents(runs: Sequence[RunUse], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of runs in parts of at most `max_bytes`."""
    part: list[bytes] = []
    size = 0
    for run in runs:
        line = f"{_line(run)}\n".encode()
        if part and size + len(line) > max_bytes:
            yield b"".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield b"".join(part)


class UsageFiles:
    """The files of a root with the GPU time of removed runs, and of held gangs between launches."""

    def __init__(self, root: LakePath) -> None:
        self._root = root
        self._directory = root / _DIRECTORY

    def keep(self, runs: Sequence[RunUse], now: float, max_bytes: int = LARGEST_FILE) -> None:
        """Keep the GPU time of runs that are to be removed next, in files of `max_bytes`.

        Raises:
            StoreError: the lake refused the operation; then the runs must stay.
        """
        if not runs:
            return
        self._ensure_directory()
        moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
        for content in _contents(runs, max_bytes):
            # Concurrent removals must not write the same file.
            name = f"removed-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}{_SUFFIX}"
            (self._directory / name).replace(content)
            log.info("keeps the GPU time of removed runs in %s/%s", self._directory.url, name)

    def write_held(self, gang: RunUse) -> None:
        """Replace the file of a held gang by its GPU time until now."""
        self._ensure_directory()
        (self._directory / f"{_HELD}{gang.run_id}{_SUFFIX}").replace(f"{_line(gang)}\n".encode())

    def _ensure_directory(self) -> None:
        """Create the directory, if missing, with the mode of the directory of runs.

        On a root of several users, all who may write runs may write here too.
        """
        if self._directory.exists():
            return
        self._directory.make()
        # If another user's driver has made the directory meanwhile, that driver sets the mode.
        with contextlib.suppress(StoreError):
            self._directory.set_mode((self._root / RUNS).stat().mode)

    def held_files(self) -> tuple[FileStatus, ...]:
        return tuple(entry for entry in self._entries() if entry.name.startswith(_HELD))

    def gang(self, name: str) -> RunUse:
        """Return the held gang whose file has this name.

        Raises:
            StoreError: the lake refused the operation, the file was removed, or it is damaged.
        """
        for run in self._read(name):
            if isinstance(run, StoreError):
                raise run
            return run
        raise StoreError(f"{(self._directory / name).url} is empty", "damaged")

    def take_held(self, before: float) -> tuple[Sequence[RunUse], Sequence[LakePath]]:
        """Return the held gangs whose files have not changed lately, and the files to remove.

        The files get new names first, under which they still count. If a long launch still uses a
        gang whose file is taken, the gang writes a new file, which is not removed. Only one of two
        concurrent removals gets a file.

        Args:
            before: latest modification of a file, in seconds since the epoch by the file system's
                clock.
        """
        gangs: list[RunUse] = []
        files = []
        for entry in self._entries():
            if entry.name.startswith((_HELD, _TAKEN)) and entry.modified < before * 1000:
                name = self._take(entry.name) if entry.name.startswith(_HELD) else entry.name
                read = [] if name is None else list(self._read(name))
                runs = [run for run in read if isinstance(run, RunUse)]
                if runs and len(runs) == len(read):
                    gangs += runs
                    files.append(self._directory / str(name))
        return gangs, files

    def _take(self, name: str) -> str | None:
        """Give a file a name that no other removal knows, if the lake has renames.

        Without renames, the removal of a file that a gang has just written loses nothing: the
        gang's next write contains all of its GPU time.

        Returns:
            The name; None if the file is gone, or belongs to another user, who alone may rename it.
        """
        if self._directory.is_object_store:
            return name
        new_name = f"{_TAKEN}{secrets.token_hex(4)}-{name}"
        try:
            (self._directory / name).rename(self._directory / new_name)
        except StoreError as error:
            if error.kind in (ABSENT, PERMISSION):
                return None
            raise
        return new_name

    def read(self, since: float | None) -> Iterator[RunUse | StoreError]:
        """Yield the kept runs, and an error for each file of which a part cannot be read.

        Args:
            since: leaves out files that were written before, in seconds since the epoch.
        """
        least = 0.0 if since is None else since * 1000
        seen: set[str] = set()
        # A concurrent removal moves lines from some files into another: list the files again.
        for tries_left in reversed(range(_LISTINGS)):
            try:
                entries = self._entries()
            except StoreError as error:
                yield error
                return
            has_moved = False
            for entry in entries:
                if entry.name in seen or entry.modified < least:
                    continue
                seen.add(entry.name)
                for run in self._read(entry.name):
                    if tries_left and isinstance(run, StoreError) and run.kind == ABSENT:
                        has_moved = True
                    else:
                        yield run
            if not has_moved:
                return

    def _entries(self) -> Sequence[FileStatus]:
        try:
            entries = self._directory.entries()
        except StoreError as error:
            if error.kind == ABSENT:
                return ()
            raise
        return [e for e in entries if e.name.endswith(_SUFFIX) and not is_draft(e.name)]

    def _read(self, name: str) -> Iterator[RunUse | StoreError]:
        file = self._directory / name
        try:
            # Bounded, because other users write here too.
            lines = file.read(LARGEST_FILE).splitlines()
        except StoreError as error:
            yield error
            return
        bad = []
        for number, line in enumerate(lines, 1):
            try:
                yield _run_of(line)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
        if bad:
            more = f" (and {count_of(len(bad) - 1, 'more line')})" if bad[1:] else ""
            yield StoreError(f"{file.url} has lines that are no runs: {bad[0]}{more}", "damaged")


def keep_before_removal(
    root: LakePath, runs: Sequence[RunRecord], older_than: float | None, now: float
) -> None:
    """Keep the GPU time of runs that are to be removed next.

    The new file includes those of held gangs that have ended, so that the lake has few small files.

    Args:
        older_than: minimum age of the last change of a held gang's file, in seconds; at least an
            hour counts.

    Raises:
        StoreError: the lake refused the operation; then the runs must stay.
    """
    files = UsageFiles(root)
    gangs, merged = files.take_held(now - max(older_than or 0.0, _CLOCKS_SECONDS))
    files.keep([*gangs, *(use_of(record, now) for record in runs)], now)
    for file in merged:
        file.remove()


@dataclass(frozen=True)
class RunUses:
    """The GPU time of the runs below some roots.

    Attributes:
        runs: the runs; a run that is being removed may be included twice.
        problems: what could not be read, and why; each once.
    """

    runs: tuple[RunUse, ...]
    problems: tuple[str, ...]


def read_uses(roots: Sequence[LakePath], since: float | None, now: float) -> RunUses:
    """Return the GPU time of the runs below roots, including removed runs.

    Runs whose directories did not change in the period, nor in the hour before it, are not read. A
    root that does not exist has no runs.

    Args:
        since: begin of the period, in seconds since the epoch; None for all runs.

    Raises:
        StoreError: the lake cannot be reached.
    """
    least = None if since is None else since - _CLOCKS_SECONDS
    roots = [root.with_client() for root in roots]
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        listings = list(pool.map(lambda root: _list(RunStore(root), least), roots))
        problems = [ids for ids in listings if isinstance(ids, str)]
        readable = [
            (root, ids)
            for root, ids in zip(roots, listings, strict=True)
            if not isinstance(ids, str)
        ]
        named = [(RunStore(root), run_id) for root, ids in readable for run_id in ids]
        read = list(pool.map(lambda run: _use_in(run[0], run[1], now), named))
        kept = pool.map(lambda pair: list(UsageFiles(pair[0]).read(least)), readable)
        removed = [run for runs_of_root in kept for run in runs_of_root]
    runs = [run for run in (*read, *removed) if isinstance(run, RunUse)]
    # A killed removal may leave the directory of a kept run without its record.
    known_ids = {run.run_id for run in runs}
    for (_, run_id), run in zip(named, read, strict=True):
        if isinstance(run, StoreError) and run_id not in known_ids:
            problems.append(f"{run_id}: {run}")
    problems += [str(run) for run in removed if isinstance(run, StoreError)]
    return RunUses(tuple(runs), tuple(dict.fromkeys(problems)))


def _list(store: RunStore, since: float | None) -> tuple[str, ...] | str:
    try:
        return store.ids(since)
    except HopsGpuError as error:
        return str(error)


def _use_in(store: RunStore, run_id: str, now: float) -> RunUse | StoreError:
    stored = store.load(run_id)
    if stored.record is None:
        return StoreError(stored.problem, stored.kind)
    return use_of(stored.record, now)
