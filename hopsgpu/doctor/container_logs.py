"""Why a container ended unexpectedly: the end of its log, from its NodeManager."""

from __future__ import annotations

from collections.abc import Iterable

from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.yarn.container_exits import last_reason
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.errors import HopsGpuError

_MAX_LOG_BYTES = 64 * 1024


class ContainerLogs:
    def __init__(self, nodes: Iterable[Node], managers: NodeManagers) -> None:
        self._managers = managers
        self._addresses = {node.host: node.web for node in nodes if node.web}

    def reason(self, container: str, host: str) -> str:
        """Return why a container ended; raise HopsGpuError if its log is empty or cannot be read
        (yet).
        """
        if host not in self._addresses:
            raise HopsGpuError(f"the ResourceManager reports no NodeManager on {host}")
        log = self._managers.log(self._addresses[host], container, "stderr", _MAX_LOG_BYTES)
        if reason := last_reason(log):
            return reason
        raise HopsGpuError("it is empty")
