"""Why pods of executors do not start, and what can be done about it. Pure.

Source: the Kubernetes documentation, "Images", "Debug Pods" and "Container Runtimes"; the reasons
are those of kubelet and scheduler 1.34.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def find_problem(pods: Sequence[Pod]) -> StartProblem | None:
    """Return what keeps the first of some pods from starting; None if they start as they should."""
    for pod in pods:
        reason, message = pod.waiting
        if reason in _WAITING:
            what, is_final = _WAITING[reason]
            remedy = _REMEDY_OF_IMAGE if reason in _OF_IMAGE else f"kubectl describe pod {pod.name}"
            is_final = is_final or _is_missing_image(message)
            return StartProblem(
                f"Kubernetes does not start the executors: {what} ({reason})",
                f"on {pod.node}: {message}" if message else f"on {pod.node}",
                remedy,
                is_final,
            )
    unschedulable = [pod for pod in pods if pod.unschedulable]
    if unschedulable:
        count = len(unschedulable)
        return StartProblem(
            f"Kubernetes cannot schedule {count} pod{'s' if count > 1 else ''}",
            unschedulable[0].unschedulable,
            "",
        )
    return None


def _is_missing_image(message: str) -> bool:
    """Return whether a registry answered that it has no such image."""
    return any(
        words in message.lower()
        for words in ("not found", "manifest unknown", "repository does not exist")
    )
