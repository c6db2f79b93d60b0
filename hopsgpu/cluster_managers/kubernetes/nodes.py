"""Nodes as values: their size, and whether executors can be scheduled on them. Pure.

Source: the Kubernetes documentation, "Node Status", "Taints and Tolerations" and "Assigning Pods to
Nodes"; NVIDIA's GPU feature discovery (labels of nodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.cluster_managers.kubernetes.amounts import ExactAmount, amount_of
from hopsgpu.cluster_managers.kubernetes.pods import list_of, mapping_of, text_of
from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeGpu
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.units import count_of

RUNNING, NOT_READY = "RUNNING", "NOT READY"
PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
_DRIVER = ("nvidia.com/cuda.driver-version.full", "nvidia.com/cuda.driver.rev")
_REPELLING = ("NoSchedule", "NoExecute")
# The scheduler sees a cordoned node as if it had this taint.
_CORDON: Mapping[str, str]
_CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@dataclass(frozen=True)
class Toleration:
    """A toleration of pods; "" stands for any key, and for any effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def is_covering(self, taint: Mapping[str, Any]) -> bool:
        if self.effect and self.effect != taint.get("effect"):
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.get("key")
        return self.key == taint.get("key") and self.value == (taint.get("value") or "")


@dataclass(frozen=True)
class NodeRules:
    """The rules by which the scheduler chooses nodes for executors with GPUs.

    Attributes:
        selector: labels that a node must have.
    """

    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


def toleration_of(answer: Mapping[str, Any]) -> Toleration:
    return Toleration(
        text_of(answer, "key"),
        text_of(answer, "operator") or "Equal",
        text_of(answer, "value"),
        text_of(answer, "effect"),
    )


def node_of(
    answer: Mapping[str, Any], gpu_resource: str, used: ExactAmount, rules: NodeRules
) -> Node:
    """Return the node in an answer of the API server.

    Args:
        used: what the pods on the node request.
    """
    name = text_of(mapping_of(answer, "metadata"), "name")
    size = amount_of(mapping_of(mapping_of(answer, "status"), "allocatable"), gpu_resource)
    state, health = _state_of(answer, rules)
    capacity = amount_of(mapping_of(mapping_of(answer, "status"), "capacity"), gpu_resource)
    missing = (capacity - size).round_down().gpus
    if state == RUNNING and missing > 0:
        health = (
            f"{count_of(missing, 'GPU')} cannot be allocated, because its device plugin does not"
            " run or reports them as unhealthy"
        )
    total = size.round_down()
    # The free part is exact, as the scheduler sees it; the used part is the rest.
    return Node(
        id=name,
        host=name,
        state=state,
        total=total,
        used=total - (size - used).round_down(),
        health=health,
    )


def _state_of(answer: Mapping[str, Any], rules: NodeRules) -> tuple[str, str]:
    """Return "RUNNING" if executors can be scheduled on a node, else another state, and why."""
    spec = mapping_of(answer, "spec")
    ready = next(
        (
            c
            for c in list_of(mapping_of(answer, "status"), "conditions")
            if c.get("type") == "Ready"
        ),
        {},
    )
    if ready.get("status") != "True":
        return NOT_READY, text_of(ready, "message") or "its kubelet does not report"
    if spec.get("unschedulable") and not any(t.is_covering(_CORDON) for t in rules.tolerations):
        return "CORDONED", "an administrator made it unschedulable (kubectl uncordon allows pods)"
    if repelling := _repelling_taints(spec, rules.tolerations):
        return "TAINTED", f"executors do not tolerate its taint {repelling[0]}"
    labels = mapping_of(mapping_of(answer, "metadata"), "labels")
    for label, value in rules.selector.items():
        if labels.get(label) != value:
            return "NOT SELECTED", f"it has not the label {label}={value}"
    return RUNNING, ""


def _repelling_taints(spec: Mapping[str, Any], tolerations: Sequence[Toleration]) -> list[str]:
    return [
        f"{taint.get('key')}={taint.get('value') or ''}:{taint.get('effect')}"
        for taint in list_of(spec, "taints")
        if taint.get("effect") in _REPELLING and not any(t.is_covering(taint) for t in tolerations)
    ]


def devices_of(answer: Mapping[str, Any], gpus: int) -> Devices:
    """Return the GPUs of a node by its labels, without UUIDs; none if labels do not name them."""
    labels = mapping_of(mapping_of(answer, "metadata"), "labels")
    product, memory = str(labels.get(PRODUCT) or ""), str(labels.get(MEMORY) or "")
    driver = next((str(labels[name]) for name in _DRIVER if labels.get(name)), "")
    if not product:
        return Devices((), driver)
    size = int(memory) if memory.isascii() and memory.isdigit() else None
    return Devices((NodeGpu(product.replace("-", " "), size, ""),) * gpus, driver)
