"""What hopsgpu keeps for one running Spark application."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from dataclasses import dataclass, field

from pyspark import SparkContext
from pyspark.sql import SparkSession

from hopsgpu.errors import ConfigError
from hopsgpu.spark.checks import check_session
from hopsgpu.spark.jvm import Jvm
from hopsgpu.spark.profiles import ProfilePool
from hopsgpu.spark.shipping import ship_package
from hopsgpu.yarn.resource_manager import GPU, ResourceManager, web_addresses

_ATTRIBUTE = "_hopsgpu_application"


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
    """

    context: SparkContext
    jvm: Jvm
    manager: ResourceManager
    package: tempfile.TemporaryDirectory[str]
    profiles: ProfilePool = field(default_factory=ProfilePool)
    acquiring: threading.Lock = field(default_factory=threading.Lock)

    @property
    def id(self) -> str:
        """YARN's application id."""
        return str(self.context.applicationId)

    @property
    def driver_address(self) -> str:
        """The address at which executors reach the driver."""
        own = self.jvm.setting("spark.hopsgpu.address") or os.environ.get("HOPSGPU_ADDRESS")
        return own or self.jvm.setting("spark.driver.host") or "127.0.0.1"

    @property
    def ports(self) -> range | None:
        """Ports for the control channel, as `spark.hopsgpu.ports` says ("40000-40100").

        Raises:
            ConfigError: the property is not two ports.
        """
        given = self.jvm.setting("spark.hopsgpu.ports") or os.environ.get("HOPSGPU_PORTS")
        if given is None:
            return None
        match = re.fullmatch(r"(\d+)-(\d+)", given.strip())
        if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
            raise ConfigError(
                f"spark.hopsgpu.ports={given!r}: a first and a last port are wanted, as 40000-40100"
            )
        return range(int(match[1]), int(match[2]) + 1)

    def setting(self, name: str) -> str | None:
        """An administrator's or a user's Spark property, or None."""
        return self.jvm.setting(name)


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
    application.ports  # noqa: B018 - refused now rather than in a run
    return application
