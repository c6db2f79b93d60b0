"""The nodes that the doctor's gang can inspect now. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.core.spec import AGENT_MIB, HEAP_MIB
from hopsgpu.doctor.report import join_names

RANK_MIB = 512
# The container of a gang of the doctor.
CONTAINER = Amount(1, 1, RANK_MIB + HEAP_MIB + AGENT_MIB)


def nodes_to_inspect(
    nodes: Sequence[Node], gpus: ClusterGpus, label: str = ""
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return hosts with GPUs that have room for a container now, and why other hosts have none.

    The label is that of the nodes for the session's executors, "" for nodes without a label.
    """
    why: dict[str, str] = {}
    free: dict[str, None] = {}
    # A host may have several workers of a standalone master.
    running: dict[str, list[Node]] = {}
    for node in nodes:
        if node.state == "RUNNING":
            running.setdefault(node.host, []).append(node)
    for gpu_node in gpus.nodes:
        reason = _why_not(gpu_node, running.get(gpu_node.host, ()), gpus, label)
        if reason:
            why[gpu_node.host] = reason
        else:
            free[gpu_node.host] = None
    return tuple(free), {host: reason for host, reason in why.items() if host not in free}


def _why_not(gpu_node: GpuNode, nodes: Sequence[Node], gpus: ClusterGpus, label: str) -> str:
    if not nodes:
        return f"it is {gpu_node.state}"
    node = max(nodes, key=lambda node: (node.total - node.used).capacity_for(CONTAINER))
    if node.partition != label:
        return (
            f"it has the node label {node.partition!r}, and the session asks for {label!r}"
            " (--conf spark.yarn.executor.nodeLabelExpression)"
        )
    if not gpu_node.free:
        its = "its GPU is" if gpu_node.total == 1 else f"its {gpu_node.total} GPUs are"
        return f"{its} in use{_users_text(gpus, gpu_node)}"
    if not (node.total - node.used).capacity_for(CONTAINER):
        return f"it has {node.total - node.used} free, and {CONTAINER} are needed"
    return ""


def _users_text(gpus: ClusterGpus, node: GpuNode) -> str:
    users = [
        f"{app.id} '{app.name}' of {app.user} ({app.hosts[node.host]})"
        for app in gpus.users
        if app.hosts.get(node.host)
    ]
    return f" by {join_names(users)}" if users else ""
