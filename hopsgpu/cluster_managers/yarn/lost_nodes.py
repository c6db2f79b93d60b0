"""Why a node's executors were lost, if the ResourceManager gave up the node itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.errors import HopsGpuError

# Hadoop's text for a container of a lost node (SchedulerUtils.LOST_CONTAINER).
_GIVEN_UP = "released on a *lost* node"
# Source: Hadoop's NodeState, and RMNodeImpl's transitions into it.
_STATES = {
    "LOST": "its NodeManager was lost: it did not report to the ResourceManager for"
    " yarn.nm.liveness-monitor.expiry-interval-ms (10 min by default), so the ResourceManager"
    " counts its containers as ended; check whether {host} is up, and why its NodeManager stopped"
    " (its log)",
    "UNHEALTHY": "its node is UNHEALTHY, and an unhealthy node loses all containers; its health"
    " check says: {health}",
    "REBOOTED": "its NodeManager was restarted and lost its containers;"
    " yarn.nodemanager.recovery.enabled would have kept them",
    "SHUTDOWN": "its NodeManager was shut down, and its containers with it",
    "DECOMMISSIONED": "an administrator decommissioned its node",
}
_BACK = (
    "its NodeManager was lost, or lost its containers, and is back: {host} is {state} now; the log"
    " of its NodeManager says why"
)


def why_lost(
    reason: str, host: str, nodes: Callable[[], Sequence[Node]], why_ended: Callable[[], str]
) -> str:
    """Return why an executor was lost, with the ResourceManager's state of its node.

    Args:
        reason: Spark's reason, or "" if Spark knows none.
        why_ended: requests why the application has ended; returns "" while it runs.

    Returns:
        Only Spark's reason, if neither the node nor the application's end is the cause.
    """
    try:
        # All executors end with the application, whose master may have been on a lost node.
        if end := why_ended():
            return f"YARN ended the application, and its executors with it: {end}"
        cause = _of_node(reason, [node for node in nodes() if node.host == host], host)
    except HopsGpuError as error:
        cause = f"the ResourceManager could not be asked whether {host} is lost ({error})"
    return "; Spark says: ".join(filter(None, (cause, reason)))


def _of_node(reason: str, nodes: Sequence[Node], host: str) -> str:
    states = {node.state: node for node in nodes}
    for state, words in _STATES.items():
        # A NodeManager that restarted on another port has a second entry.
        if state in states and "RUNNING" not in states:
            health = states[state].health or "(nothing)"
            return words.format(host=host, health=health)
    if _GIVEN_UP in reason:
        return _BACK.format(host=host, state=" and ".join(sorted(states)) or "unknown")
    return ""
