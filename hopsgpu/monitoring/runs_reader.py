"""Polls the runs of all roots: the active runs, and sums of all."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hopsgpu.artifacts.run_changes import RunChanges
from hopsgpu.artifacts.run_uses import UsageFiles
from hopsgpu.artifacts.runs import READERS, RunStore
from hopsgpu.cluster_managers.yarn.queues import queue_path
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.monitoring.run_digest import RunDigest, digest_of
from hopsgpu.monitoring.run_totals import RunTotals, Totals
from hopsgpu.storage.error_messages import ABSENT
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# Seconds until new users are looked up.
_ROOTS_SECONDS = 300.0
# Seconds until a root that does not exist, or refuses, is read again.
_ABSENT_SECONDS = 30.0
_FEW_ROOTS = 20
# A driver whose record is younger may only have been suspended.
_GONE_SECONDS = 3600.0
_SAVED_SECONDS = 60.0

Roots = Callable[[], tuple[Sequence[LakePath], Sequence[str]]]
Key = tuple[str, str]


@dataclass(frozen=True)
class LiveRun:
    """A run that has not ended.

    Attributes:
        state: value of a GangState, or "lost".
        saved: when the newest checkpoint was written, in seconds since the epoch; None if there is
            none, or if it is not known.
    """

    digest: RunDigest
    queue: str
    state: str
    saved: float | None = None


@dataclass(frozen=True)
class RunsView:
    """The runs at one moment.

    Attributes:
        live: the runs that have not ended, those with the most GPUs first.
        unreadable_roots: number of roots that cannot be read, though they may exist.
        problems: why these roots cannot be read, one line each.
    """

    live: tuple[LiveRun, ...]
    totals: Totals
    unreadable_records: int = 0
    unreadable_roots: int = 0
    problems: tuple[str, ...] = ()


@dataclass
class _Root:
    """The state of a root between two polls."""

    lake: LakePath
    changes: RunChanges[RunDigest]
    was_seen: bool = False
    again_at: float = float("-inf")
    refusal: str = ""
    unreadable: int = 0
    # Digests of runs that have not ended.
    live: dict[str, RunDigest] = field(default_factory=dict)
    # Times of the files of held gangs.
    held: dict[str, int] = field(default_factory=dict)


class RunsReader:
    """Reads what changed among the runs of all roots, and adds it up."""

    def __init__(
        self,
        roots: Roots,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._find_roots = roots
        self._clock = clock
        self._wall_clock = wall_clock
        self._began = wall_clock()
        self._totals = RunTotals()
        self._roots: dict[str, _Root] = {}
        self._unknown: Sequence[str] = ()
        self._roots_at = float("-inf")
        # When each run's checkpoints were looked at, and the time of the newest.
        self._saved: dict[Key, tuple[float, float | None]] = {}

    def look(self, queues: Sequence[str]) -> RunsView:
        """Return the runs now.

        Raises:
            HopsGpuError: no root can be read.
        """
        now = self._clock()
        if now >= self._roots_at + _ROOTS_SECONDS:
            self._renew_roots(now)
        for root in self._roots.values():
            if now >= root.again_at:
                self._look_at(root, queues, now)
        roots = list(self._roots.values())
        problems = (*self._unknown, *(root.refusal for root in roots if root.refusal))
        readable = [root for root in roots if root.was_seen and not root.refusal]
        if problems and not any(root.changes.has_directory for root in readable):
            raise HopsGpuError(f"no run can be read: {problems[0]}")
        live = self._live(readable, queues)
        return RunsView(
            live=tuple(sorted(live, key=lambda run: (-run.digest.gpus, run.digest.run_id))),
            totals=self._totals.snapshot(),
            unreadable_records=sum(root.unreadable for root in readable),
            unreadable_roots=len(problems),
            problems=tuple(problems),
        )

    def _renew_roots(self, now: float) -> None:
        lakes, self._unknown = self._find_roots()
        # A known root keeps its client and the state of its runs.
        lake_by_url = {lake.url: lake for lake in lakes}
        for url in () if self._unknown else self._roots.keys() - lake_by_url.keys():
            self._forget(self._roots.pop(url))
        for url, lake in lake_by_url.items():
            if url not in self._roots:
                shared = lake.with_client()
                self._roots[url] = _Root(shared, RunChanges(shared, digest_of, self._clock))
        self._roots_at = now

    def _forget(self, root: _Root) -> None:
        log.info("the root %s is gone", root.lake.url)
        for name in (*root.changes.ids, *root.held):
            self._totals.forget((root.lake.url, name))

    def _look_at(self, root: _Root, queues: Sequence[str], now: float) -> None:
        """Take what changed below a root, or note why it cannot be read."""
        pause = _ABSENT_SECONDS if len(self._roots) > _FEW_ROOTS else 0.0
        try:
            # Count at once: each poll reports a change only once.
            for name, (user, queue, use) in self._read_held(root).items():
                path, key = queue_path(queue, queues), (root.lake.url, name)
                self._totals.take_held(key, user, path, use, is_old=not root.was_seen)
            changes = root.changes.poll()
        except StoreError as error:
            root.refusal, root.again_at = str(error), now + pause
            return
        root.again_at = now if root.changes.has_directory else now + pause
        wall = self._wall_clock()
        url = root.lake.url
        for run_id, digest in changes.read.items():
            is_gone = _is_gone(digest, wall)
            self._totals.take(
                (url, run_id),
                digest,
                queue_path(digest.queue, queues),
                is_old=not root.was_seen or digest.updated < self._began - _GONE_SECONDS,
                is_gone=is_gone,
            )
            root.live.pop(run_id, None)
            if digest.reason is None and not is_gone:
                root.live[run_id] = digest
        for run_id in changes.removed:
            root.live.pop(run_id, None)
            self._totals.forget((url, run_id))
        self._drop_gone(root, queues, wall)
        root.unreadable = changes.unreadable
        root.refusal = changes.problem
        root.was_seen = root.was_seen or not changes.problem

    def _drop_gone(self, root: _Root, queues: Sequence[str], wall: float) -> None:
        for run_id, digest in list(root.live.items()):
            if _is_gone(digest, wall):
                path = queue_path(digest.queue, queues)
                key = (root.lake.url, run_id)
                self._totals.take(key, digest, path, is_old=False, is_gone=True)
                del root.live[run_id]

    def _read_held(self, root: _Root) -> Mapping[str, tuple[str, str, GpuUse]]:
        """Return user, queue and GPU seconds of the held gangs whose files changed, by file."""
        files, use_by_name = UsageFiles(root.lake), {}
        entries = files.held_files()
        for entry in entries:
            if root.held.get(entry.name) == entry.modified:
                continue
            try:
                gang = files.gang(entry.name)
                use_by_name[entry.name] = gang.user, gang.queue, gang.points[-1].total
            except (StoreError, ValueError) as error:
                log.info("%s: %s", entry.name, error)
            root.held[entry.name] = entry.modified
        for name in root.held.keys() - {entry.name for entry in entries}:
            del root.held[name]
            self._totals.forget((root.lake.url, name))
        return use_by_name

    def _live(self, roots: Iterable[_Root], queues: Sequence[str]) -> list[LiveRun]:
        runs = [(root, digest) for root in roots for digest in root.live.values()]
        self._look_for_checkpoints([(r, d) for r, d in runs if d.trains_since is not None])
        wall = self._wall_clock()
        return [
            LiveRun(
                digest,
                queue_path(digest.queue, queues),
                "lost" if digest.is_lost(wall) else digest.state,
                self._saved.get((root.lake.url, digest.run_id), (0.0, None))[1],
            )
            for root, digest in runs
        ]

    def _look_for_checkpoints(self, runs: Sequence[tuple[_Root, RunDigest]]) -> None:
        now = self._clock()
        keys = {(root.lake.url, digest.run_id): root for root, digest in runs}
        self._saved = {key: saved for key, saved in self._saved.items() if key in keys}
        due = [
            (key, root)
            for key, root in keys.items()
            if key not in self._saved or now >= self._saved[key][0] + _SAVED_SECONDS
        ]
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            times = list(pool.map(lambda item: _newest_checkpoint(item[1].lake, item[0][1]), due))
        self._saved |= {key: (now, time) for (key, _), time in zip(due, times, strict=True)}


def _is_gone(digest: RunDigest, wall: float) -> bool:
    return digest.is_lost(wall) and wall - digest.updated > _GONE_SECONDS


def _newest_checkpoint(root: LakePath, run_id: str) -> float | None:
    """Return when the newest checkpoint of a run changed, in seconds since the epoch, or None."""
    place = RunStore(root).directory(run_id) / "checkpoints"
    try:
        entries = place.entries()
        steps = [entry for entry in entries if entry.is_directory and entry.name.isdecimal()]
        if steps and place.is_object_store:
            # An object store has no times of directories, only of the parts.
            steps = list((place / max(steps, key=lambda entry: int(entry.name)).name).entries())
    except StoreError as error:
        if error.kind != ABSENT:
            log.info("the checkpoints of %s are unknown: %s", run_id, error)
        return None
    # The time of a step's directory is the arrival of its last part.
    return max(entry.modified for entry in steps) / 1000 if steps else None
