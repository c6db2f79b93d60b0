"""The metrics, and what an observation makes of them: pure functions of values.

Names and units follow Prometheus' conventions. Labels have a bounded number of values: users and
queues beyond a bound are "other", and only active runs have series of their own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode
from hopsgpu.core.gang import GangState
from hopsgpu.core.queue_policy import Bound, queue_tag
from hopsgpu.monitoring.labels import OTHER, clean
from hopsgpu.monitoring.observation import Look
from hopsgpu.monitoring.run_totals import Histogram
from hopsgpu.monitoring.runs_reader import LiveRun
from hopsgpu.units import MIB

if TYPE_CHECKING:
    from prometheus_client import Metric

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

# Bounds of the series of runs, of their GPUs, of users and of queues.
_MAX_RUNS = 2000
_MAX_READINGS = 16_384
_MAX_USERS = 200
_MAX_QUEUES = 200

_LOST = "lost"
_UNKNOWN = "unknown"
# Values of the labels of gangs that wait.
_START, _GROWTH = "start", "growth"
_QUEUED, _ACQUIRING = "queued", "acquiring"

Labels = tuple[str, ...]
Values = Mapping[Labels, float]


@dataclass(frozen=True)
class MetricInfo:
    """A metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def _metric(name: str, labels: str, text: str, kind: str = GAUGE) -> MetricInfo:
    return MetricInfo(name, kind, tuple(labels.split()), text)


