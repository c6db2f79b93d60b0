"""Why a container ended unexpectedly: the end of its log, from its NodeManager."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hopsgpu.errors import HopsGpuError
from hopsgpu.yarn.node_manager import NodeManagers
from hopsgpu.yarn.snapshot import Node

_ENOUGH = 64 * 1024
_LONGEST = 300


class Logs:
    """The logs of containers on some nodes.

    Args:
        nodes: nodes, as the ResourceManager reports them.
        managers: addresses of their NodeManagers.
    """

    def __init__(self, nodes: Iterable[Node], managers: NodeManagers) -> None:
        self._managers = managers
        self._addresses = {node.host: node.web for node in nodes if node.web}

    def reason(self, container: str, host: str) -> str:
        """Return why an ended container of a host ended.

        Raises:
            HopsGpuError: its log cannot be read (yet), or does not say it.
        """
        if host not in self._addresses:
            raise HopsGpuError(f"the ResourceManager reports no NodeManager on {host}")
        log = self._managers.log(self._addresses[host], container, "stderr", _ENOUGH)
        if reason := reason_in(log):
            return reason
        raise HopsGpuError("it is empty")


def reason_in(log: str) -> str:
    """Return the discovery script's last message in an executor's log, else the last error."""
    lines = [line.strip() for line in log.splitlines()]
    ours = [
        line.partition("hopsgpu discovery: ")[2] for line in lines if "hopsgpu discovery: " in line
    ]
    errors = [line for line in lines if re.search(r"\b(ERROR|[\w.]+(Error|Exception)\b)", line)]
    found = ours or errors or [line for line in lines if line]
    return found[-1][:_LONGEST] if found else ""
