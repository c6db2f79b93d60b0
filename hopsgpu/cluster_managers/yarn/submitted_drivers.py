"""Drivers in YARN: in cluster mode a driver runs in the application master's container."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hopsgpu.cluster_managers.submitted_drivers import DriverState, SubmittedDrivers
from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.queues import queue_path
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager

# Parts of a text that change with each heartbeat of a node: the time, and the queue's usage.
_CHANGING_PARTS = re.compile(r"(?<=: )\[[^]]*\] |\s+(?:Details :|Last Node which was processed).*")


class YarnDrivers(SubmittedDrivers):
    """The drivers that YARN runs.

    Args:
        nodes: the NodeManagers, for the drivers' logs.
    """

    def __init__(self, manager: ResourceManager, nodes: NodeManagers) -> None:
        self._manager = manager
        self._nodes = nodes
        self._queue_paths: tuple[str, ...] | None = None

    def find(self, tag: str) -> DriverState | None:
        application = self._manager.find_by_tag(tag)
        return None if application is None else self._driver_state(application)

    def state(self, application_id: str) -> DriverState:
        return self._driver_state(self._manager.application_state(application_id))

    def end(self, state: DriverState) -> None:
        self._manager.kill(state.id, state.user)

    def outputs(self, state: DriverState) -> Sequence[str]:
        if state.has_succeeded:
            return ("stdout",)
        # The output of a killed application shows only how Spark ended.
        return () if state.is_killed else ("stdout", "stderr")

    def read_end(self, state: DriverState, output: str, max_bytes: int) -> str:
        return self._nodes.log(state.node, state.driver, output, max_bytes)

    def log_command(self, state: DriverState) -> str:
        return f"yarn logs -applicationId {state.id}"

    def list_command(self) -> str:
        return "yarn application -list"

    def end_command(self, application_id: str) -> str:
        return f"yarn application -kill {application_id}"

    def _driver_state(self, application: ApplicationState) -> DriverState:
        if self._queue_paths is None:
            self._queue_paths = tuple(queue.path for queue in self._manager.queues())
        situation = _situation(application)
        return DriverState(
            id=application.id,
            name=application.name,
            user=application.user,
            place=f"queue {queue_path(application.queue, self._queue_paths)}",
            situation=situation,
            gist=_CHANGING_PARTS.sub("", situation),
            driver=application.master,
            node=application.web,
            log=self._log(application),
            has_ended=application.has_ended,
            has_succeeded=application.has_succeeded,
            is_killed=application.state == "KILLED",
            outcome=application.final if application.state == "FINISHED" else application.state,
            diagnostics=application.diagnostics,
            exit_code=application.exit_code,
        )

    def _log(self, application: ApplicationState) -> str:
        if not application.log:
            return ""
        # `base` replaces host names that only YARN's daemons know.
        path = application.log.partition("//")[2].partition("/")[2]
        return f"{self._nodes.base(application.web)}/{path}"


def _situation(application: ApplicationState) -> str:
    if application.state == "RUNNING":
        return f"RUNNING, GPUs held: {application.gpus}"
    return f"{application.state}: {application.diagnostics or 'no reason given'}"
