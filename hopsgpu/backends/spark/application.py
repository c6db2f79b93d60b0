"""The state that hopsgpu keeps for one running Spark application on a cluster manager."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pyspark.resource import ResourceProfile

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.gang_queue import DEFAULT_PARTITION, make_queue_dir
from hopsgpu.backends.gang_queue_root import gang_queue_root
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.queue_directory import GangQueueDirectory
from hopsgpu.backends.spark.executor_admission import ExecutorAdmissions
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.log4j import CapturedLog
from hopsgpu.backends.spark.resource_profiles import DEFAULT_PROFILE, ProfilePool
from hopsgpu.cluster_managers.flavors import Flavors
from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.manager import ClusterManager, StartProblem
from hopsgpu.cluster_managers.manager_table import required_kind
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.core.gang import GangExecutor


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
    """A SparkContext on a cluster manager with the state that its gangs share.

    Attributes:
        package: the directory from which Spark serves hopsgpu to the executors.
        acquiring: lock held by the gang that acquires executors, until its barrier stage is active.
        failing: the hosts on which executors end before they are ready.
        snapshots: the last snapshot of the cluster manager, which waiting gangs share.
        probing: lock held by the launch that queries an executor for modules.
        has_module: whether the executors' Python has a top-level module, by name of each queried
            module.
    """

    manager: ClusterManager
    package: tempfile.TemporaryDirectory[str]
    profiles: ProfilePool = field(default_factory=ProfilePool)
    acquiring: threading.Lock = field(default_factory=threading.Lock)
    failing: FailingHosts = field(default_factory=FailingHosts)
    snapshots: SnapshotCache = field(default_factory=SnapshotCache)
    probing: threading.Lock = field(default_factory=threading.Lock)
    has_module: dict[str, bool] = field(default_factory=dict)

    @functools.cached_property
    def kind(self) -> ManagerKind:
        return required_kind(self.setting("spark.master"))

    @property
    def driver_address(self) -> str:
        return self.option("address") or self.jvm.setting("spark.driver.host") or "127.0.0.1"

    @property
    def settle_seconds(self) -> float:
        """Return the seconds within which Spark's requests have reached the cluster manager."""
        return self.kind.settle_seconds(self.setting)

    @property
    def partition(self) -> str:
        """Return the partition of the cluster that executors are requested from; "" for all."""
        return ""

    @property
    def can_prefer_hosts(self) -> bool:
        """Return whether the cluster manager takes the hosts that tasks prefer into account."""
        return True

    @property
    def setup_warnings(self) -> tuple[str, ...]:
        """Return what may keep executors from starting, or runs from lasting, for people.

        Raises:
            ConfigError: no executor can start.
        """
        return ()

    def check_wait(self, seconds: float | None) -> None:
        """Check that the driver's credentials last while a gang may wait.

        Raises:
            ConfigError: they do not.
        """

    def check_marker(self, marker: str, gpu_type: str) -> None:
        """Check that executors can request the resource that marks nodes with GPUs of a type.

        Raises:
            ConfigError: they cannot.
        """

    def admissions(self) -> contextlib.AbstractContextManager[ExecutorAdmissions]:
        """Provide what a queue besides hopsgpu's admits; all admissions end on exit.

        Raises:
            ConfigError: it is unclear which queue that is.
        """
        return contextlib.nullcontext(ExecutorAdmissions())

    def placing(
        self,
        request: Request,
        profile: ResourceProfile,
        flavors: Flavors,
        excluded_hosts: Collection[str] = (),
    ) -> contextlib.AbstractContextManager[None]:
        """Have the cluster manager follow a gang's placement while inside, where it can.

        Args:
            flavors: the nodes on which the executors were admitted.
            excluded_hosts: hosts that must not get an executor.
        """
        return contextlib.nullcontext()

    def find_start_problem(self, profile: ResourceProfile | None) -> StartProblem | None:
        """Return what keeps requested executors of a profile from starting; None if they start.

        Args:
            profile: None for Spark's default profile.
        """
        profile_id = DEFAULT_PROFILE if profile is None else profile.id
        return self.manager.find_start_problem(self.id, profile_id)

    def end_executors(self, executors: Collection[str]) -> None:
        """End executors that Spark has killed, where that takes another request.

        Args:
            executors: Spark's IDs of the executors.
        """

    def end_revoked(self, executors: Collection[str], why: str) -> None:
        """End executors whose admission was revoked; their loss has this reason.

        Args:
            executors: Spark's IDs of the executors.

        Raises:
            HopsGpuError: the cluster manager does not answer; the caller tries again.
        """

    def end_rest(self, profile_id: int) -> None:
        """Remove executors that Spark itself removes only after a while.

        Args:
            profile_id: ID of a resource profile of which Spark wants no executor.
        """

    def end_stranded(self, containers: Mapping[str, str]) -> None:
        """Give up executors of nodes that no longer report, where somebody has to do that.

        Args:
            containers: host of each executor that is to end, by its container's ID.
        """

    def removals(self) -> CapturedLog | None:
        """Return Spark's messages about executors that end, from now on; None without any."""
        return None

    def snapshot(self, max_age: float) -> Snapshot:
        """Return the state of the cluster manager, at most `max_age` seconds old.

        Raises:
            HopsGpuError: the cluster manager does not answer.
        """
        return self.snapshots.get(max_age, lambda: self.manager.snapshot(self.id, self.user))

    def explain_loss(self, reason: str, container: GangExecutor) -> str:
        return self.manager.why_lost(self.id, reason, container.host, container.container_id)

    @functools.cached_property
    def gang_queue_dir(self) -> GangQueueDirectory:
        """Return the directory of the queue of gangs, of all users of this partition; create it.

        Raises:
            ConfigError: `spark.hopsgpu.locks` is not a valid directory.
            StoreError: the lake failed.
        """
        base, names = gang_queue_root(self.option("locks"), self.default_fs, self.manager.cluster)
        return make_queue_dir(base, *names, self.partition or DEFAULT_PARTITION)
