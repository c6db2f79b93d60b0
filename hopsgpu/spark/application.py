"""What hopsgpu keeps for one running Spark application."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark import SparkContext
from pyspark.sql import SparkSession

from hopsgpu.errors import ConfigError
from hopsgpu.gpu_types import parse_markers
from hopsgpu.spark.checks import check_session
from hopsgpu.spark.jvm import Jvm
from hopsgpu.spark.profiles import ProfilePool
from hopsgpu.spark.shipping import ship_package
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.line import make_line
from hopsgpu.units import parse_duration
from hopsgpu.worker.heartbeat import HEARTBEAT_SECONDS
from hopsgpu.yarn.amounts import GPU
from hopsgpu.yarn.lost_nodes import why_lost
from hopsgpu.yarn.node_manager import NodeManagers
from hopsgpu.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.yarn.snapshot import Snapshot

_ATTRIBUTE = "_hopsgpu_application"
_LABEL = "spark.yarn.executor.nodeLabelExpression"


class Looks:
    """Remembers a snapshot for those who ask soon after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._taken = float("-inf")

    def get(self, most_seconds: float, look: Callable[[], Snapshot]) -> Snapshot:
        """The last snapshot where it is young enough, else a new one."""
        with self._lock:
            if self._last is None or time.monotonic() - self._taken > most_seconds:
                began = time.monotonic()
                self._last = look()
                self._taken = began
            return self._last


@dataclass
class Application:
    """One SparkContext and what gangs in it share.

    Attributes:
        context: Spark's.
        jvm: its JVM.
        manager: the ResourceManager.
        profiles: who uses which resource profile.
        package: the directory from which Spark serves hopsgpu to the executors.
        acquiring: held by the one gang that acquires, until its barrier stage is active.
        looks: the last look at the ResourceManager, which gangs that wait share.
    """

    context: SparkContext
    jvm: Jvm
    manager: ResourceManager
    package: tempfile.TemporaryDirectory[str]
    profiles: ProfilePool = field(default_factory=ProfilePool)
    acquiring: threading.Lock = field(default_factory=threading.Lock)
    looks: Looks = field(default_factory=Looks)

    @property
    def id(self) -> str:
        """YARN's application id."""
        return str(self.context.applicationId)

    @property
    def driver_address(self) -> str:
        """The address at which executors reach the driver."""
        return self.option("address") or self.jvm.setting("spark.driver.host") or "127.0.0.1"

    @property
    def ports(self) -> range | None:
        """Ports for the control channel, as `spark.hopsgpu.ports` says ("40000-40100").

        Raises:
            ConfigError: the property is not two ports.
        """
        given = self.option("ports")
        if given is None:
            return None
        match = re.fullmatch(r"(\d+)-(\d+)", given.strip())
        if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
            raise ConfigError(
                f"spark.hopsgpu.ports={given!r}: a first and a last port are wanted, as 40000-40100"
            )
        return range(int(match[1]), int(match[2]) + 1)

    @property
    def interface(self) -> str | None:
        """The nodes' network interface that gloo, NCCL and addresses go by; None for any."""
        return self.option("interface")

    @property
    def markers(self) -> dict[str, str]:
        """YARN resources that mark nodes, by the type of their GPUs.

        Raises:
            ConfigError: `spark.hopsgpu.markers` is of another form than "A100=gpu-a100".
        """
        return parse_markers(self.option("markers"))

    @property
    def labelled(self) -> bool:
        """Whether executors are asked for by a node label; YARN then takes no hosts beside it."""
        return bool(self.setting(_LABEL))

    @property
    def heartbeat(self) -> float:
        """Seconds without a sign of life after which driver or executor is taken for lost.

        Raises:
            ConfigError: `spark.hopsgpu.heartbeat` is no duration.
        """
        given = self.option("heartbeat")
        return parse_duration(given or HEARTBEAT_SECONDS, "spark.hopsgpu.heartbeat") or 0.0

    @property
    def retries_code_too(self) -> bool:
        """Whether `retries` also serve errors that all ranks raise at once.

        Raises:
            ConfigError: `spark.hopsgpu.retry` is neither "failures" nor "all".
        """
        given = self.option("retry") or "failures"
        if given not in ("failures", "all"):
            raise ConfigError(
                f"spark.hopsgpu.retry={given!r}: 'failures' is accepted, or 'all' to try again"
                " what looks like an error of the code too"
            )
        return given == "all"

    @property
    def queue(self) -> str:
        """YARN's queue, as the application was submitted to it."""
        return self.setting("spark.yarn.queue") or "default"

    def snapshot(self, most_seconds: float) -> Snapshot:
        """How YARN stands, looked at so many seconds ago at most.

        Raises:
            HopsGpuError: the ResourceManager does not answer.
        """
        label = self.setting(_LABEL)
        return self.looks.get(
            most_seconds, lambda: self.manager.snapshot(self.id, self.user, label)
        )

    def why_lost(self, reason: str, host: str) -> str:
        """Why an executor on a host was lost: Spark's reason with what YARN says."""
        return why_lost(reason, host, self.manager.nodes, lambda: self.manager.end_of(self.id))

    @functools.cached_property
    def node_managers(self) -> NodeManagers:
        """The nodes, to be asked for their GPUs."""
        return NodeManagers(self.jvm.hadoop)

    @functools.cached_property
    def user(self) -> str:
        """Who submitted it, as YARN and HDFS know it."""
        return self.jvm.user()

    @functools.cached_property
    def line(self) -> Lake:
        """Where the gangs of this cluster partition, of all users, stand in line; it is made.

        Raises:
            ConfigError: `spark.hopsgpu.locks` is no place for it.
            StoreError: the lake refuses.
        """
        given = self.option("locks")
        partition = self.setting(_LABEL) or "default"
        if given:
            return make_line(Lake(given, quick=True), self.cluster, partition)
        files = (self.jvm.hadoop("fs.defaultFS") or "file:///").rstrip("/")
        return make_line(
            Lake(f"{files}/tmp", quick=True), "hopsgpu", "locks", self.cluster, partition
        )

    @functools.cached_property
    def cluster(self) -> str:
        """A name of this YARN among those that share the file system."""
        named = self.jvm.hadoop("yarn.resourcemanager.cluster-id")
        return re.sub(r"[^\w.-]+", "-", named or self.manager.addresses[0].partition("//")[2])

    def setting(self, name: str) -> str | None:
        """An administrator's or a user's Spark property, or None."""
        return self.jvm.setting(name)

    def option(self, name: str) -> str | None:
        """The Spark property `spark.hopsgpu.<name>`, else its twin in the environment, or None."""
        return self.setting(f"spark.hopsgpu.{name}") or os.environ.get(f"HOPSGPU_{name.upper()}")


