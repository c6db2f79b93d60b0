"""YARN as a cluster manager: the ResourceManager and the NodeManagers of a Hadoop configuration."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence

from hopsgpu.cluster_managers.manager import ClusterManager, HeldExecutors
from hopsgpu.cluster_managers.node_gpu_list import NodeAnswers
from hopsgpu.cluster_managers.snapshot import Node, Overview, Snapshot
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.cluster_managers.yarn.lost_nodes import why_lost
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.queues import check_queue
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.cluster_managers.yarn.submitted_drivers import YarnDrivers
from hopsgpu.core.run_record import ApplicationReport
from hopsgpu.errors import ConfigError
from hopsgpu.storage.identity import hadoop_user, own_name
from hopsgpu.storage.kerberos import is_kerberized

log = logging.getLogger(__name__)

_APPLICATION = re.compile(r"application_\d+_\d+")


def cluster_name(setting: Callable[[str], str | None], addresses: Sequence[str]) -> str:
    """Return a name of this YARN cluster, unique among those that share the file system.

    Args:
        addresses: base URLs of the ResourceManagers.
    """
    cluster_id = setting("yarn.resourcemanager.cluster-id")
    return re.sub(r"[^\w.-]+", "-", cluster_id or addresses[0].partition("//")[2])


class YarnManager(ClusterManager):
    """A client of YARN.

    Args:
        setting: returns a property of Hadoop's configuration, or None.
        gpu_resource: name of the YARN resource that counts GPUs.
        queue: the queue that applications of the caller are submitted to.
        partition: the node label that snapshots are for; None for the application's own.
        seconds: limits to connect to the ResourceManager, and to be answered; None for defaults.

    Attributes:
        resource_manager: the client of the ResourceManager, for what only YARN has.
        node_managers: the client of the NodeManagers.

    Raises:
        ConfigError: the file that `hopsgpu.hosts` names cannot be read.
    """

    def __init__(
        self,
        setting: Callable[[str], str | None],
        *,
        gpu_resource: str = DEFAULT_GPU_RESOURCE,
        partition: str | None = None,
        queue: str = "default",
        seconds: tuple[float, float] | None = None,
    ) -> None:
        limits = {} if seconds is None else {"seconds": seconds}
        self.resource_manager = ResourceManager(
            web_addresses(setting), gpu_resource=gpu_resource, **limits
        )
        self.node_managers = NodeManagers(setting, gpu_resource=gpu_resource)
        self._setting = setting
        self._partition = partition
        self._queue = queue

    @property
    def title(self) -> str:
        return "YARN"

    @property
    def cluster(self) -> str:
        return cluster_name(self._setting, self.resource_manager.addresses)

    @property
    def gpu_resource(self) -> str:
        return self.resource_manager.gpu_resource

    @property
    def pages(self) -> str:
        """Return the URL of the first ResourceManager: a standby one redirects browsers."""
        return next(iter(self.resource_manager.addresses), "")

    def application_page(self, application_id: str) -> str:
        return f"{self.pages}/cluster/app/{application_id}" if self.pages else ""

    @property
    def queues_page(self) -> str:
        return f"{self.pages}/cluster/scheduler" if self.pages else ""

    def nodes(self) -> tuple[Node, ...]:
        return self.resource_manager.nodes()

    def devices(self, nodes: Sequence[Node]) -> NodeAnswers:
        # A NodeManager without an address is not running.
        return self.node_managers.devices([node for node in nodes if node.web])

    def snapshot(self, application_id: str, user: str) -> Snapshot:
        return self.resource_manager.snapshot(application_id, user, self._partition)

    def overview(self, user: str) -> Overview:
        return self.resource_manager.overview(user)

    def caller(self) -> str:
        """Return the caller as YARN reports it, else as Hadoop's clients determine it."""
        if is_kerberized(self._setting):
            name = self.resource_manager.user()
            # If the web pages do not use Kerberos, every caller is the static user.
            if name not in (None, self._setting("hadoop.http.staticuser.user") or "dr.who"):
                return str(name)
        try:
            return hadoop_user(self._setting, os.environ)
        except ConfigError as error:  # YARN has answered without a ticket
            log.info("the user is taken for %s: %s", own_name(), error)
            return own_name()

    def check_submission(self) -> None:
        check_queue(self._queue, self.resource_manager.queues())

    def submitted_drivers(self) -> YarnDrivers:
        return YarnDrivers(self.resource_manager, self.node_managers)

    def held_executors(self, application_id: str, profile_id: int) -> HeldExecutors:
        # Spark's priority of a request is the profile's ID.
        return self.resource_manager.held_containers(application_id, profile_id)

    def are_gpus_ending(self) -> bool:
        return self.resource_manager.gpus_ending() > 0

    def why_lost(self, application_id: str, reason: str, host: str, container_id: str = "") -> str:
        return why_lost(reason, host, self.nodes, lambda: self.end_of(application_id))

    def end_of(self, application_id: str) -> str:
        return self.resource_manager.end_of(application_id)

    def report(self, application_id: str) -> ApplicationReport | None:
        if not _APPLICATION.fullmatch(application_id):
            return None
        return _report_of(self.resource_manager.application_state(application_id))

    def ended_since(self, time: float) -> Mapping[str, ApplicationReport]:
        return {state.id: _report_of(state) for state in self.resource_manager.ended_since(time)}


def _report_of(state: ApplicationState) -> ApplicationReport:
    return ApplicationReport(state.state, state.diagnostics, state.has_ended)
