"""Why pods of executors do not start, and what can be done about it. Pure.

Source: the Kubernetes documentation, "Images", "Debug Pods" and "Container Runtimes"; the reasons
are those of kubelet and scheduler 1.34.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hopsgpu.cluster_managers.kubernetes.lost_pods import PodEvent
from hopsgpu.cluster_managers.kubernetes.pods import Pod
from hopsgpu.cluster_managers.manager import StartProblem

# Reason of a waiting container → its meaning, and whether only another image or setting helps.
_WAITING: Mapping[str, tuple[str, bool]] = {
    "ErrImagePull": ("the node cannot pull the image", False),
    "ImagePullBackOff": ("the node cannot pull the image", False),
    "ErrImageNeverPull": (
        "the image is not on the node, and spark.kubernetes.container.image.pullPolicy=Never"
        " forbids to pull it",
        True,
    ),
    "InvalidImageName": ("the name of the image is invalid", True),
    "ImageInspectError": ("the node cannot read the image", False),
    "RegistryUnavailable": ("the registry does not answer", False),
    "CreateContainerConfigError": (
        "the container refers to something that does not exist: a Secret, a ConfigMap or a key",
        False,
    ),
    "CreateContainerError": ("the node cannot create the container", False),
    "RunContainerError": ("the container cannot be started", False),
    "CrashLoopBackOff": ("the container ends again and again", False),
}
_OF_IMAGE = frozenset(
    (
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    )
)
_IMAGE = "spark.kubernetes.container.image"
_REMEDY_OF_IMAGE = (
    f"check the name in {_IMAGE}, and that nodes may pull it"
    " (spark.kubernetes.container.image.pullSecrets)"
)

_QUOTA_IS_FULL = "exceeded quota"
# Words of an API server that refuses a pod → what helps.
_REFUSALS: Mapping[str, str] = {
    "service account": "spark.kubernetes.authenticate.executor.serviceAccountName names the service"
    " account of executors",
    "PodSecurity": "the pod template (spark.kubernetes.executor.podTemplateFile) must have the"
    " securityContext that the namespace's Pod Security Standard demands",
    "must specify limits.cpu": "a quota of the namespace limits cores: set"
    " spark.kubernetes.executor.limit.cores",
    "no PriorityClass": "the pod template names a priority class that does not exist",
    _QUOTA_IS_FULL: "the gang waits until other pods of the namespace have ended",
}

# Words of a registry that answers that it has no such image.
_MISSING_IMAGE = re.compile(r"not found|manifest unknown|repository does not exist", re.I)
# Words of a node that cannot ask the registry: its name, its connection or the node's own programs.
_NOT_ASKED = re.compile(
    r"no such host|\blookup |dial tcp|i/o timeout|connection refused|executable file not found",
    re.I,
)
# Reasons of containers that the runtime could not start.
_NOT_STARTED = ("StartError", "ContainerCannotRun")
# Exit codes of a container whose command fails, cannot be executed, or does not exist.
_FAILED_COMMAND = (1, 126, 127)
# Reason of an event → its meaning.
_EVENTS: Mapping[str, str] = {
    "Failed": "a node cannot start a container",
    "FailedMount": "a node cannot mount a volume",
    "FailedAttachVolume": "a volume cannot be attached to a node",
    "FailedCreatePodSandBox": "a node cannot create a pod's sandbox, such as its network",
    "BackOff": "a node waits before it tries again to start a container",
    "FailedScheduling": "the scheduler finds no node",
}
# An event with such a message follows one with the cause.
_BARE_MESSAGE = re.compile(r"Error: \w+")


def find_problem(pods: Sequence[Pod], role: str = "the executors") -> StartProblem | None:
    """Return what keeps the first of some pods from starting; None if they start as they should.

    Args:
        role: what the pods are, for the sentence.
    """
    for pod in pods:
        if pod.waiting[0] in _WAITING:
            return _waiting_problem(pod, role)
    unschedulable = [pod for pod in pods if pod.unschedulable and not pod.has_ended]
    if unschedulable:
        count = len(unschedulable)
        return StartProblem(
            f"Kubernetes cannot schedule {count} pod{'s' if count > 1 else ''}",
            unschedulable[0].unschedulable,
            "",
        )
    failed = [pod for pod in pods if _has_failed_at_start(pod)]
    return _end_problem(max(failed, key=lambda pod: pod.created)) if failed else None


def problem_of_events(events: Iterable[PodEvent], since: float) -> StartProblem | None:
    """Return what kept pods from starting, by the newest event that says so; None without any.

    Spark deletes pods that failed at once, so that only events tell of them.

    Args:
        since: older events do not count, in seconds since the epoch.
    """
    warnings = [e for e in events if e.time >= since and e.reason in _EVENTS]
    causes = [e for e in warnings if not _BARE_MESSAGE.fullmatch(e.message)]
    newest = max(causes or warnings, key=lambda event: event.time, default=None)
    if newest is None:
        return None
    return StartProblem(
        f"Kubernetes does not start the executors: {_EVENTS[newest.reason]} ({newest.reason})",
        f"{newest.pod}: {newest.message}" if newest.message else newest.pod,
        f"kubectl get events --field-selector involvedObject.name={newest.pod}",
    )


def refusal_of(message: str) -> StartProblem:
    """Return the problem of pods that an API server refuses to create.

    Args:
        message: the API server's.
    """
    remedy = next((remedy for words, remedy in _REFUSALS.items() if words in message), "")
    # A quota has room again when other pods end.
    is_final = _QUOTA_IS_FULL not in message
    return StartProblem("Kubernetes refuses pods of executors", message, remedy, is_final)


def _waiting_problem(pod: Pod, role: str) -> StartProblem:
    reason, message = pod.waiting
    what, is_final = _WAITING[reason]
    is_of_image = reason in _OF_IMAGE
    return StartProblem(
        f"Kubernetes does not start {role}: {what} ({reason})",
        f"on {pod.node}: {message}" if message else f"on {pod.node}",
        _REMEDY_OF_IMAGE if is_of_image else f"kubectl describe pod {pod.name}",
        is_final or (is_of_image and _is_missing_image(message)),
    )


def _has_failed_at_start(pod: Pod) -> bool:
    if pod.phase != "Failed":
        return False
    reason = pod.end[0]
    return reason in _NOT_STARTED or (reason == "Error" and pod.exit_code in _FAILED_COMMAND)


def _end_problem(pod: Pod) -> StartProblem:
    reason, message = pod.end
    code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
    return StartProblem(
        f"executors do not start: the container of {pod.name} ended ({reason}{code})",
        f"on {pod.node}: {message}" if message else f"on {pod.node}",
        f"kubectl logs {pod.name} shows its output while the pod exists; check the image's"
        " entrypoint, its Python and its Java",
    )


def _is_missing_image(message: str) -> bool:
    """Return whether a registry answered that it has no such image."""
    return bool(_MISSING_IMAGE.search(message)) and not _NOT_ASKED.search(message)