UP = _metric(
    "hopsgpu_up",
    "source",
    "Whether a source answered (1) or not (0): resource_manager, node_managers, queue, runs.",
)
LOOK_SECONDS = _metric(
    "hopsgpu_look_seconds", "source", "How long the source took, or was waited for."
)
GPUS = _metric(
    "hopsgpu_gpus",
    "node type label queue state",
    "GPUs of YARN's nodes, each in one state: used (with its application's queue), held_aside"
    " (by a gang that waits, and that cannot use it), free, unhealthy (its node is), or"
    " unavailable (its node takes no containers).",
)
GPU_MEMORY = _metric(
    "hopsgpu_gpu_memory_bytes", "node type", "Memory of a GPU, or of a MIG device, of this type."
)
MIG_PARENTS = _metric(
    "hopsgpu_mig_parent_gpus", "node type", "GPUs of which the MIG devices of this type are slices."
)
NODE_MANAGER_UP = _metric(
    "hopsgpu_node_manager_up", "node", "Whether the NodeManager of a node with GPUs describes them."
)
USER_GPUS = _metric(
    "hopsgpu_user_gpus",
    "user queue",
    "GPUs that a user's applications have, whether they use hopsgpu or not.",
)
QUEUE_USED = _metric(
    "hopsgpu_queue_gpus_used",
    "queue label",
    "GPUs that the applications in a leaf queue have, or that are reserved for them.",
)
QUEUE_PENDING = _metric(
    "hopsgpu_queue_gpus_pending",
    "queue label",
    "GPUs that the applications in a leaf queue ask YARN for and do not have.",
)
QUEUE_GUARANTEED = _metric(
    "hopsgpu_queue_gpus_guaranteed", "queue label", "GPUs that a leaf queue is guaranteed."
)
QUEUE_MAXIMUM = _metric(
    "hopsgpu_queue_gpus_maximum", "queue label", "GPUs that a leaf queue may have."
)
WAITING_GANGS = _metric(
    "hopsgpu_waiting_gangs",
    "queue kind bound state",
    "Gangs that wait for executors, by state: queued (in the queue of gangs) or acquiring (YARN is"
    " asked, or their executors start); by kind (start; growth of one that runs, counted only while"
    " queued); and by what keeps queued ones waiting: none (their turn), cluster, nodes, queue or"
    " user (their limits).",
)
WAITING_GPUS = _metric(
    "hopsgpu_waiting_gang_gpus", "queue kind bound state", "GPUs that these gangs wait for."
)
WAITING_OLDEST = _metric(
    "hopsgpu_waiting_gang_oldest_seconds",
    "queue kind bound state",
    "How long the first of these gangs has waited; 0 if there is none.",
)
IGNORED_QUEUE_FILES = _metric(
    "hopsgpu_ignored_queue_files",
    "",
    "Files in the directories of the queues of gangs that do not count: their names are none that"
    " hopsgpu writes, they are dated in the future, or their user has too many.",
)
RUNS = _metric(
    "hopsgpu_runs",
    "queue state",
    "Runs that have not ended, by state; lost for an hour if the driver ended without a word.",
)
RUN_WAITING = _metric(
    "hopsgpu_run_waiting_seconds", "run user queue", "How long a run has waited for its executors."
)
RUN_UNSAVED = _metric(
    "hopsgpu_run_unsaved_seconds",
    "run user queue",
    "For how long a run that trains on GPUs has saved no checkpoint, since its start if it"
    " never did. Searches and scores have none.",
)
SCORE_ROWS = _metric(
    "hopsgpu_score_rows",
    "run user queue state",
    "Rows of an active score, by state: scored (they are on the lake), left.",
)
SCORE_FAILED = _metric(
    "hopsgpu_score_failed_parts",
    "run user queue",
    "Failed parts of an active score, which its output lacks.",
)
GPU_UTILISATION = _metric(
    "hopsgpu_gpu_utilisation_ratio",
    "run rank node gpu",
    "Share of the last sample's period in which a kernel ran on a GPU of a run that trains.",
)
GPU_MEMORY_USED = _metric(
    "hopsgpu_gpu_memory_used_bytes",
    "run rank node gpu",
    "Memory in use on a GPU of a run that trains.",
)
GPU_MEMORY_SIZE = _metric(
    "hopsgpu_gpu_memory_size_bytes", "run rank node gpu", "Memory of a GPU of a run that trains."
)
GPU_POWER = _metric(
    "hopsgpu_gpu_power_watts", "run rank node gpu", "Power that a GPU of a run that trains draws."
)
GPU_SECONDS = _metric(
    "hopsgpu_gpu_seconds_total",
    "user queue kind",
    "GPU seconds held by runs, and by held gangs between them, by what was done with them:"
    " training, publishing, idle.",
    kind=COUNTER,
)
ENDED_GPU_SECONDS = _metric(
    "hopsgpu_ended_gpu_seconds_total",
    "user queue state kind",
    "GPU seconds of runs that ended, counted at their end, by state: succeeded, failed,"
    " cancelled, lost.",
    kind=COUNTER,
)
WAITED_GPU_SECONDS = _metric(
    "hopsgpu_waited_gpu_seconds_total",
    "user queue",
    "Seconds in which runs waited for their executors, times the GPUs without which they could"
    " not start.",
    kind=COUNTER,
)
RUN_ENDS = _metric(
    "hopsgpu_run_ends_total", "queue reason", "Runs that ended, by reason.", kind=COUNTER
)
WAITING_TIME = _metric(
    "hopsgpu_waiting_seconds",
    "queue",
    "How long runs that ended had waited for their gang; those that never had it are left out.",
    kind=HISTOGRAM,
)
STARTING_TIME = _metric(
    "hopsgpu_starting_seconds",
    "queue",
    "How long the ranks of runs that ended took to start, until the function ran in all of them.",
    kind=HISTOGRAM,
)
RELEASE_TIME = _metric(
    "hopsgpu_release_seconds",
    "queue",
    "How long it took, after training and publishing, until the ResourceManager showed that the"
    " GPUs of a run were released.",
    kind=HISTOGRAM,
)
UNREADABLE_RECORDS = _metric(
    "hopsgpu_unreadable_records", "", "Directories of runs whose records cannot be read."
)
UNREADABLE_ROOTS = _metric(
    "hopsgpu_unreadable_roots", "", "Directories of users' runs and models that cannot be read."
)
RUNS_WITHOUT_SERIES = _metric(
    "hopsgpu_runs_without_series",
    "",
    "Active runs without series of their own, because too many others have some.",
)

METRICS = tuple(value for value in vars().values() if isinstance(value, MetricInfo))


