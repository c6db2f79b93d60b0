"""The doctor's session on YARN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.doctor.container_logs import ContainerLogs
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.probe_cluster import ProbeCluster
from hopsgpu.doctor.yarn_checks import NODE_REMEDIES
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.bounded_calls import BoundedCall

_TAGS = "spark.yarn.tags"
_EXCLUDED = "spark.yarn.exclude.nodes"
_ENDING_SECONDS = 20.0
_BY_HAND = "end it with yarn application -kill"
_MASTER = (
    "make room for its application master: free memory and cores in the queue, and raise"
    " yarn.scheduler.capacity.maximum-am-resource-percent; or use another queue (--queue)"
)


@dataclass(frozen=True)
class YarnProbe(ProbeCluster):
    """YARN, where a tag names the doctor's application.

    Attributes:
        manager: the client that ends the application.
        logs: the logs of containers.
        is_in_image: whether the executors run in a container image.
    """

    manager: ResourceManager
    logs: ContainerLogs
    is_in_image: bool = False

    @property
    def remedies(self) -> NodeRemedies:
        return NODE_REMEDIES

    @property
    def has_image(self) -> bool:
        return self.is_in_image

    def session_properties(self, conf: Mapping[str, str], name: str) -> Mapping[str, str]:
        return {**conf, _TAGS: ",".join(filter(None, (conf.get(_TAGS), name)))}

    def exclude(self, conf: Mapping[str, str], hosts: Sequence[str]) -> Mapping[str, str] | None:
        return {**conf, _EXCLUDED: ",".join(filter(None, (conf.get(_EXCLUDED), *hosts)))}

    def give_up(self, name: str, waited: str, starting: BoundedCall[Any]) -> tuple[str, str]:
        """Kill the application; return YARN's reason, and the remedy."""
        try:
            app = self.manager.find_by_tag(name)
            if app is None:
                return f"{waited}: it has not reached the ResourceManager", _MASTER
            remains = _kill(self.manager, app, starting)
        except HopsGpuError as error:
            return f"{waited}: {error}", _MASTER
        reason = app.diagnostics or "no reason given"
        return f"{waited}; it is {app.state}: {reason}{remains}", _MASTER

    def end_reason(self, container: str, host: str) -> str:
        return self.logs.reason(container, host)


def _kill(manager: ResourceManager, app: ApplicationState, starting: BoundedCall[Any]) -> str:
    """Ask YARN to kill an application; return a text if it may still be running, or ""."""
    try:
        manager.kill(app.id, app.user)
    except HopsGpuError as error:
        return f"; it is still running ({error}): {_BY_HAND} {app.id}"
    try:
        starting.result(_ENDING_SECONDS)
    except TimeoutError:
        return f"; it may still be running: {_BY_HAND} {app.id}"
    except Exception:  # noqa: BLE001 - Spark reports here that the application was killed
        return ""
    return f"; it has just started, and may still be running: {_BY_HAND} {app.id}"
