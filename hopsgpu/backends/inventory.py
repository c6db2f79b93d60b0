"""The cluster's GPUs: where they are, who has them, and what a user could get.

This module uses only the REST interfaces of the ResourceManager and the NodeManagers, without Spark
or a JVM.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hopsgpu.cluster_managers.capacity import cores_per_gpu
from hopsgpu.cluster_managers.cluster_gpus import (
    ClusterGpus,
    GpuNode,
    GpuQueue,
    GpuType,
    GpuUser,
    types_of,
)
from hopsgpu.cluster_managers.demand import container_of
from hopsgpu.cluster_managers.local_masters import is_local
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.manager_table import configured_manager, default_master, required_kind
from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeAnswers
from hopsgpu.cluster_managers.resources import NOTHING, Amount, total
from hopsgpu.cluster_managers.shortage import obtainable
from hopsgpu.cluster_managers.snapshot import App, Container, Node, Overview, Queue, Snapshot
from hopsgpu.cluster_managers.yarn.queues import queue_path
from hopsgpu.core.boundary import public
from hopsgpu.core.gpu_names import is_slice
from hopsgpu.core.queue_policy import Bound
from hopsgpu.core.spec import GangSpec, shape_of
from hopsgpu.errors import ConfigError
from hopsgpu.storage.identity import own_name

_GONE = ("LOST", "REBOOTED", "SHUTDOWN")
_BROKEN = ("UNHEALTHY", *_GONE)
_BOUNDS = {Bound.QUEUE: "queue", Bound.USER: "user"}
_HOSTS_SHOWN = 4


class Observer:
    """Observes a cluster's GPUs repeatedly; constant facts are requested once.

    Args:
        user: the user to report for; by default the caller, as the cluster manager knows it.
    """

    def __init__(self, manager: ClusterManager, user: str | None = None) -> None:
        _check_user(user)
        self._manager = manager
        self._user = user

    def observe(self) -> ClusterGpus:
        """Return the present state of the GPUs.

        Raises:
            HopsGpuError: the cluster manager does not answer, or refuses the caller.
        """
        overview = self.overview()
        return self.gpus(overview, self.devices(overview))

    def overview(self) -> Overview:
        if self._user is None:
            self._user = self._manager.caller()
        return self._manager.overview(self._user)

    def devices(self, overview: Overview) -> NodeAnswers:
        nodes = [node for node in overview.nodes if node.total.gpus and node.state not in _GONE]
        return self._manager.devices(nodes)

    def gpus(self, overview: Overview, answers: NodeAnswers) -> ClusterGpus:
        observed = cluster_gpus(overview, answers, self._user or "", time.time())
        return replace(observed, resource=self._manager.gpu_resource)


@public
def inventory(*, user: str | None = None) -> ClusterGpus:
    """Return the cluster's GPUs: where they are, who uses them, and how many are free.

    The cluster is that of the active session, or else of a new one: `spark.master` of
    spark-defaults.conf, or YARN with HADOOP_CONF_DIR. If this session has a local master, the
    result is this machine: one node (none without GPUs), no users and no queues. GPUs that gangs
    have leased are then the used ones.

    Args:
        user: the user whose obtainable GPUs are reported; by default the caller.

    Returns:
        Nodes, users, queues and sums. A NodeManager that does not answer is listed in `problems`,
        and its node has no types.

    Raises:
        ConfigError: the master is YARN, and HADOOP_CONF_DIR is not set or has no yarn-site.xml; or
            Kerberos is required, and `hopsgpu[kerberos]` is not installed; or `user` is not a name.
        DiscoveryError: this machine's GPUs cannot be listed.
        HopsGpuError: the ResourceManager does not answer, or rejects the caller.
    """
    if _is_local():
        from hopsgpu.backends.local.machine_gpus import machine_inventory

        _check_user(user)
        return machine_inventory(user or own_name())
    context = _active_context()
    if context is None:
        manager = configured_manager(os.environ)
    else:
        properties = dict(context.getConf().getAll())
        manager = required_kind(context.master).connect(properties, os.environ)
    return Observer(manager, user).observe()


def _active_context() -> Any:
    """Return the active SparkContext, or None: a process without pyspark has none."""
    pyspark = sys.modules.get("pyspark")
    return None if pyspark is None else pyspark.SparkContext._active_spark_context


def _is_local() -> bool:
    context = _active_context()
    return is_local(context.master if context is not None else default_master({}, os.environ))


def _check_user(user: object) -> None:
    if user is not None and not (isinstance(user, str) and user.strip()):
        raise ConfigError(f"user={user!r}: must be the name of a user, or None for yourself")


def cluster_gpus(overview: Overview, answers: NodeAnswers, user: str, now: float) -> ClusterGpus:
    """Return the GPUs as the answers of the cluster manager show them to a user. Pure."""
    nodes = sorted(_without_removed(overview.nodes), key=lambda node: _natural_key(node.host))
    has_gpus = [node for node in nodes if node.total.gpus]
    used = total(node.used for node in has_gpus)
    shown = total(app.used for app in overview.applications)
    executor = container_of(shape_of(GangSpec(name="gpus"), cores_per_gpu(overview.nodes)))
    return ClusterGpus(
        time=now,
        user=user,
        nodes=tuple(_node(node, answers) for node in has_gpus),
        nodes_without=sum(node.state == "RUNNING" and not node.total.gpus for node in nodes),
        users=_users(overview),
        queues=tuple(
            queue for label in overview.queues for queue in _queues(overview, label, executor)
        ),
        unexplained=max((used - shown).gpus, 0),
        acls=overview.acls,
        obtainable_without_queues=_obtainable_without_queues(overview, executor),
        executor=str(executor),
        problems=(*overview.problems, *_problems(has_gpus, answers)),
    )


def _without_removed(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes, except those that were decommissioned, or replaced by a restart."""
    # A NodeManager that restarts on another port appears as a new node next to a LOST one.
    alive = {node.host for node in nodes if node.state not in _GONE}
    return [
        node
        for node in nodes
        if node.state != "DECOMMISSIONED" and not (node.state in _GONE and node.host in alive)
    ]