def families(look: Look) -> Iterator[Metric]:
    """Yield the metric families of an observation.

    A source without an answer has no families, so that no alert fires on old values.
    """
    states = look.sources.items()
    yield _family(UP, {(name,): float(state.is_up) for name, state in states})
    yield _family(LOOK_SECONDS, {(name,): state.seconds for name, state in states})
    queues = () if look.gpus is None else look.gpus.queues
    paths = [queue.path for queue in queues]
    # The gauges of these queues are 0 if nothing waits or runs: a query cannot tell a series that
    # is missing from an exporter that does not answer.
    leaves = [*dict.fromkeys(clean(queue.path) for queue in queues if queue.leaf)][:_MAX_QUEUES]
    if look.gpus is not None:
        yield from _of_cluster(look.gpus, _aside(look))
    if look.answering:
        nodes = look.answering.items()
        yield _family(NODE_MANAGER_UP, {(clean(host),): float(is_up) for host, is_up in nodes})
    if look.queue is not None:
        yield from _of_waiting([*_waiting_gangs(look, paths)], leaves)
        yield _family(IGNORED_QUEUE_FILES, {(): float(look.queue.ignored_files)})
    if look.runs is not None:
        yield from _of_runs(look, leaves)


def _family(info: MetricInfo, values: Values) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if info.kind == COUNTER else GaugeMetricFamily
    family = kind(info.name, info.text, labels=info.labels)
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family


def _histograms(info: MetricInfo, values: Mapping[Labels, Histogram]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(info.name, info.text, labels=info.labels)
    for labels, histogram in sorted(values.items()):
        counts = [sum(histogram.counts[: n + 1]) for n in range(len(histogram.counts))]
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.total)
    return family


def _add_up(pairs: Iterable[tuple[Labels, float]]) -> Values:
    """Return the sums, because names of others may be the same once they are cleaned."""
    sums: Counter[Labels] = Counter()
    for labels, value in pairs:
        sums[labels] += value  # type: ignore[assignment]
    return sums


def _largest(pairs: Iterable[tuple[Labels, float]]) -> Values:
    values: dict[Labels, float] = {}
    for labels, value in pairs:
        values[labels] = max(value, values.get(labels, value))
    return values


def _frequent(names: Iterable[str], most: int) -> Callable[[str], str]:
    """Return a function that gives the most frequent names as they are, and others as "other"."""
    shown = {name for name, _ in Counter(names).most_common(most)}
    return lambda name: name if name in shown else OTHER


def _aside(look: Look) -> Mapping[str, int]:
    """Return the number of GPUs of parked executors, by host."""
    aside: Counter[str] = Counter()
    for run in look.runs.live if look.runs is not None else ():
        if run.state != _LOST:
            aside.update(run.digest.aside)
    return aside


def _of_cluster(gpus: ClusterGpus, aside: Mapping[str, int]) -> Iterator[Metric]:
    queues: dict[str, Counter[str]] = {}
    for user in gpus.users:
        for host, count in user.hosts.items():
            queues.setdefault(host, Counter())[user.queue] += count
    yield _family(
        GPUS,
        _add_up(
            pair
            for node in gpus.nodes
            for pair in _of_node(node, queues.get(node.host, Counter()), aside.get(node.host, 0))
        ),
    )
    types = [(node, kind) for node in gpus.nodes for kind in node.types]
    yield _family(
        GPU_MEMORY,
        {
            (clean(node.host), clean(kind.name)): kind.memory_mib * float(MIB)
            for node, kind in types
            if kind.memory_mib is not None
        },
    )
    yield _family(
        MIG_PARENTS,
        {
            (clean(node.host), clean(kind.name)): float(kind.parents)
            for node, kind in types
            if kind.parents
        },
    )
    yield _family(USER_GPUS, _of_users(gpus))
    leaves = [queue for queue in gpus.queues if queue.leaf]
    numbers: Sequence[tuple[MetricInfo, Callable[..., int | None]]] = (
        (QUEUE_USED, lambda queue: queue.used),
        (QUEUE_PENDING, lambda queue: queue.pending),
        (QUEUE_GUARANTEED, lambda queue: queue.guaranteed),
        (QUEUE_MAXIMUM, lambda queue: queue.maximum),
    )
    for info, number in numbers:
        yield _family(
            info,
            _add_up(
                ((clean(queue.path), clean(queue.label)), float(value))
                for queue in leaves
                if (value := number(queue)) is not None
            ),
        )


