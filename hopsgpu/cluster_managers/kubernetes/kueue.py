"""Kueue's objects as values: its queues, the Workload of a gang, and the flavors of nodes. Pure.

Kueue divides quotas of the cluster among namespaces. A Workload asks a LocalQueue for quota of all
executors of a gang at once; Kueue's conditions on it say whether it was admitted, or why it waits.

Source: Kueue's documentation, "Workload", "Local Queue", "Resource Flavor" and "Preemption"; the
API types of Kueue 0.15.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.cluster_managers.flavors import Flavors
from hopsgpu.cluster_managers.kubernetes.application_leases import LABEL
from hopsgpu.cluster_managers.kubernetes.pods import list_of, mapping_of, text_of
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.errors import ConfigError

GROUP = "kueue.x-k8s.io"
QUEUE = "spark.hopsgpu.kueue.queue"
OFF = "off"
# The versions of the API whose Workloads have the fields that are used here, the newest first.
_VERSIONS = ("v1beta2", "v1beta1")
_POD_SET = "main"
# A growth waits behind gangs, and Kueue may preempt it for them.
GANG_PRIORITY, GROWTH_PRIORITY = 0, -1
# Every message about the only pod set of a Workload begins with these words.
_NO_FLAVOR = f"couldn't assign flavors to pod set {_POD_SET}: "
_PREEMPTED = "Preempted"
_DELETED = "its Workload was deleted"
# Kueue compares these parts of a pod with the nodes of flavors.
_RULES = ("nodeSelector", "tolerations", "affinity")


@dataclass(frozen=True)
class Workload:
    """A Workload as Kueue reports it.

    Attributes:
        message: why it is not admitted, in Kueue's words; "" if Kueue has said nothing yet.
        eviction: why its executors must end, as a sentence; "" if they may run.
        flavors: names of the flavors that were assigned to its resources.
        is_deleted: whether it no longer exists, or is being deleted.
    """

    name: str
    application: str
    is_admitted: bool = False
    message: str = ""
    eviction: str = ""
    flavors: tuple[str, ...] = ()
    is_deleted: bool = False


def served_version(answer: Mapping[str, Any]) -> str | None:
    """Return the version of Kueue's API to use, by the group that an API server reports."""
    served = [text_of(version, "version") for version in list_of(answer, "versions")]
    return next((version for version in _VERSIONS if version in served), None)


def choose_queue(names: Sequence[str], chosen: str, namespace: str) -> str | None:
    """Return the LocalQueue of gangs; None if the namespace has none.

    Args:
        names: the LocalQueues of the namespace.
        chosen: the value of the property; "" if it is not set.

    Raises:
        ConfigError: the chosen one does not exist, or there are several and none is chosen.
    """
    listed = ", ".join(sorted(names)) or "none"
    if chosen and chosen not in names:
        raise ConfigError(
            f"{QUEUE}={chosen!r}: the namespace {namespace} has no such LocalQueue of Kueue (it has"
            f" {listed}): name one of them, or set the property to {OFF!r}"
        )
    if len(names) > 1 and not chosen:
        raise ConfigError(
            f"the namespace {namespace} has several LocalQueues of Kueue ({listed}): name one with"
            f" {QUEUE}, or set the property to {OFF!r}"
        )
    return chosen or next(iter(names), None)


def workload_body(
    version: str,
    queue: str,
    application_id: str,
    container: Amount,
    executors: int,
    *,
    gpu_resource: str,
    template: Mapping[str, Any],
    owner: Mapping[str, Any] | None,
    is_growth: bool,
) -> dict[str, Any]:
    """Return the Workload of some executors for the API server, with a new name.

    Args:
        container: what each executor requests.
        template: pod template of the executors, whose rules for nodes Kueue considers.
        owner: reference to the driver's pod, with which Kubernetes removes the Workload; None
            outside.
    """
    metadata: dict[str, Any] = {
        "name": f"hopsgpu-{application_id}-{secrets.token_hex(4)}",
        "labels": {LABEL: application_id},
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    requests = {"cpu": str(container.cores), "memory": f"{container.memory_mib}Mi"}
    if container.gpus:
        requests[gpu_resource] = str(container.gpus)
    spec = mapping_of(template, "spec")
    rules = {name: spec[name] for name in _RULES if spec.get(name)}
    containers = [{"name": "executor", "resources": {"requests": requests}}]
    pod_set = {
        "name": _POD_SET,
        "count": executors,
        "template": {"spec": {"containers": containers, "restartPolicy": "Never", **rules}},
    }
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "Workload",
        "metadata": metadata,
        "spec": {
            "active": True,
            "queueName": queue,
            "priority": GROWTH_PRIORITY if is_growth else GANG_PRIORITY,
            "podSets": [pod_set],
        },
    }


def workload_of(answer: Mapping[str, Any]) -> Workload:
    """Return the Workload in an answer of the API server."""
    metadata, status = mapping_of(answer, "metadata"), mapping_of(answer, "status")
    conditions = {text_of(c, "type"): c for c in list_of(status, "conditions")}
    assignments = list_of(mapping_of(status, "admission"), "podSetAssignments")
    is_deleted = bool(metadata.get("deletionTimestamp"))
    flavors = (
        str(flavor)
        for assignment in assignments
        for flavor in mapping_of(assignment, "flavors").values()
    )
    return Workload(
        name=text_of(metadata, "name"),
        application=text_of(mapping_of(metadata, "labels"), LABEL),
        is_admitted=_is_true(conditions.get("Admitted")),
        message=_wait_message(conditions, list_of(status, "admissionChecks")),
        eviction=_eviction(conditions.get("Evicted", {}), is_deleted=is_deleted),
        flavors=tuple(dict.fromkeys(flavors)),
        is_deleted=is_deleted,
    )


def deleted_workload(name: str, application_id: str) -> Workload:
    """Return a Workload that somebody has deleted."""
    return Workload(name, application_id, eviction=_eviction_text("", _DELETED), is_deleted=True)


def _eviction_text(reason: str, message: str) -> str:
    verb = "preempted" if reason == _PREEMPTED else "evicted"
    return f"Kueue {verb} the gang: {message or reason}"


def _wait_message(
    conditions: Mapping[str, Mapping[str, Any]], checks: Iterable[Mapping[str, Any]]
) -> str:
    evicted, reserved = conditions.get("Evicted", {}), conditions.get("QuotaReserved", {})
    if _is_true(evicted):
        return text_of(evicted, "message")
    if not _is_true(reserved):
        return text_of(reserved, "message").removeprefix(_NO_FLAVOR)
    waiting = [
        f"{text_of(check, 'name')} {text_of(check, 'message')}".strip()
        for check in checks
        if check.get("state") != "Ready"
    ]
    return f"the quota is reserved, and admission checks wait: {', '.join(waiting)}"


def _eviction(evicted: Mapping[str, Any], *, is_deleted: bool) -> str:
    if _is_true(evicted):
        return _eviction_text(text_of(evicted, "reason"), text_of(evicted, "message"))
    return _eviction_text("", _DELETED) if is_deleted else ""


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def flavors_of(answers: Iterable[Mapping[str, Any]]) -> Flavors:
    """Return the nodes of several ResourceFlavors, which one gang uses together."""
    labels: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    for answer in answers:
        spec = mapping_of(answer, "spec")
        labels |= {str(k): str(v) for k, v in mapping_of(spec, "nodeLabels").items()}
        tolerations += list_of(spec, "tolerations")
    return Flavors(labels, tuple(tolerations))