def _natural_key(host: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node2 before node10."""
    return [
        (int(part or 0), "") if i % 2 else (0, part)
        for i, part in enumerate(re.split(r"(\d+)", host))
    ]


def _node(node: Node, answers: NodeAnswers) -> GpuNode:
    devices = answers.devices.get(node.id)
    gpus, used = node.total.gpus, min(node.used.gpus, node.total.gpus)
    return GpuNode(
        host=node.host,
        state=node.state,
        label=node.partition,
        types=_types(devices) if devices else (),
        driver=devices.driver if devices else "",
        total=gpus,
        used=used,
        free=gpus - used if node.state == "RUNNING" else 0,
        unhealthy=gpus - used if node.state in _BROKEN else 0,
        health=node.health,
    )


def _types(devices: Devices) -> tuple[GpuType, ...]:
    return types_of(
        (gpu.name, gpu.memory_mib, gpu.minor if is_slice(gpu.name) else None)
        for gpu in devices.gpus
    )


def _users(overview: Overview) -> tuple[GpuUser, ...]:
    hosts = {node.id: node.host for node in overview.nodes}
    # Hadoop before 3.4 has the last part of the path alone.
    paths = sorted({queue.path for listed in overview.queues.values() for queue in listed})
    with_gpus = [
        replace(app, queue=queue_path(app.queue, paths))
        for app in overview.applications
        if app.used.gpus
    ]
    with_gpus.sort(key=lambda app: (-app.used.gpus, app.id))
    return tuple(_user(app, overview.containers.get(app.id, ()), hosts) for app in with_gpus)


def _user(app: App, containers: Sequence[Container], hosts: dict[str, str]) -> GpuUser:
    has_gpus = [container for container in containers if container.size.gpus]
    on: Counter[str] = Counter()
    for container in has_gpus:
        if container.node:  # YARN may hide the node
            on[hosts.get(container.node, container.node)] += container.size.gpus
    return GpuUser(
        id=app.id,
        name=app.name,
        user=app.user,
        queue=app.queue,
        gpus=app.used.gpus,
        since=min((c.granted for c in has_gpus if c.granted), default=None),
        started=app.started,
        hosts=dict(sorted(on.items(), key=lambda item: _natural_key(item[0]))),
    )


def _queues(overview: Overview, label: str, executor: Amount) -> Iterable[GpuQueue]:
    queues = overview.queues[label]
    inside = total(n.total for n in overview.nodes if n.state == "RUNNING" and n.partition == label)
    states = {queue.path: queue.state for queue in queues}
    user_snapshots = {
        snapshot.queues[0].path: snapshot for snapshot in overview.user_snapshots[label]
    }
    rooms = _QueueCapacity(overview.user_snapshots[label], executor)
    for queue in queues:
        asked = queue.pending.gpus if queue.pending is not None else None
        if not (queue.maximum.gpus or queue.used.gpus or asked):
            continue
        state = _state(queue, states)
        gpus, bound, whose = rooms.obtainable(user_snapshots.get(queue.path), state)
        yield GpuQueue(
            path=queue.path,
            label=label,
            state=state,
            leaf=queue.is_leaf,
            guaranteed=queue.guaranteed.gpus,
            # For a queue without a limit of its own, YARN reports 2^63 - 1.
            maximum=min(queue.maximum.gpus, inside.gpus),
            used=queue.used.gpus,
            pending=asked,
            obtainable=gpus,
            bound=bound,
            bound_queue=whose,
        )


def _obtainable_without_queues(overview: Overview, executor: Amount) -> int | None:
    """Return how many GPUs the user would be granted now; None if there are queues."""
    snapshots = () if overview.queues else overview.user_snapshots.get("", ())
    counts = [
        _QueueCapacity(snapshots, executor).obtainable(snapshot, "RUNNING")[0]
        for snapshot in snapshots
    ]
    return counts[0] if counts else None


def _state(queue: Queue, states: dict[str, str]) -> str:
    parts = queue.path.split(".")
    chain = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    states_above = (states.get(path, "RUNNING") for path in chain)
    return next((state for state in states_above if state != "RUNNING"), "RUNNING")


class _QueueCapacity:
    """The capacity for a user's executors in each queue of a node label.

    Sums over the nodes are the same for all queues. They are computed once, because a cluster can
    have hundreds of queues and thousands of nodes.
    """

    def __init__(self, user_snapshots: Sequence[Snapshot], executor: Amount) -> None:
        self._executor = executor
        running = user_snapshots[0].running if user_snapshots else ()
        self._free = total(node.total - node.used for node in running).gpus
        self._sums: dict[Amount, tuple[Node, ...]] = {}

    def obtainable(self, snapshot: Snapshot | None, state: str) -> tuple[int | None, str, str]:
        """Return the number of GPUs, what limits it, and the queue whose limit applies.

        The number is None without a snapshot, as for a queue that is not a leaf.
        """
        if snapshot is None:
            return None, "", ""
        if state != "RUNNING":
            return 0, "state", ""
        if not self._executor.is_within(snapshot.largest):
            return 0, "container", ""
        container = snapshot.granted_size(self._executor)
        if container not in self._sums:
            self._sums[container] = _sum_by_label(snapshot.nodes, container)
        executors, tightest = obtainable(
            self._executor, replace(snapshot, nodes=self._sums[container])
        )
        gpus = executors * self._executor.gpus
        # If the user can get every free GPU, other limits make no difference.
        bound = "nodes" if gpus == self._free else _BOUNDS.get(tightest.bound, "nodes")
        return gpus, bound, "" if bound == "nodes" else tightest.queue


def _sum_by_label(nodes: Iterable[Node], container: Amount) -> tuple[Node, ...]:
    """Return, for each label, one node with the resources and capacity of its running nodes."""
    sums: dict[str, tuple[Amount, int]] = {}
    for node in nodes:
        if node.state == "RUNNING":
            resources, capacity = sums.get(node.partition, (NOTHING, 0))
            free_capacity = (node.total - node.used).capacity_for(container)
            sums[node.partition] = resources + node.total, capacity + free_capacity
    return tuple(
        Node(label, label, "RUNNING", resources, resources - container * capacity, label)
        for label, (resources, capacity) in sums.items()
    )


def _problems(nodes: Sequence[Node], answers: NodeAnswers) -> tuple[str, ...]:
    """Return one line per reason, because a broken switch affects many nodes."""
    reasons: dict[str, list[str]] = {}
    for node in nodes:
        if node.id in answers.problems:
            reasons.setdefault(answers.problems[node.id], []).append(node.host)
    return tuple(f"{_list_hosts(hosts)}: {reason}" for reason, hosts in reasons.items())


def _list_hosts(hosts: Sequence[str]) -> str:
    more = [f"{len(hosts) - _HOSTS_SHOWN} more"] if len(hosts) > _HOSTS_SHOWN else []
    return ", ".join([*hosts[:_HOSTS_SHOWN], *more])
