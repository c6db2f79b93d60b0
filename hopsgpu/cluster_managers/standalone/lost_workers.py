"""Why executors of a host were lost, by the master's state of the host's workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.cluster_managers.snapshot import Node

_LOST = (
    "its worker is DEAD: the connection of the master to the worker on {host} ended, or the worker"
    " did not report for spark.worker.timeout (60 s by default). Check whether {host} is up, and"
    " why its worker stopped (its log)"
)
_DECOMMISSIONED = "its worker on {host} was decommissioned"
_ABSENT = (
    "the master knows no worker on {host}: the worker did not register again after the master's"
    " restart, or has been dead for long. Check whether {host} is up, and the log of its worker"
)


def lost_worker(host: str, nodes: Sequence[Node]) -> str:
    """Return why a host has no executors; "" if a worker on it lives."""
    states = {node.state for node in nodes if node.host == host}
    if "RUNNING" in states:
        return ""
    if "DECOMMISSIONED" in states:
        return _DECOMMISSIONED.format(host=host)
    return (_LOST if states else _ABSENT).format(host=host)
