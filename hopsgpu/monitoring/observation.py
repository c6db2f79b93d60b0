"""An observation of a cluster: ResourceManager, NodeManagers, queues of gangs, and runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hopsgpu.backends.gang_queue_root import configured_queues
from hopsgpu.backends.inventory import Observer
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuType
from hopsgpu.cluster_managers.manager_table import configured_manager
from hopsgpu.cluster_managers.node_gpu_list import NodeAnswers
from hopsgpu.cluster_managers.snapshot import Overview
from hopsgpu.core.queue_policy import Ticket
from hopsgpu.errors import HopsGpuError
from hopsgpu.monitoring.runs_reader import Roots, RunsReader, RunsView
from hopsgpu.monitoring.timed_sources import Source
from hopsgpu.storage.timed_reads import ReadResult

log = logging.getLogger(__name__)

RESOURCE_MANAGER, NODE_MANAGERS = "resource_manager", "node_managers"
QUEUE, RUNS = "queue", "runs"
SOURCES = (RESOURCE_MANAGER, NODE_MANAGERS, QUEUE, RUNS)

# Prometheus waits 10 s for an answer, by default.
LOOK_SECONDS = 8.0
# Often enough to renew the ticket of a keytab in time.
_SIGN_IN_SECONDS = 1800.0


@dataclass(frozen=True)
class WaitingGang:
    """A gang in the queue of gangs.

    Attributes:
        seconds: how long it has waited, by the NameNode's clock.
    """

    ticket: Ticket
    seconds: float

    @property
    def gpus(self) -> int:
        return self.ticket.executors * self.ticket.gpus


@dataclass(frozen=True)
class WaitingGangs:
    """The gangs that wait, in all partitions.

    Attributes:
        ignored_files: number of files beside the tickets that do not count.
    """

    waiting: tuple[WaitingGang, ...]
    ignored_files: int


@dataclass(frozen=True)
class SourceState:
    """Whether a source answered.

    Attributes:
        problem: why not; or "".
    """

    is_up: bool
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Look:
    """The state of the cluster at one moment; None for a source that did not answer.

    Attributes:
        answering: by node, whether its NodeManager described its GPUs; only of nodes that were
            asked.
    """

    time: float
    sources: Mapping[str, SourceState]
    gpus: ClusterGpus | None = None
    answering: Mapping[str, bool] = field(default_factory=dict)
    queue: WaitingGangs | None = None
    runs: RunsView | None = None


@dataclass(frozen=True)
class _Seen:
    """The GPUs that YARN reports, and whether each NodeManager answered."""

    overview: Overview
    gpus: ClusterGpus
    answering: Mapping[str, bool] = field(default_factory=dict)


class _Cluster:
    """The reads of a cluster manager with one configuration."""

    def __init__(self, environ: Mapping[str, str], master: str | None) -> None:
        manager = configured_manager(environ, master)
        self.observer = Observer(manager)
        self._queues = configured_queues(environ, manager)

    def queue(self) -> WaitingGangs:
        queues, problems = self._queues.read()
        for problem in problems:
            log.debug("a directory beside the queues of gangs is not read: %s", problem)
        return WaitingGangs(
            tuple(
                WaitingGang(ticket, max(now - ticket.filed, 0) / 1000)
                for snapshot, now in queues.values()
                for ticket, _ in snapshot.tickets
            ),
            sum(len(snapshot.ignored) for snapshot, _ in queues.values()),
        )


class Monitor:
    """Observes a cluster; one look at a time.

    Args:
        roots: returns the roots of runs, and why some are unknown.
        on_change: called with a line for each change of a source's state.
        sign_in: gets a new Kerberos ticket if the present one ends soon.
        look_seconds: how long a look takes at most.
        master: value of `spark.master`; by default that of a new session.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        roots: Roots,
        on_change: Callable[[str], None],
        sign_in: Callable[[], None] = lambda: None,
        look_seconds: float = LOOK_SECONDS,
        master: str | None = None,
    ) -> None:
        self._environ = environ
        self._master = master
        self._sign_in = sign_in
        self._signed_in_at = float("-inf")
        self._ticket: Source[bool] = Source("kerberos", on_change)
        self._look_seconds = look_seconds
        self._reads: _Cluster | None = None
        self._making = threading.Lock()
        self._runs = RunsReader(roots)
        self._paths: tuple[str, ...] = ()
        self._types: Mapping[str, tuple[GpuType, ...]] = {}
        self._manager: Source[_Seen] = Source(RESOURCE_MANAGER, on_change)
        self._nodes: Source[_Seen] = Source(NODE_MANAGERS, on_change)
        self._queue: Source[WaitingGangs] = Source(QUEUE, on_change)
        self._records: Source[RunsView] = Source(RUNS, on_change)
        self._on_change = on_change
        self._told: tuple[str, ...] = ()

    def look(self) -> Look:
        """Return what is seen now, within the time limit."""
        began = time.monotonic()
        until = began + self._look_seconds
        self._renew_ticket(began)
        self._manager.ask(self._ask_manager)
        self._queue.ask(lambda: self._cluster().queue())
        # Records name queues by parts of their paths, so the ResourceManager answers first.
        manager = self._manager.answer(began + self._look_seconds / 2)
        seen = manager.value
        if seen is not None:
            self._paths = _paths(seen.overview)
        paths = self._paths
        self._records.ask(lambda: self._runs.look(paths))
        if seen is None:
            nodes = self._nodes.no_answer("not asked, because the ResourceManager does not answer")
        else:
            overview = seen.overview
            self._nodes.ask(lambda: self._ask_nodes(overview))
            nodes = self._nodes.answer(until)
        queue, runs = self._queue.answer(until), self._records.answer(until)
        if runs.value is not None:
            self._report_root_problems(runs.value.problems)
        return Look(
            time=time.time(),
            sources={
                RESOURCE_MANAGER: _state(manager),
                NODE_MANAGERS: _state(nodes),
                QUEUE: _state(queue),
                RUNS: _state(runs),
            },
            gpus=None if seen is None else self._with_types(seen.gpus, nodes.value),
            answering={} if nodes.value is None else nodes.value.answering,
            queue=queue.value,
            runs=runs.value,
        )

    def _with_types(self, gpus: ClusterGpus, nodes: _Seen | None) -> ClusterGpus:
        """Return the GPUs with the types that the NodeManagers reported last.

        If a NodeManager misses one poll, the series of its GPUs must keep their labels.
        """
        types_by_host = (
            {} if nodes is None else {node.host: node.types for node in nodes.gpus.nodes}
        )
        self._types = {
            node.host: types_by_host.get(node.host) or self._types.get(node.host, ())
            for node in gpus.nodes
        }
        typed = (replace(node, types=self._types[node.host]) for node in gpus.nodes)
        return replace(gpus, nodes=tuple(typed))

    def _renew_ticket(self, now: float) -> None:
        if now < self._signed_in_at + _SIGN_IN_SECONDS:
            return
        self._signed_in_at = now

        def sign_in() -> bool:
            self._sign_in()
            return True

        # If the renewal fails, the present ticket may still be valid.
        self._ticket.ask(sign_in)
        self._ticket.answer(now + self._look_seconds / 4)

    def _cluster(self) -> _Cluster:
        # Created at a poll, so that an unreadable configuration is read again at the next poll.
        with self._making:
            if self._reads is None:
                self._reads = _Cluster(self._environ, self._master)
            return self._reads

    def _ask_manager(self) -> _Seen:
        observer = self._cluster().observer
        overview = observer.overview()
        return _Seen(overview, observer.gpus(overview, NodeAnswers({}, {})))

    def _ask_nodes(self, overview: Overview) -> _Seen:
        observer = self._cluster().observer
        answers = observer.devices(overview)
        if answers.problems and not answers.devices:
            raise HopsGpuError(f"none answers: {next(iter(answers.problems.values()))}")
        return _Seen(overview, observer.gpus(overview, answers), _answering(overview, answers))

    def _report_root_problems(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self._told:
                self._on_change(f"{RUNS}: not read: {problem}")
        self._told = problems


def _paths(overview: Overview) -> tuple[str, ...]:
    paths = (queue.path for queues in overview.queues.values() for queue in queues)
    return tuple(dict.fromkeys(paths))


def _state(answer: ReadResult[Any]) -> SourceState:
    return SourceState(answer.value is not None, answer.seconds, answer.problem)


def _answering(overview: Overview, answers: NodeAnswers) -> Mapping[str, bool]:
    return {
        node.host: node.id in answers.devices
        for node in overview.nodes
        if node.id in answers.devices or node.id in answers.problems
    }
