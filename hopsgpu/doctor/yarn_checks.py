"""Checks of the ResourceManager: GPUs, resource calculator, queue. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
from hopsgpu.cluster_managers.snapshot import Node, Queue
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.gpu_resource import SETTING
from hopsgpu.cluster_managers.yarn.queues import chain_of, check_queue
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.report import Check, join_names, ok, unknown, wrong
from hopsgpu.errors import CapacityError, HopsGpuError
from hopsgpu.units import count_of

_CAPACITY, _FAIR = "capacityScheduler", "fairScheduler"
_CALCULATOR = (
    "yarn.scheduler.capacity.resource-calculator=org.apache.hadoop.yarn.util.resource"
    ".DominantResourceCalculator in capacity-scheduler.xml (yarn-scripts/capacity-scheduler.xml)"
)
NODE_REMEDIES = NodeRemedies(
    discovery=(
        "each node with GPUs needs python3 on the PATH of its containers, and NVIDIA's driver with"
        " nvidia-smi"
    ),
    spark="spark.yarn.archive (or spark.yarn.jars) = the jars of Spark {version}",
    leases=(
        "create it as root, mode 1777; or name another one for all containers with"
        " yarn.nodemanager.admin-env.HOPSGPU_LEASE_DIR on the nodes"
    ),
    gang="fix what the message says",
)
_TYPES = "yarn-scripts/resource-types.xml to the ResourceManager and the NodeManagers"


@dataclass(frozen=True)
class YarnFacts:
    """The state of YARN as the ResourceManager reports it.

    Attributes:
        address: addresses of the ResourceManagers' web pages.
        scheduler: its type, such as "capacityScheduler".
        policy: policy of the FairScheduler's root queue, such as "drf"; "" for other schedulers.
        has_gpu_type: whether the ResourceManager counts GPUs.
    """

    address: str
    version: str
    scheduler: str
    policy: str
    has_gpu_type: bool
    gpus: ClusterGpus
    nodes: tuple[Node, ...]
    queues: tuple[Queue, ...]


def check_manager(yarn: YarnFacts) -> Check:
    return ok("yarn", f"Hadoop {yarn.version} at {yarn.address}, {yarn.scheduler}")


def check_calculator(yarn: YarnFacts) -> Check:
    """Check whether the scheduler counts GPUs, not only memory."""
    name = "calculator"
    if not yarn.has_gpu_type:
        return wrong(
            name,
            f"the ResourceManager does not know {yarn.gpus.resource}",
            f"copy {_TYPES} (with {yarn.gpus.resource} in yarn.resource-types), set {_CALCULATOR},"
            " and restart them",
        )
    if yarn.scheduler == _CAPACITY:
        # With another calculator, the CapacityScheduler does not start if resource types besides
        # memory and cores are defined.
        return ok(name, "the CapacityScheduler counts GPUs (DominantResourceCalculator)")
    if yarn.scheduler == _FAIR and yarn.policy.lower() != "drf":
        return wrong(
            name,
            f"the FairScheduler's root queue shares by {yarn.policy or 'memory'}, not by GPUs",
            "set <defaultQueueSchedulingPolicy>drf</defaultQueueSchedulingPolicy> in its allocation"
            " file",
        )
    if yarn.scheduler == _FAIR:
        return ok(name, "the FairScheduler counts GPUs (drf)")
    return unknown(
        name, f"hopsgpu was never tested with {yarn.scheduler}; use the CapacityScheduler"
    )


def check_gpus(yarn: YarnFacts) -> Check:
    name, gpu_nodes = "gpus", yarn.gpus.nodes
    running = [node for node in gpu_nodes if node.state == "RUNNING"]
    if not gpu_nodes:
        count = sum(node.state == "RUNNING" for node in yarn.nodes)
        return wrong(
            name,
            f"no node has {yarn.gpus.resource} ({count_of(count, 'node')} running)",
            f"set yarn.nodemanager.resource-plugins={DEFAULT_GPU_RESOURCE} on nodes with GPUs"
            " (yarn-scripts/yarn-site-gpus.xml), and copy resource-types.xml there; if another"
            f" resource counts the GPUs, name it with {SETTING}",
        )
    where = join_names(f"{node.host} {node.total}" for node in running)
    nodes = f"{count_of(len(running), 'node')} ({where or 'none'})"
    seen = f"{sum(node.total for node in running)} on {nodes}"
    # A node that was decommissioned on purpose is not a fault.
    unhealthy = [node for node in gpu_nodes if node.unhealthy]
    if unhealthy:
        return wrong(
            name,
            f"{seen}; not usable: {join_names(node.host for node in unhealthy)}",
            "repair these nodes; an UNHEALTHY node returns when its health check passes",
            [
                f"{node.host} is {node.state}: {node.health or 'it gives no reason'}"
                for node in unhealthy
            ],
        )
    return ok(name, seen) if running else unknown(name, f"{seen}: no node with GPUs is running")


def check_node_managers(yarn: YarnFacts) -> Check:
    """Check whether the NodeManagers describe their GPUs, as placement by type requires."""
    name, gpus = "node managers", yarn.gpus
    if not gpus.nodes:
        return unknown(name, "no node has GPUs")
    if gpus.problems:
        return unknown(
            name,
            "some do not describe their GPUs, so gpu_type cannot be used for them",
            "open the NodeManagers' web ports to this machine; leave"
            " yarn.nodemanager.resource-plugins.gpu.allowed-gpu-devices at auto; restart a"
            " NodeManager whose nvidia-smi failed ten times",
            gpus.problems,
        )
    if not gpus.types:
        # Only YARN's own plugin describes what it counts.
        return ok(name, f"YARN counts {gpus.resource}, and does not describe these GPUs")
    types = join_names(map(str, gpus.types))
    drivers = join_names(sorted({node.driver for node in gpus.nodes if node.driver}))
    return ok(name, f"{types}; driver {drivers or 'unknown'}")


def check_submission(yarn: YarnFacts, name: str) -> Check:
    """Check whether the queue accepts applications, and may have GPUs."""
    advice = "name another queue: --queue, or spark.yarn.queue"
    try:
        check_queue(name, yarn.queues)
    except CapacityError as error:
        return wrong("queue", str(error), advice)
    try:
        chain = chain_of(yarn.queues, name)
    except HopsGpuError:
        # At submission, YARN may create the queue, or map it to another queue.
        return unknown("queue", f"{name} is not among the queues yet; the scheduler may create it")
    gpus = min(queue.maximum.gpus for queue in chain)
    leaf = chain[0]
    guaranteed = count_of(leaf.guaranteed.gpus, "GPU")
    seen = f"{leaf.path}: {guaranteed} guaranteed, at most {gpus}, {leaf.used.gpus} used"
    if gpus == 0 and yarn.gpus.total:
        return wrong("queue", seen, f"give it a share of GPUs, or {advice}")
    acls = "; YARN checks its access control at submission" if yarn.gpus.acls else ""
    return ok("queue", seen + acls)