def _of_node(
    node: GpuNode, queues: Mapping[str, int], aside: int
) -> Iterator[tuple[Labels, float]]:
    """Yield the GPUs of a node, each of which is in one state."""
    kind = clean(" + ".join(gpu_type.name for gpu_type in node.types))

    def pair(state: str, count: int, queue: str = "") -> tuple[Labels, float]:
        labels = (clean(node.host), kind, clean(node.label), clean(queue), state)
        return labels, float(count)

    aside = min(aside, node.used)
    unassigned = node.used - aside
    yield pair("held_aside", aside)
    for queue, count in sorted(queues.items(), key=lambda item: (-item[1], item[0])):
        # YARN reports applications and nodes at different moments.
        shown = min(count, unassigned)
        if shown:
            yield pair("used", shown, queue)
        unassigned -= shown
    yield pair("used", unassigned)
    yield pair("free", node.free)
    yield pair("unhealthy", node.unhealthy)
    yield pair("unavailable", max(node.total - node.used - node.free - node.unhealthy, 0))


def _of_users(gpus: ClusterGpus) -> Values:
    # Those with the most GPUs come first.
    users = _frequent((clean(user.user) for user in gpus.users), _MAX_USERS)
    return _add_up(
        ((users(clean(user.user)), clean(user.queue)), float(user.gpus)) for user in gpus.users
    )


@dataclass(frozen=True)
class _GangSample:
    """A gang that waits for its executors; `labels` are those of the metrics of such gangs."""

    labels: Labels
    gpus: int
    seconds: float


def _waiting_gangs(look: Look, paths: Sequence[str]) -> Iterator[_GangSample]:
    """Yield the gangs in the queue of gangs, and those of waiting runs that are not in it.

    A gang has no ticket while it asks YARN and while its executors start.
    """
    names = {queue_tag(path): path for path in paths}
    tickets: Counter[str] = Counter()
    for gang in () if look.queue is None else look.queue.waiting:
        ticket = gang.ticket
        # A ticket has only a digest of the queue's path.
        queue = clean(names.get(ticket.queue, _UNKNOWN))
        kind = _GROWTH if ticket.is_growth else _START
        yield _GangSample((queue, kind, ticket.bound.value, _QUEUED), gang.gpus, gang.seconds)
        tickets[ticket.application] += not ticket.is_growth
    waiting = [
        (waited, run)
        for run in (() if look.runs is None else look.runs.live)
        # On a local master a run has no queue, and waits for no executor.
        if run.queue and (waited := _seconds_waiting(run, look.time)) is not None
    ]
    # A ticket does not name its run: the first of an application's runs is taken for the one that
    # has left the queue.
    for waited, run in sorted(waiting, key=lambda pair: pair[0]):
        if tickets[run.digest.application]:
            tickets[run.digest.application] -= 1
        else:
            queue = clean(run.queue) if run.queue in names.values() else _UNKNOWN
            labels = (queue, _START, Bound.NONE.value, _ACQUIRING)
            yield _GangSample(labels, run.digest.gpus, waited)


def _seconds_waiting(run: LiveRun, now: float) -> float | None:
    """Return how long a run has waited for its executors; None if it does not."""
    since = run.digest.waits_since
    return None if since is None or run.state == _LOST else max(now - since, 0.0)


