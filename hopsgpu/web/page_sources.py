"""The reads behind the pages: runs, logs, metrics and models on the lake, and YARN's answers.

All calls here block, for as long as the lake or YARN takes; `shared_reads` has them in threads.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.artifacts.model_listing import model_entry, tags_of, version_entry
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.run_logs import RankLog, log_file, log_sizes
from hopsgpu.artifacts.run_uses import RunUses, read_uses
from hopsgpu.artifacts.runs import READERS, RunStore, StoredRun, start_in_id
from hopsgpu.cluster_managers.silent_runs import SilentRuns, silent_runs
from hopsgpu.core.metrics import record_name
from hopsgpu.core.queue_policy import QueueSnapshot
from hopsgpu.core.run_record import RunRecord
from hopsgpu.display.picture import Point
from hopsgpu.display.run_facts import ManagerPages
from hopsgpu.display.run_view import RunSummary, newest, summary_of
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.lake_root import given_roots, roots_of_users
from hopsgpu.web.checkpoint_rows import CheckpointRow, checkpoint_rows
from hopsgpu.web.log_pages import LogPart, read_part
from hopsgpu.web.metric_series import MetricFiles, MetricPlots, last_attempt_directory
from hopsgpu.web.node_use import HOUR, TAIL_BYTES, means_by_host, samples_in
from hopsgpu.web.run_filter import RunFilter

if TYPE_CHECKING:
    from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
    from hopsgpu.cluster_managers.yarn.application_state import ApplicationState

log = logging.getLogger(__name__)

# A driver writes its record every ten seconds; clocks may be apart.
_ACTIVE_SECONDS = 3600.0
_MAX_ENDED = 2000
# Runs of a list whose records are read for a restriction, and of each step of the reading.
_MAX_SEARCHED = 1000
# Runs and ranks whose samples the page of the cluster shows.
_MAX_SAMPLED_RUNS = 50
_MAX_SAMPLED_RANKS = 128
_SEARCH_STEP = 100
_MAX_WATCHED = 16
_MAX_MODELS = 500
_MAX_VERSIONS = 200
_CHECKPOINTS = "checkpoints"
_MODELS = "models"


@dataclass(frozen=True)
class Root:
    """A directory of runs and models.

    Attributes:
        key: its name in the pages' addresses.
    """

    key: str
    lake: LakePath

    @property
    def store(self) -> RunStore:
        return RunStore(self.lake)


@dataclass(frozen=True)
class Roots:
    """The roots that are shown, the caller's own first.

    Attributes:
        problems: why others are unknown.
    """

    roots: tuple[Root, ...]
    problems: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Root:
        for root in self.roots:
            if root.key == key:
                return root
        raise ConfigError(f"there is no root {key[:99]!r} here")


@dataclass(frozen=True)
class RunList:
    """Runs of one root or of all.

    Attributes:
        has_more: whether there are older ones.
        problems: why roots cannot be listed.
        searched: number of the newest runs of which these are those that were wanted.
        total: number of all runs.
    """

    rows: tuple[RunSummary, ...]
    has_more: bool
    problems: tuple[str, ...]
    searched: int = 0
    total: int = 0


@dataclass(frozen=True)
class GangQueues:
    """The queues of gangs.

    Attributes:
        snapshots: the queue of each partition; none without YARN.
    """

    snapshots: Mapping[str, QueueSnapshot]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogText:
    """A part of a log, and which other logs there are.

    Attributes:
        logs: all logs beside it, with their bytes.
    """

    part: LogPart
    logs: Mapping[RankLog, int]


@dataclass(frozen=True)
class ModelList:
    """The models below a root.

    Attributes:
        models: entries as `hopsgpu.artifacts.model_listing.model_entry` makes them.
    """

    models: tuple[Mapping[str, Any], ...]
    left_out: int = 0


@dataclass(frozen=True)
class VersionList:
    """The versions of a model.

    Attributes:
        versions: entries as `hopsgpu.artifacts.model_listing.version_entry` makes them; the newest
            is first.
        problem: why the tags cannot be read, or "".
    """

    versions: tuple[Mapping[str, Any], ...]
    problem: str = ""
    left_out: int = 0


class Sources:
    """The blocking reads of the lake and of YARN behind the pages.

    All methods raise a HopsGpuError if the lake or YARN refuses, or if the thing does not exist.

    Args:
        queues: returns the queues of gangs with the time there, and what cannot be read.
        find_roots: returns the roots, the caller's own first, and why others are unknown.
        application_state: returns what YARN says of an application; None without YARN.
        pages: the cluster manager's pages.
        silent: asks YARN about silent runs.
    """

    def __init__(
        self,
        cluster: Callable[[], ClusterGpus],
        queues: Callable[[], tuple[Mapping[str, tuple[QueueSnapshot, int]], Sequence[str]]],
        find_roots: Callable[[], tuple[Sequence[LakePath], Sequence[str]]],
        application_state: Callable[[str], ApplicationState] | None = None,
        pages: ManagerPages = ManagerPages(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.time,
        silent: SilentRuns = SilentRuns(None),  # noqa: B008 - without state
    ) -> None:
        self.clock = clock
        self.pages = pages
        self.silent = silent
        self.cluster = cluster
        self.application_state = application_state
        self._queues = queues
        self._find_roots = find_roots
        self._lock = threading.Lock()
        # Rows of runs that have ended, which do not change.
        self._ended: OrderedDict[tuple[str, str], RunSummary] = OrderedDict()
        self._watched: OrderedDict[tuple[str, str], MetricFiles] = OrderedDict()
        self._clients: dict[str, LakePath] = {}

    def roots(self) -> Roots:
        """Return the roots."""
        lakes, problems = self._find_roots()
        return Roots(tuple(_with_keys([self._client(lake) for lake in lakes])), tuple(problems))

    def _client(self, lake: LakePath) -> LakePath:
        """Return a root whose client is kept, and gives up soon on a NameNode that is away."""
        with self._lock:
            client = self._clients.get(lake.url)
        if client is None:
            client = LakePath(lake.url, should_fail_fast=True).with_client()
            with self._lock:
                self._clients[lake.url] = client
        return client

    def queues(self) -> GangQueues:
        """Return the queues of gangs."""
        queues, problems = self._queues()
        snapshots = {name: snapshot for name, (snapshot, _) in queues.items()}
        return GangQueues(snapshots, tuple(problems))

    def runs(self, roots: Sequence[Root], wanted: RunFilter, most: int) -> RunList:
        """Return the newest runs of some roots that a filter accepts.

        A filter searches the newest thousand runs.
        """
        listings, problems = self._ids(roots, None)
        limit, now = _MAX_SEARCHED if wanted.is_restricted else most, self.clock()
        # Sort by the times in the ids, so that only the records of shown runs are read.
        some = [
            (root, run_id)
            for root, ids in listings
            for run_id in ids[:limit]
            if wanted.can_accept(run_id, now)
        ]
        some.sort(key=lambda pair: start_in_id(pair[1]) or 0.0, reverse=True)
        some = some[:limit]
        rows: list[RunSummary] = []
        searched = 0
        while searched < len(some) and len(rows) < most:
            step = some[searched : searched + max(_SEARCH_STEP, most)]
            rows += [row for row in self._rows(step) if wanted.is_accepted(row)]
            searched += len(step)
        total = sum(len(ids) for _, ids in listings)
        has_more = len(rows) > most or searched < (len(some) if wanted.is_restricted else total)
        return RunList(tuple(newest(rows, most)), has_more, tuple(problems), searched, total)

    def active(self, roots: Sequence[Root]) -> RunList:
        """Return the active runs."""
        listings, problems = self._ids(roots, self.clock() - _ACTIVE_SECONDS)
        some = [(root, run_id) for root, ids in listings for run_id in ids]
        rows = [row for row in self._rows(some) if row.is_running]
        return RunList(tuple(newest(rows, len(rows))), False, tuple(problems))

    def _ids(
        self, roots: Sequence[Root], since: float | None
    ) -> tuple[list[tuple[Root, tuple[str, ...]]], list[str]]:
        def list_one(root: Root) -> tuple[str, ...] | HopsGpuError:
            try:
                return root.store.ids(since)
            except HopsGpuError as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            listings = list(zip(roots, pool.map(list_one, roots), strict=True))
        readable = [(root, ids) for root, ids in listings if isinstance(ids, tuple)]
        return readable, [str(ids) for _, ids in listings if not isinstance(ids, tuple)]

    def _rows(self, some: Sequence[tuple[Root, str]]) -> list[RunSummary]:
        with self._lock:
            rows = [self._ended.get((root.key, run_id)) for root, run_id in some]
        unread = [pair for pair, row in zip(some, rows, strict=True) if row is None]

        def load(number: int) -> StoredRun:
            root, run_id = unread[number]
            return root.store.load(run_id)

        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            stored = list(pool.map(load, range(len(unread))))
        now = self.clock()
        runs = zip(unread, self.silent.with_reports(stored, load, now), strict=True)
        read = iter([self._row(root, run, now) for (root, _), run in runs])
        return [next(read) if row is None else row for row in rows]

    def _row(self, root: Root, run: StoredRun, now: float) -> RunSummary:
        row = summary_of(run, now, root.key)
        is_over = run.record is not None and run.record.has_ended
        is_over = is_over or (run.report is not None and run.report.has_ended)
        # A search or a score may be resumed, with the same id.
        if is_over and row.kind == "gang":
            with self._lock:
                self._ended[root.key, run.run_id] = row
                while len(self._ended) > _MAX_ENDED:
                    self._ended.popitem(last=False)
        return row

    def node_use(self, roots: Sequence[Root]) -> Mapping[str, tuple[Point, ...]]:
        """Return the GPU use of each node's last hour, as runs of these roots have sampled it.

        The newest 50 runs and their first 128 ranks count. A root or a file that cannot be read
        is left out: other pages name it.
        """
        now = self.clock()
        listings, _ = self._ids(roots, now - HOUR)
        some = [(root, run_id) for root, ids in listings for run_id in ids][:_MAX_SAMPLED_RUNS]
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            files_by_run = pool.map(lambda pair: _sample_files(*pair), some)
            files = [file for files_of_run in files_by_run for file in files_of_run]
            tails = pool.map(lambda file: _tail_of(file[1]), files[:_MAX_SAMPLED_RANKS])
            pairs = (
                (host, sample)
                for (host, _), content in zip(files, tails, strict=False)
                for sample in samples_in(content, now - HOUR)
            )
            return means_by_host(pairs, now)

    def record(self, root: Root, run_id: str) -> RunRecord:
        """Return a run's record."""
        return root.store.record(run_id)

    def is_asked_to_cancel(self, root: Root, run_id: str) -> bool:
        return root.store.is_asked_to_cancel(run_id)

    def cancel(self, root: Root, run_id: str) -> None:
        """Ask a run's driver to cancel it."""
        root.store.cancel(run_id, self.clock())

    def metrics(self, root: Root, run_id: str) -> MetricPlots:
        """Return what a run reported so far; calls for one run follow each other."""
        key = (root.key, run_id)
        with self._lock:
            files = self._watched.pop(key, None) or MetricFiles(root.store.directory(run_id))
            self._watched[key] = files
            while len(self._watched) > _MAX_WATCHED:
                self._watched.popitem(last=False)
        return files.look()

    def checkpoints(self, root: Root, run_id: str) -> Sequence[CheckpointRow]:
        """Return the checkpoints of a run."""
        saved = Checkpoints(root.store.directory(run_id) / _CHECKPOINTS, rank=0)
        return checkpoint_rows(saved.shards(), saved.announced_ranks())

    def log(
        self,
        root: Root,
        run_id: str,
        which: RankLog,
        trial: int | None,
        begin: int | None,
        *,
        can_grow: bool,
    ) -> LogText:
        """Return a part of a rank's log."""
        directory = root.store.directory(run_id)
        if trial is not None:
            directory /= f"trials/{trial}"
        sizes = log_sizes(directory)
        if which not in sizes:
            raise StoreError(
                f"there is no log of rank {which.rank} in attempt {which.attempt} so far", "absent"
            )
        part = read_part(log_file(directory, which), sizes[which], begin, can_grow=can_grow)
        return LogText(part, sizes)

    def models(self, root: Root, part: str) -> ModelList:
        """Return the models below a root whose names contain a text."""
        store = _models(root)
        names = [name for name in store.list() if part.casefold() in name.casefold()]
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            entries = list(pool.map(lambda name: model_entry(store, name), names[:_MAX_MODELS]))
        return ModelList(tuple(entries), len(names) - len(entries))

    def versions(self, root: Root, name: str) -> VersionList:
        """Return the versions of a model.

        Raises:
            ConfigError: it cannot be a model's name.
            StoreError: there is no such model, or the lake refused.
        """
        store = _models(root)
        published = store.versions(name)[::-1]
        if not published:
            store.get(name)  # raises an error that lists the models
        tags, problem = tags_of(store, name)
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            shown = published[:_MAX_VERSIONS]
            entries = list(pool.map(lambda version: version_entry(version, tags), shown))
        return VersionList(tuple(entries), problem, len(published) - len(entries))

    def uses(self, roots: Sequence[Root], since: float | None) -> RunUses:
        """Return the GPU time of runs."""
        return read_uses([root.lake for root in roots], since, self.clock())


