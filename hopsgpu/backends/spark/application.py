"""The state that hopsgpu keeps for one running Spark application on YARN."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.gang_queue import DEFAULT_PARTITION, make_queue_dir
from hopsgpu.backends.gang_queue_root import cluster_name, gang_queue_root
from hopsgpu.backends.spark.container_image import network_of, runtime_of
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.resource_profiles import ProfilePool
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.cluster_managers.yarn.container_runtime import runtime_problem, settings_of_runtime
from hopsgpu.cluster_managers.yarn.lost_nodes import why_lost
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath

_MAX_ASKED_NODES = 16
_SNAPSHOT_SECONDS = 10.0
_LABEL = "spark.yarn.executor.nodeLabelExpression"


class SnapshotCache:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._taken = float("-inf")

    def get(self, max_age: float, fetch: Callable[[], Snapshot]) -> Snapshot:
        with self._lock:
            if self._last is None or time.monotonic() - self._taken > max_age:
                began = time.monotonic()
                self._last = fetch()
                self._taken = began
            return self._last


@dataclass
class Application(GangApplication):
    """A SparkContext on YARN with the state that its gangs share.

    Attributes:
        package: the directory from which Spark serves hopsgpu to the executors.
        acquiring: lock held by the gang that acquires executors, until its barrier stage is active.
        failing: the hosts on which executors end before they are ready.
        snapshots: the last snapshot of the ResourceManager, which waiting gangs share.
        probing: lock held by the launch that queries an executor for modules.
        has_module: whether the executors' Python has a top-level module, by name of each queried
            module.
    """

    manager: ResourceManager
    package: tempfile.TemporaryDirectory[str]
    profiles: ProfilePool = field(default_factory=ProfilePool)
    acquiring: threading.Lock = field(default_factory=threading.Lock)
    failing: FailingHosts = field(default_factory=FailingHosts)
    snapshots: SnapshotCache = field(default_factory=SnapshotCache)
    probing: threading.Lock = field(default_factory=threading.Lock)
    has_module: dict[str, bool] = field(default_factory=dict)

    @property
    def driver_address(self) -> str:
        return self.option("address") or self.jvm.setting("spark.driver.host") or "127.0.0.1"

    @property
    def has_node_label(self) -> bool:
        """Return whether executors are requested by node label; YARN then accepts no hosts."""
        return bool(self.setting(_LABEL))

    def snapshot(self, max_age: float) -> Snapshot:
        """Return the state of YARN, at most `max_age` seconds old.

        Raises:
            HopsGpuError: the ResourceManager does not answer.
        """
        label = self.setting(_LABEL)
        return self.snapshots.get(max_age, lambda: self.manager.snapshot(self.id, self.user, label))

    def explain_loss(self, reason: str, host: str) -> str:
        return why_lost(reason, host, self.manager.nodes, lambda: self.manager.end_of(self.id))

    @functools.cached_property
    def node_managers(self) -> NodeManagers:
        return NodeManagers(self.jvm.hadoop, gpu_resource=self.manager.gpu_resource)

    @functools.cached_property
    def image_warnings(self) -> tuple[str, ...]:
        """Return why containers in the application's image are not usable on some nodes.

        A few nodes with GPUs are asked, once for each application.

        Raises:
            ConfigError: none of them starts containers in images.
        """
        runtime = runtime_of(self.setting)
        if runtime is None:
            return ()
        nodes = [node for node in self.snapshot(_SNAPSHOT_SECONDS).nodes if node.web]
        nodes.sort(key=lambda node: (not node.total.gpus, node.host))
        settings = self.node_managers.settings(
            nodes[:_MAX_ASKED_NODES], settings_of_runtime(runtime)
        )
        network = network_of(self.setting, runtime)
        problems = {
            host: problem
            for host, values in settings.items()
            if (problem := runtime_problem(runtime, values, network))
        }
        fatal = {host: problem for host, problem in problems.items() if problem.is_fatal}
        if fatal and len(fatal) == len(settings):
            host, problem = min(fatal.items())
            raise ConfigError(
                f"image={self.image!r}: no node that was asked starts containers in images; on"
                f" {host}, {problem.text}. See docs/docker.md, or leave image out"
            )
        return tuple(f"image on {host}: {problem.text}" for host, problem in problems.items())

    @functools.cached_property
    def gang_queue_dir(self) -> LakePath:
        """Return the directory of the queue of gangs, of all users of this partition; create it.

        Raises:
            ConfigError: `spark.hopsgpu.locks` is not a valid directory.
            StoreError: the lake failed.
        """
        base, names = gang_queue_root(self.option("locks"), self.default_fs, self.cluster)
        return make_queue_dir(base, *names, self.setting(_LABEL) or DEFAULT_PARTITION)

    @functools.cached_property
    def cluster(self) -> str:
        return cluster_name(self.jvm.hadoop, self.manager.addresses)