def _of_waiting(gangs: Sequence[_GangSample], leaves: Sequence[str]) -> Iterator[Metric]:
    zeros: list[Labels] = [
        (queue, *labels)
        for queue in leaves
        for labels in (
            (_START, Bound.NONE.value, _ACQUIRING),
            *((kind, bound.value, _QUEUED) for kind in (_START, _GROWTH) for bound in Bound),
        )
    ]
    none: Values = dict.fromkeys(zeros, 0.0)
    yield _family(WAITING_GANGS, {**none, **_add_up((gang.labels, 1.0) for gang in gangs)})
    gpus = _add_up((gang.labels, float(gang.gpus)) for gang in gangs)
    yield _family(WAITING_GPUS, {**none, **gpus})
    oldest = _largest((gang.labels, gang.seconds) for gang in gangs)
    yield _family(WAITING_OLDEST, {**none, **oldest})


def _of_runs(look: Look, leaves: Sequence[str]) -> Iterator[Metric]:
    assert look.runs is not None, "the caller checked it"
    view, now = look.runs, look.time
    shown = view.live[:_MAX_RUNS]
    queues = _frequent((clean(run.queue) for run in view.live), _MAX_QUEUES)
    states = [*(state.value for state in GangState if not state.is_terminal), _LOST]
    none: Values = {(queue, state): 0.0 for queue in leaves for state in states}
    runs = _add_up(((queues(clean(run.queue)), run.state), 1.0) for run in view.live)
    yield _family(RUNS, {**none, **runs})
    yield _family(
        RUN_WAITING,
        _largest(
            (_run_labels(run), waited)
            for run in shown
            if (waited := _seconds_waiting(run, now)) is not None
        ),
    )
    yield _family(
        RUN_UNSAVED,
        _largest(
            (_run_labels(run), max(now - max(run.digest.trains_since, run.saved or 0.0), 0.0))
            for run in shown
            if run.digest.trains_since is not None and run.digest.gpus and run.state != _LOST
        ),
    )
    yield from _of_scores(shown)
    yield from _of_readings(shown)
    totals = view.totals
    yield _family(GPU_SECONDS, totals.gpu_seconds)
    yield _family(ENDED_GPU_SECONDS, totals.ended_gpu_seconds)
    yield _family(WAITED_GPU_SECONDS, totals.waited)
    yield _family(RUN_ENDS, totals.ends)
    yield _histograms(WAITING_TIME, totals.waiting)
    yield _histograms(STARTING_TIME, totals.starting)
    yield _histograms(RELEASE_TIME, totals.release)
    yield _family(UNREADABLE_RECORDS, {(): float(view.unreadable_records)})
    yield _family(UNREADABLE_ROOTS, {(): float(view.unreadable_roots)})
    yield _family(RUNS_WITHOUT_SERIES, {(): float(len(view.live) - len(shown))})


def _of_scores(shown: Sequence[LiveRun]) -> Iterator[Metric]:
    scores = [(_run_labels(run), run.digest.score) for run in shown if run.state != _LOST]
    rows: list[tuple[Labels, float]] = []
    for labels, score in scores:
        if score is not None:
            rows.append(((*labels, "scored"), float(score.scored)))
            rows.append(((*labels, "left"), float(score.rows_left)))
    yield _family(SCORE_ROWS, _largest(rows))
    failed = ((labels, float(score.failed_parts)) for labels, score in scores if score is not None)
    yield _family(SCORE_FAILED, _largest(failed))


def _run_labels(run: LiveRun) -> Labels:
    return clean(run.digest.run_id), clean(run.digest.user), clean(run.queue)


def _of_readings(runs: Sequence[LiveRun]) -> Iterator[Metric]:
    every = (
        (
            (clean(run.digest.run_id), str(reading.rank), clean(reading.host), clean(reading.gpu)),
            reading,
        )
        for run in runs
        if run.state != _LOST
        for reading in run.digest.readings
    )
    readings = list(itertools.islice(every, _MAX_READINGS))
    for info, name in (
        (GPU_UTILISATION, "utilisation"),
        (GPU_MEMORY_USED, "memory_used"),
        (GPU_MEMORY_SIZE, "memory_total"),
        (GPU_POWER, "power"),
    ):
        yield _family(
            info,
            _largest(
                (labels, value)
                for labels, reading in readings
                if (value := getattr(reading, name)) is not None
            ),
        )