def _sample_files(root: Root, run_id: str) -> list[tuple[str, LakePath]]:
    """Return the hosts of a run's ranks with their files of samples; none if it is unreadable."""
    record = root.store.load(run_id).record
    if record is None or not record.ranks:
        return []
    try:
        home = last_attempt_directory(root.store.directory(run_id) / "logs")
    except StoreError:
        return []
    return [(rank.host, home / record_name(rank.rank)) for rank in record.ranks]


def _tail_of(file: LakePath) -> bytes:
    """Return the end of a file of samples; nothing if it cannot be read."""
    try:
        size = file.stat().size
        with file.open() as source:
            source.seek(max(size - TAIL_BYTES, 0))
            return source.read(TAIL_BYTES)
    except StoreError as error:
        log.debug("left out %s: %s", file.url, error)
        return b""


def _models(root: Root) -> ModelStore:
    return ModelStore((root.lake / _MODELS).url)


def _with_keys(lakes: Sequence[LakePath]) -> list[Root]:
    """Return roots with different keys: the name of the directory that each is in."""
    lake_by_key: dict[str, LakePath] = {}
    for lake in lakes:
        parts = lake.url.split("/")
        name = re.sub(r"[^\w.+=-]", "_", parts[-2] if len(parts) > 4 else "") or "lake"
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        lake_by_key[next(key for key in names if key not in lake_by_key and key.strip("."))] = lake
    return [Root(key, lake) for key, lake in lake_by_key.items()]