def application_of(spark: SparkSession | None) -> Application:
    """The application of a session, the active one by default; its settings are checked.

    Raises:
        ConfigError: no session, one that has ended, or one that cannot hold gangs.
    """
    if spark is not None and not isinstance(spark, SparkSession):
        raise ConfigError(f"spark={spark!r}: a classic SparkSession is wanted")
    # Not the active session: that is a matter of each thread, and a context one of the process.
    context = spark.sparkContext if spark is not None else SparkContext._active_spark_context
    if context is None:
        raise ConfigError(
            "there is no active SparkSession: make one by hopsgpu.session(name), or pass spark="
        )
    if context._jsc is None or context._jsc.sc().isStopped():
        raise ConfigError(
            "this Spark application has ended: spark.stop(), and make a session by"
            " hopsgpu.session(name)"
        )
    # PySpark's own lock around its one context: two first launches make one Application.
    with SparkContext._lock:
        found: Application | None = getattr(context, _ATTRIBUTE, None)
        if found is None:
            found = _application(context)
            # Lives exactly as long as the context that it describes.
            setattr(context, _ATTRIBUTE, found)
    return found


def _application(context: SparkContext) -> Application:
    jvm = Jvm(context)
    check_session(jvm.setting)
    if not jvm.knows_resource(GPU):
        raise ConfigError(
            f"{GPU} is unknown here: resource-types.xml in HADOOP_CONF_DIR must name it in"
            " yarn.resource-types, as on the ResourceManager"
        )
    manager = ResourceManager(web_addresses(jvm.hadoop))
    application = Application(context, jvm, manager, ship_package(context))
    # Refused now rather than in a run.
    _ = application.ports, application.heartbeat, application.retries_code_too, application.markers
    return application
