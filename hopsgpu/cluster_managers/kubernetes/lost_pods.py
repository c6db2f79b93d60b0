"""Why executors were lost, by what Kubernetes says of pods, events and nodes. Pure.

Source: the Kubernetes documentation, "Disruptions" (pod disruption conditions), "Node-pressure
Eviction", "Pod Priority and Preemption" and "Taints and Tolerations".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.cluster_managers.kubernetes.nodes import NOT_READY
from hopsgpu.cluster_managers.kubernetes.pods import Pod
from hopsgpu.cluster_managers.snapshot import Node

_MAX_TEXT = 300
# Begins the message of an event that withdraws an earlier one: the node reports again.
_WITHDRAWN = "Cancelling deletion"
# Reason of a pod's end, or of an event → words.
_REASONS: Mapping[str, str] = {
    "Evicted": "the kubelet evicted its pod, because the node ran out of something",
    "EvictionByEvictionAPI": "its pod was evicted, as by `kubectl drain`",
    "PreemptionByScheduler": "its pod was preempted for one of higher priority",
    "Preempted": "its pod was preempted for one of higher priority",
    "Preempting": "its pod was preempted for one of higher priority",
    "DeletionByTaintManager": "its pod was deleted, because its node has a taint such as that of a"
    " node which does not report",
    "TaintManagerEviction": "its pod was deleted, because its node has a taint such as that of a"
    " node which does not report",
    "DeletionByPodGC": "its pod was deleted, because its node no longer exists",
    "TerminationByKubelet": "the kubelet ended its pod, because of a shutdown or of node pressure",
    "Terminated": "the kubelet ended its pod, because its node was shut down",
    "NodeShutdown": "the kubelet ended its pod, because its node was shut down",
    "NodeLost": "its node does not report",
    "OOMKilled": "the container used more memory than its limit: raise memory_per_worker",
    "OOMKilling": "the kernel ended a process for lack of memory: raise memory_per_worker",
    "UnexpectedAdmissionError": "the kubelet could not give it its GPUs",
    "DeadlineExceeded": "its pod has reached its activeDeadlineSeconds",
}


@dataclass(frozen=True)
class PodEvent:
    """An event about a pod.

    Attributes:
        pod: name of the pod.
        time: when it happened last, in seconds since the epoch.
    """

    pod: str
    reason: str
    message: str
    time: float


def why_lost(
    host: str,
    pods: Sequence[Pod],
    events: Iterable[PodEvent],
    nodes: Sequence[Node],
    since: float,
) -> str:
    """Return why an executor on a host was lost; "" if Kubernetes knows no reason.

    Args:
        pods: the application's pods on the host.
        events: events about the application's pods, whose node may not be known any more.
        since: older events do not count, in seconds since the epoch.
    """
    states = {node.host: node for node in nodes}
    node = states.get(host)
    if node is None and nodes:
        return f"its node {host} no longer exists"
    if node is not None and node.state == NOT_READY:
        return f"its node {host} is not ready: {node.health}"
    for pod in pods:
        if words := _words_of(*pod.end):
            return words
    recent = [e for e in events if e.time >= since and not e.message.startswith(_WITHDRAWN)]
    recent.sort(key=lambda event: -event.time)
    for event in recent:
        if words := _words_of(event.reason, event.message):
            return words
    if any(pod.is_ending for pod in pods):
        return "its pod was deleted"
    return ""


def _words_of(reason: str, message: str) -> str:
    words = _REASONS.get(reason)
    if words is None:
        return ""
    return f"{words} ({reason}: {message[:_MAX_TEXT]})" if message else f"{words} ({reason})"