def live_sources(
    roots: Sequence[str], environ: Mapping[str, str], master: str | None = None
) -> Sources:
    """Return the sources of this process: a cluster, else this machine.

    Args:
        roots: URLs of roots; those of all users if there are none.
        master: value of `spark.master`; by default that of a new session.

    Raises:
        ConfigError: the configuration of the cluster cannot be read.
    """
    from hopsgpu.cluster_managers.manager_table import configured_manager, has_cluster

    def find_roots() -> tuple[Sequence[LakePath], Sequence[str]]:
        return given_roots(roots) if roots else roots_of_users(os.environ)

    if master is None and not has_cluster(environ):
        from hopsgpu.backends.local.machine_gpus import machine_inventory
        from hopsgpu.storage.identity import own_name

        return Sources(lambda: machine_inventory(own_name()), lambda: ({}, ()), find_roots)
    from hopsgpu.backends.gang_queue_root import configured_queues
    from hopsgpu.backends.inventory import Observer
    from hopsgpu.cluster_managers.yarn.manager import YarnManager

    manager = configured_manager(environ, master)
    find_state = None
    if isinstance(manager, YarnManager):
        find_state = manager.resource_manager.application_state
    return Sources(
        Observer(manager).observe,
        configured_queues(environ, manager).read,
        find_roots,
        find_state,
        ManagerPages(manager.application_page, manager.queues_page),
        silent=silent_runs(environ, master),
    )
