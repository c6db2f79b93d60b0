"""The cluster's GPUs as tables for people."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hopsgpu.cli.tables import Cell, Row, TableLayout, align, headers
from hopsgpu.cluster_managers.standalone.master_url import GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.gpu_resource import SETTING
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from rich.text import Text

    from hopsgpu.cluster_managers.cluster_gpus import (
        ClusterGpus,
        GpuNode,
        GpuQueue,
        GpuType,
        GpuUser,
    )

_GOOD, _BAD, _CARE, _FAINT = "green", "red", "yellow", "dim"
_LAYOUT = TableLayout(
    right=("FREE", "USED", "TOTAL", "GPUS", "FOR", "GUARANTEED", "MAXIMUM", "PENDING", "MEMORY"),
    least={
        **{"NODE": 12, "STATE": 7, "TYPE": 10, "LABEL": 5, "USER": 5, "QUEUE": 12, "NODES": 10},
        **{"NAME": 6, "COULD GET": 10},
    },
    dropped_first=(
        *("DRIVER", "NODES", "MEMORY", "NAME", "TYPE", "PENDING", "GUARANTEED", "MAXIMUM"),
        "LABEL",
    ),
    cut_in_front=("NODE", "QUEUE"),
)


def tables(cluster: ClusterGpus, encoding: str, width: int | None = None) -> Text:
    """Return tables of what is free, who uses the rest, and what the user could get.

    Args:
        width: width of the terminal. Each row of a table is a line that fits: names are shortened
            and cut, and columns left out. With None, the tables are complete, and only the last
            column of a table contains spaces.

    Returns:
        Lines; those that are not rows may be wrapped at the terminal's width.
    """
    from rich.text import Text

    parts = [[[cell] for cell in _summary(cluster)]]
    shown = cluster if width is None else _shorten(cluster)
    if shown.nodes:
        parts.append(_nodes(shown.nodes))
    if shown.users:
        parts.append(_users(shown.users, shown.time))
    if cluster.queues:
        # The root queue only repeats the sums of the nodes.
        below = [queue for queue in cluster.queues if queue.leaf or queue.path != "root"]
        parts.append(_queues(below))
        parts[-1].append(
            [
                (
                    f"COULD GET: in executors of {cluster.executor}, if only you request GPUs",
                    _FAINT,
                )
            ]
        )
    parts.append([[cell] for cell in _remarks(cluster)])
    blocks = [Text("\n").join(align(part, _LAYOUT, encoding, width)) for part in parts if part]
    return Text("\n\n").join(blocks)


def _shorten(cluster: ClusterGpus) -> ClusterGpus:
    """Return the same without the common parts of hosts, products and applications."""
    firsts = Counter(node.host.partition(".")[0] for node in cluster.nodes)

    def short(host: str) -> str:
        first = host.partition(".")[0]
        # An address stays whole, and so does a host that only its domain distinguishes.
        return first if firsts[first] == 1 and not first.isdigit() else host

    def product(kind: GpuType) -> GpuType:
        return replace(kind, name=kind.name.removeprefix("NVIDIA "))

    return replace(
        cluster,
        nodes=tuple(
            replace(node, host=short(node.host), types=tuple(map(product, node.types)))
            for node in cluster.nodes
        ),
        users=tuple(
            replace(
                user,
                id=user.id.removeprefix("application_"),
                hosts={short(host): gpus for host, gpus in user.hosts.items()},
            )
            for user in cluster.users
        ),
    )


def _summary(cluster: ClusterGpus) -> Iterator[Cell]:
    if not cluster.nodes:
        running = count_of(cluster.nodes_without, "node") + " running"
        if cluster.resource == GPU_RESOURCE:
            text = f"no worker has GPUs ({running}): to offer them, workers need"
            of_worker = f"spark.worker.resource.{GPU_RESOURCE}"
            yield f"{text} {of_worker}.amount and {of_worker}.discoveryScript", _CARE
        elif cluster.resource in ("", DEFAULT_GPU_RESOURCE):
            text = f"no node of this YARN has GPUs ({running}): to offer them, NodeManagers need"
            yield f"{text} yarn.nodemanager.resource-plugins={DEFAULT_GPU_RESOURCE}", _CARE
        else:
            text = f"no node of this YARN has {cluster.resource} ({running})"
            yield f"{text}, which {SETTING} names as the resource that counts GPUs", _CARE
        return
    broken = f", {cluster.unhealthy} unhealthy" if cluster.unhealthy else ""
    when = time.strftime("%H:%M:%S", time.localtime(cluster.time))
    yield (
        f"{cluster.free} of {count_of(cluster.total, 'GPU')} free, {cluster.used} used{broken}"
        f" ({when})",
        _GOOD if cluster.free else _CARE,
    )
    best = max(
        (queue for queue in cluster.queues if queue.obtainable is not None),
        key=lambda queue: queue.obtainable or 0,
        default=None,
    )
    if best is not None:
        where = f" in queue {best.path}{_with_labels(best)}" if best.obtainable else ""
        yield f"{cluster.user} could get {best.obtainable} now{where}", "bold"


def _nodes(nodes: Sequence[GpuNode]) -> list[Row]:
    labels = any(node.label for node in nodes)
    before = ["NODE", "STATE", "FREE", "USED", "TOTAL", "MEMORY", "DRIVER"]
    rows = [
        [
            (node.host, ""),
            (node.state, "" if node.state == "RUNNING" else _BAD),
            (str(node.free), _GOOD if node.free else _FAINT),
            (str(node.used), ""),
            (str(node.total), ""),
            (",".join(_memory(gpu_type.memory_mib) for gpu_type in node.types) or "-", ""),
            (node.driver or "-", ""),
            *([(node.label or "-", "")] if labels else []),
            (_names(node), ""),
        ]
        for node in nodes
    ]
    return [headers(*before, *(["LABEL"] if labels else []), "TYPE"), *rows]


def _names(node: GpuNode) -> str:
    if len(node.types) == 1 and not node.types[0].parents:
        return node.types[0].name or "-"
    return ", ".join(map(str, node.types)) or "-"


def _memory(mib: int | None) -> str:
    return "-" if mib is None else f"{mib / 1024:.3g}GiB"


def _users(users: Sequence[GpuUser], now: float) -> list[Row]:
    columns = ["GPUS", "USER", "FOR", "APPLICATION", "QUEUE", "NODES", "NAME"]
    rows = [
        [
            (str(user.gpus), ""),
            (user.user or "-", "bold"),
            (_duration(user, now), ""),
            (user.id, ""),
            (user.queue or "-", ""),
            (",".join(f"{host}:{n}" for host, n in user.hosts.items()) or "-", ""),
            (user.name or "-", ""),
        ]
        for user in users
    ]
    return [headers(*columns), *rows]


def _duration(user: GpuUser, now: float) -> str:
    """Return how long a user has had GPUs; at most the application's age if that is unknown."""
    since = user.since or user.started
    if not since:
        return "-"
    seconds = max(int(now - since), 0)
    (days, hours), (minutes, rest) = divmod(seconds // 3600, 24), divmod(seconds % 3600, 60)
    text = (
        f"{days}d{hours:02}h"
        if days
        else f"{hours}h{minutes:02}m"
        if hours
        else f"{minutes}m{rest:02}s"
    )
    return text if user.since else f"≤{text}"


def _queues(queues: Sequence[GpuQueue]) -> list[Row]:
    labels = any(queue.label for queue in queues)
    columns = ["QUEUE", *(["LABEL"] if labels else [])]
    rows = [
        [
            (queue.path, "" if queue.leaf else _FAINT),
            *([(queue.label or "-", "")] if labels else []),
            (str(queue.guaranteed), ""),
            (str(queue.maximum), ""),
            (str(queue.used), ""),
            ("-" if queue.pending is None else str(queue.pending), _CARE if queue.pending else ""),
            (_obtainable(queue, queues), _GOOD if queue.obtainable else _FAINT),
        ]
        for queue in queues
    ]
    return [headers(*columns, "GUARANTEED", "MAXIMUM", "USED", "PENDING", "COULD GET"), *rows]


def _with_labels(queue: GpuQueue) -> str:
    return f" (label {queue.label})" if queue.label else ""


def _obtainable(queue: GpuQueue, queues: Sequence[GpuQueue]) -> str:
    if queue.obtainable is None:
        return "-"
    bounding = (q for q in queues if (q.path, q.label) == (queue.bound_queue, queue.label))
    # The maximum also bounds cores and memory, which the table does not show.
    has_gpus = any(q.used + queue.obtainable < q.maximum for q in bounding)
    bounds = {
        "nodes": "room on nodes" if queue.obtainable else "no room on nodes",
        "queue": f"{'cores or memory' if has_gpus else 'maximum'} of {queue.bound_queue}",
        "user": f"user limit in {queue.bound_queue}",
        "container": "an executor is larger than its largest container",
        "state": f"it is {queue.state}",
    }
    return f"{queue.obtainable} ({bounds[queue.bound]})"


def _remarks(cluster: ClusterGpus) -> Iterator[Cell]:
    if cluster.unexplained:
        used = "1 GPU is" if cluster.unexplained == 1 else f"{cluster.unexplained} GPUs are"
        who = "applications that are not shown to the caller, or that have just ended"
        yield f"{used} in use by {who}", ""
    if cluster.queues and cluster.acls is not False:
        what = "queues have ACLs" if cluster.acls else "YARN does not say whether queues have ACLs"
        yield f"{what}; only administrators can see who may submit where", ""
    for node in cluster.nodes:
        if node.health:
            yield f"{node.host} is {node.state}: {node.health}", _BAD
    for problem in cluster.problems:
        yield problem, _CARE
