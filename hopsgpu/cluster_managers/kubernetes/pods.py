"""Pods as values: what they request, where they run, and why they do not. Pure.

Source: the Kubernetes documentation, "Pod Lifecycle", "Pod v1 core" and "Disruptions"; Spark's
"Running Spark on Kubernetes" (labels of its pods).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hopsgpu.cluster_managers.kubernetes.amounts import ExactAmount, amount_of, sum_exact
from hopsgpu.core.container_ids import pod_container

# Labels that Spark gives to its pods.
APPLICATION, ROLE = "spark-app-selector", "spark-role"
EXECUTOR, PROFILE = "spark-exec-id", "spark-exec-resourceprofile-id"
APPLICATION_NAME = "spark-app-name"
_ENDED = ("Succeeded", "Failed")
# Reasons of containers that wait as they should.
_STARTING = ("", "ContainerCreating", "PodInitializing")
_MAX_TEXT = 500


@dataclass(frozen=True)
class Pod:
    """A pod as the API server reports it.

    Attributes:
        node: name of its node; "" before it is scheduled.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        requests: what the scheduler counts for it.
        created: time of its creation, in seconds since the epoch.
        is_ending: whether it is being deleted.
        owner: name of the object that controls it; "" if there is none.
        waiting: reason and message of a container that waits, such as ImagePullBackOff; of a
            container that is being created only if no other one waits.
        unschedulable: the scheduler's message; "" if the pod has a node.
        end: reason and message of its end, such as Evicted or OOMKilled.
        exit_code: that of a container that has ended, by preference one that failed; None before.
    """

    namespace: str
    name: str
    node: str
    phase: str
    requests: ExactAmount
    created: float
    is_ending: bool = False
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    waiting: tuple[str, str] = ("", "")
    unschedulable: str = ""
    end: tuple[str, str] = ("", "")
    exit_code: int | None = None

    @property
    def id(self) -> str:
        """Return the ID of its container, as hopsgpu names it."""
        return pod_container(self.namespace, self.name)

    @property
    def has_ended(self) -> bool:
        return self.phase in _ENDED

    @property
    def is_granted(self) -> bool:
        """Return whether it holds resources of a node."""
        return bool(self.node) and not self.has_ended

    @property
    def application(self) -> str:
        return self.labels.get(APPLICATION, "")


def pod_of(answer: Mapping[str, Any], gpu_resource: str) -> Pod:
    """Return the pod in an answer of the API server."""
    metadata, spec = mapping_of(answer, "metadata"), mapping_of(answer, "spec")
    status = mapping_of(answer, "status")
    labels = {str(k): str(v) for k, v in mapping_of(metadata, "labels").items()}
    owners = list_of(metadata, "ownerReferences")
    terminated = _ends(status)
    codes = [_integer(end.get("exitCode")) for end in terminated]
    return Pod(
        namespace=text_of(metadata, "namespace"),
        name=text_of(metadata, "name"),
        node=text_of(spec, "nodeName"),
        phase=text_of(status, "phase"),
        requests=_requests(spec, gpu_resource),
        created=seconds_of(metadata.get("creationTimestamp")),
        is_ending=bool(metadata.get("deletionTimestamp")),
        owner=text_of(owners[0], "name") if owners else "",
        labels=labels,
        waiting=_waiting(status),
        unschedulable=_unschedulable(status),
        end=_end(status, terminated),
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
    )


def _requests(spec: Mapping[str, Any], gpu_resource: str) -> ExactAmount:
    """Return a pod's requests as the scheduler counts them."""

    def requests_of(container: Mapping[str, Any]) -> ExactAmount:
        resources = mapping_of(container, "resources")
        # A container without requests requests its limits.
        limits, requests = mapping_of(resources, "limits"), mapping_of(resources, "requests")
        return amount_of({**limits, **requests}, gpu_resource)

    starting, staying = ExactAmount(), ExactAmount()
    for container in list_of(spec, "initContainers"):
        amount = requests_of(container)
        if container.get("restartPolicy") == "Always":
            staying += amount
            starting = starting.max_with(staying)
        else:
            starting = starting.max_with(staying + amount)
    together = staying + sum_exact(map(requests_of, list_of(spec, "containers")))
    return together.max_with(starting) + amount_of(spec.get("overhead"), gpu_resource)


def _unschedulable(status: Mapping[str, Any]) -> str:
    for condition in list_of(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return text_of(condition, "message") or text_of(condition, "reason")
    return ""


def _end(status: Mapping[str, Any], terminated: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    for condition in list_of(status, "conditions"):
        # Kubernetes marks pods that it ends on purpose: evictions, preemptions, lost nodes.
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return text_of(condition, "reason"), text_of(condition, "message")
    if reason := text_of(status, "reason"):
        return reason, text_of(status, "message")
    for end in terminated:
        if (reason := text_of(end, "reason")) not in ("", "Completed"):
            return reason, text_of(end, "message")
    return "", ""


def _waiting(status: Mapping[str, Any]) -> tuple[str, str]:
    containers = (*list_of(status, "initContainerStatuses"), *list_of(status, "containerStatuses"))
    states = [mapping_of(mapping_of(c, "state"), "waiting") for c in containers]
    reasons = [(text_of(state, "reason"), text_of(state, "message")) for state in states]
    # The other containers are being created, or initialized, until the first problem is over.
    problems = [waiting for waiting in reasons if waiting[0] not in _STARTING]
    return next(iter(problems or filter(any, reasons)), ("", ""))


def _ends(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the ends of containers, and of init containers that failed."""

    def ends_in(name: str) -> list[Mapping[str, Any]]:
        states = [mapping_of(container, "state") for container in list_of(status, name)]
        return [end for state in states if (end := mapping_of(state, "terminated"))]

    failed = [end for end in ends_in("initContainerStatuses") if end.get("exitCode")]
    return [*ends_in("containerStatuses"), *failed]


def seconds_of(time: object) -> float:
    """Return a time of the API server in seconds since the epoch; 0.0 if it is none."""
    try:
        parsed = datetime.fromisoformat(str(time))
    except ValueError:
        return 0.0
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def text_of(answer: Mapping[str, Any], name: str) -> str:
    """Return a text of an answer in one line, shortened; "" if there is none."""
    return " ".join(str(answer.get(name) or "").split())[:_MAX_TEXT]


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def mapping_of(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = answer.get(name)
    return value if isinstance(value, dict) else {}


def list_of(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = answer.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
