"""The IDs of executors' containers, which cluster managers write in different forms. Pure."""

from __future__ import annotations

# The variables of executors' pods on Kubernetes, which their pod template sets.
POD, NAMESPACE, NODE = "HOPSGPU_POD", "HOPSGPU_NAMESPACE", "HOPSGPU_NODE"


def standalone_container(application_id: str, executor: int) -> str:
    """Return the ID of an executor of a standalone master; later executors have larger IDs.

    Args:
        executor: Spark's ID of the executor.
    """
    return f"{application_id}/{executor:06d}"


def pod_container(namespace: str, pod: str) -> str:
    """Return the ID of an executor's pod on Kubernetes."""
    return f"{namespace}/{pod}"


def describe_log(container_id: str, host: str) -> str:
    """Return where the log of an executor is, as a sentence; "" for a process of this machine."""
    if container_id.startswith("local-"):
        return ""
    application, _, executor = container_id.partition("/")
    if executor.isdigit():
        number = int(executor)
        return (
            f"The executor's log: stderr of executor {number} on the page of {application} at the"
            f" Spark master, or work/{application}/{number} of the worker on {host}."
        )
    if executor:
        return (
            f"The executor's log, until its pod is deleted: kubectl logs --namespace {application}"
            f" {executor}."
        )
    return f"The executor's log: yarn logs -containerId {container_id}."
