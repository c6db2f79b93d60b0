"""The ResourceManager's REST answers, read as values. Pure.

The queues of both schedulers are read as the same class Queue; a FifoScheduler has one queue, the
cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hopsgpu.cluster_managers.resources import NOTHING, Amount, exceeds_share, total
from hopsgpu.cluster_managers.snapshot import App, Container, Master, Node, Queue, Rounding, User
from hopsgpu.cluster_managers.yarn.amounts import (
    amount_in,
    amount_of,
    multiply_rounding_down,
    other_resources,
)

Answer = Mapping[str, Any]
_MASTER = re.compile(r"/container_(?:e\d+_)?(\d+_\d+)_(\d+)_\d+/")


def nodes_of(answer: Answer, gpu_resource: str) -> tuple[Node, ...]:
    return tuple(
        Node(
            id=node["id"],
            host=node["nodeHostName"],
            state=node["state"],
            total=amount_of(node.get("totalResource"), gpu_resource),
            used=amount_of(node.get("usedResource"), gpu_resource),
            partition=next(iter(node.get("nodeLabels") or ()), ""),
            web=node.get("nodeHTTPAddress") or "",
            health=" ".join((node.get("healthReport") or "").split()),
            other_resources=other_resources(node.get("totalResource"), gpu_resource),
        )
        for node in (answer.get("nodes") or {}).get("node", [])
    )


def shared_partitions(answer: Answer) -> frozenset[str]:
    """Return the partitions whose idle nodes serve requests without a label."""
    return frozenset(
        label["name"]
        for label in answer.get("nodeLabelInfo") or []
        if str(label.get("exclusivity")).lower() == "false"
    )


def queues_of(
    answer: Answer, partition: str, nodes: Sequence[Node], gpu_resource: str
) -> tuple[Queue, ...]:
    """Return all queues in a partition; each parent before its children."""
    scheduler = answer["scheduler"]["schedulerInfo"]
    running = [node.total for node in nodes if node.state == "RUNNING"]
    biggest = NOTHING
    for size in running:
        biggest = biggest.max_with(size)
    if scheduler["type"] == "fairScheduler":
        return tuple(_fair_queues(scheduler["rootQueue"], biggest, gpu_resource))
    if scheduler["type"] == "capacityScheduler":
        return tuple(_capacity_queues(scheduler, "", partition, biggest, gpu_resource))
    used = total(node.used for node in nodes if node.state == "RUNNING")
    return (Queue("default", "RUNNING", True, total(running), NOTHING, used, biggest),)


def _children(queue: Answer, name: str) -> list[Answer]:
    return list((queue.get(name) or {}).get("queue", []))


def _capacity_queues(
    queue: Answer, above: str, partition: str, biggest: Amount, gpu_resource: str
) -> Iterator[Queue]:
    path = f"{above}.{queue['queueName']}" if above else queue["queueName"]
    below = [
        list(_capacity_queues(q, path, partition, biggest, gpu_resource))
        for q in _children(queue, "queues")
    ]
    capacities = _in_partition(queue.get("capacities"), "queueCapacitiesByPartition", partition)
    # The answer has no usage of the root itself.
    root_used = total(queues[0].used for queues in below)
    pending = [queues[0].pending for queues in below]
    yield Queue(
        path=path,
        state=queue.get("state") or "RUNNING",
        is_leaf=_is_leaf(queue),
        maximum=amount_of(capacities.get("effectiveMaxResource"), gpu_resource),
        guaranteed=amount_of(capacities.get("effectiveMinResource"), gpu_resource),
        used=_usage_of(queue.get("resources"), partition, gpu_resource) if above else root_used,
        largest=amount_of(queue.get("maximumAllocation"), gpu_resource).min_with(biggest),
        can_create_children=queue.get("autoCreationEligibility", "off") != "off",
        pending=(
            _pending(queue.get("resources"), partition, gpu_resource)
            if above
            else _sum_known(pending)
        ),
        # False only if `yarn.resourcemanager.scheduler.monitor.enable` is on.
        is_preemptable=not queue.get("preemptionDisabled", True),
    )
    for queues in below:
        yield from queues


def _fair_queues(queue: Answer, biggest: Amount, gpu_resource: str) -> Iterator[Queue]:
    below = _children(queue, "childQueues")
    is_leaf = _is_leaf(queue)
    used, wanted = amount_of(queue.get("usedResources"), gpu_resource), queue.get("demandResources")
    yield Queue(
        path=queue["queueName"],
        state="RUNNING",
        is_leaf=is_leaf,
        maximum=amount_of(queue.get("maxResources"), gpu_resource),
        guaranteed=amount_of(queue.get("minResources"), gpu_resource),
        used=used,
        largest=amount_of(queue.get("maxContainerAllocation"), gpu_resource).min_with(biggest),
        can_create_children=not is_leaf,
        # The demand is the sum of the used and the requested resources.
        pending=(
            None if wanted is None else (amount_of(wanted, gpu_resource) - used).max_with(NOTHING)
        ),
        fair_share=amount_of(queue.get("fairResources"), gpu_resource),
        # Also true if the FairScheduler does not preempt at all: see FAIR_PREEMPTION.
        is_preemptable=bool(queue.get("preemptable")),
    )
    for child in below:
        yield from _fair_queues(child, biggest, gpu_resource)


def _is_leaf(queue: Answer) -> bool:
    return "LeafQueue" in queue.get("type", "")


def _in_partition(answer: Answer | None, name: str, partition: str) -> Answer:
    listed: list[Answer] = (answer or {}).get(name) or []
    return next((entry for entry in listed if entry.get("partitionName", "") == partition), {})


def _usage_of(resources: Answer | None, partition: str, gpu_resource: str) -> Amount:
    usage = _in_partition(resources, "resourceUsagesByPartition", partition)
    return amount_of(usage.get("used"), gpu_resource)


def _sum_known(amounts: Sequence[Amount | None]) -> Amount | None:
    reported = [amount for amount in amounts if amount is not None]
    return total(reported) if reported else None


def _pending(resources: Answer | None, partition: str, gpu_resource: str) -> Amount | None:
    usage = _in_partition(resources, "resourceUsagesByPartition", partition)
    return amount_of(usage["pending"], gpu_resource) if "pending" in usage else None


def user_of(
    answer: Answer,
    queue: Queue,
    name: str,
    partition: str,
    partition_total: Amount,
    smallest: Amount,
    gpu_resource: str,
) -> User:
    """Return a user's share of a leaf queue, from the scheduler's answer."""
    leaf = _leaf(answer["scheduler"]["schedulerInfo"], "", queue.path)
    users = (leaf.get("users") or {}).get("user") or []
    entry: Answer = next((user for user in users if user["username"] == name), {})
    factor = float(leaf.get("userLimitFactor", -1))
    limit = None
    # Without a guarantee, or with a factor of -1, only the queue's maximum bounds a user.
    if factor != -1 and queue.guaranteed != NOTHING:
        guaranteed = queue.guaranteed
        base = smallest if exceeds_share(smallest, guaranteed, partition_total) else guaranteed
        limit = multiply_rounding_down(base, factor).round_up(smallest)
        weight = float(entry.get("userWeight", 1))
        limit = limit if weight == 1 else multiply_rounding_down(limit, weight)
    return User(name, _usage_of(entry.get("resources"), partition, gpu_resource), limit)


def _leaf(queue: Answer, above: str, path: str) -> Answer:
    name = queue.get("queueName")
    own_path = f"{above}.{name}" if above else name or ""
    if own_path == path:
        return queue
    leaves = (_leaf(child, own_path, path) for child in _children(queue, "queues"))
    return next((leaf for leaf in leaves if leaf), {})


Containers = Sequence[Container]


def apps_of(
    answer: Answer,
    partitions: frozenset[str],
    containers: Mapping[str, Containers],
    gpu_resource: str,
) -> tuple[App, ...]:
    """Return the running applications, from `/apps`.

    Args:
        partitions: the partitions whose resources are counted.
        containers: containers of applications that do not report their resources, by application
            ID.
    """
    return tuple(
        App(
            id=app["id"],
            name=app.get("name") or "",
            user=app.get("user") or "",
            queue=app.get("queue") or "",
            used=_app_used(app, partitions, containers.get(app["id"]), gpu_resource),
            started=(app.get("startedTime") or 0) / 1000,
            containers=max(int(app.get("runningContainers") or 0), 0),
        )
        for app in (answer.get("apps") or {}).get("app", [])
    )


def _app_used(
    app: Answer, partitions: frozenset[str], containers: Containers | None, gpu_resource: str
) -> Amount:
    if containers is not None:
        return total(container.size for container in containers)
    if "resourceInfo" not in app:
        reported = (app.get("allocatedVCores") or 0, app.get("allocatedMB") or 0)
        return Amount(0, *(max(value, 0) for value in reported))
    return total(
        amount_of(usage.get("used"), gpu_resource)
        for usage in app["resourceInfo"].get("resourceUsagesByPartition") or []
        if usage.get("partitionName", "") in partitions
    )


def unreported_apps(answer: Answer, own_id: str, most: int, gpu_resource: str) -> dict[str, str]:
    """Return applications that may have GPUs but do not report them: ids with their attempts' ids.

    Args:
        own_id: ID of our application, which is always included if it does not report its GPUs.
        most: largest number to return; applications with the most GPU-seconds come first.
    """
    candidates = {}
    for app in (answer.get("apps") or {}).get("app", []):
        spent = (app.get("resourceSecondsMap") or {}).get("entry") or []
        seconds = sum(int(entry["value"]) for entry in spent if entry["key"] == gpu_resource)
        attempt = _attempt_of(app)
        if "resourceInfo" not in app and attempt and (seconds or app["id"] == own_id):
            candidates[app["id"]] = (app["id"] != own_id, -seconds, attempt)
    chosen = sorted(candidates, key=lambda name: candidates[name])[:most]
    return {name: candidates[name][2] for name in chosen}


def gpu_apps(
    answer: Answer, partitions: frozenset[str], most: int, gpu_resource: str
) -> dict[str, str]:
    """Return applications that have GPUs, or may have some unreported: ids with attempts' ids.

    Args:
        partitions: the partitions whose resources are counted.
        most: largest number to return: first applications with the most GPUs, then those that do
            not report their GPUs.
    """
    having = [app for app in apps_of(answer, partitions, {}, gpu_resource) if app.used.gpus]
    having.sort(key=lambda app: app.used.gpus, reverse=True)
    listed = (answer.get("apps") or {}).get("app", [])
    attempts = {app["id"]: attempt for app in listed if (attempt := _attempt_of(app))}
    chosen = {app.id: attempts[app.id] for app in having if app.id in attempts}
    unreported = unreported_apps(answer, "", most, gpu_resource)
    return dict(list((chosen | unreported).items())[:most])


def _attempt_of(app: Answer) -> str | None:
    match = _MASTER.search(app.get("amContainerLogs") or "")
    return f"appattempt_{match[1]}_{int(match[2]):06d}" if match else None


def containers_of(answer: Answer | None, gpu_resource: str) -> Containers:
    return tuple(
        Container(
            # Old ResourceManagers report only `assignedNodeId` (Hadoop's ContainerInfo).
            node=container.get("nodeId") or container.get("assignedNodeId") or "",
            id=container["containerId"],
            size=_allocated_size(container, gpu_resource),
            granted=int(container.get("startedTime") or 0) / 1000,
        )
        for container in (answer or {}).get("container", [])
    )


def _allocated_size(container: Answer, gpu_resource: str) -> Amount:
    listed = (container.get("allocatedResources") or {}).get("entry") or []
    return amount_in({entry["key"]: int(entry["value"]) for entry in listed}, gpu_resource)


def app_answer(answer: Answer, application_id: str) -> Answer | None:
    listed = (answer.get("apps") or {}).get("app", [])
    return next((app for app in listed if app["id"] == application_id), None)


def master_of(app: Answer, containers: Containers, gpu_resource: str) -> Master | None:
    """Return the application master's container, from an application's part of `/apps`.

    Args:
        containers: its containers, if it does not report the resources of its master.
    """
    usages = (app.get("resourceInfo") or {}).get("resourceUsagesByPartition") or []
    size = total(amount_of(usage.get("amUsed"), gpu_resource) for usage in usages)
    logs = app.get("amContainerLogs") or ""
    size += total(c.size for c in containers if f"/{c.id}/" in logs)
    node = app.get("masterNodeId")
    return Master(node, size) if node and size != NOTHING else None


def rounding_of(conf: Mapping[str, int | None], is_fair: bool) -> Rounding:
    """Return the rounding of containers, from the ResourceManager's configuration.

    Args:
        conf: values of MINIMUMS and INCREMENTS; None if not set or not reported.
        is_fair: whether the FairScheduler runs.
    """
    cores, memory = (conf.get(name) for name in MINIMUMS)
    smallest = Amount(0, cores or 0, memory or 0)
    if not is_fair:
        return Rounding(smallest, smallest)
    old_memory, old_cores, new_memory, new_cores = (conf.get(name) for name in INCREMENTS)
    step = Amount(0, new_cores or old_cores or 1, new_memory or old_memory or 1024)
    return Rounding(smallest, step)


# Off by default.
FAIR_PREEMPTION = "yarn.scheduler.fair.preemption"
MINIMUMS = ("yarn.scheduler.minimum-allocation-vcores", "yarn.scheduler.minimum-allocation-mb")
INCREMENTS = (
    "yarn.scheduler.increment-allocation-mb",
    "yarn.scheduler.increment-allocation-vcores",
    "yarn.resource-types.memory-mb.increment-allocation",
    "yarn.resource-types.vcores.increment-allocation",
)
