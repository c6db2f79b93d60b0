"""A SparkSession that can hold gangs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopsgpu.discovery.shipping import ALIAS, pack_scripts
from hopsgpu.errors import ConfigError
from hopsgpu.gpu_types import parse_markers
from hopsgpu.spark.checks import SESSION_DEFAULTS, check_session
from hopsgpu.spark.shipping import pack_package
from hopsgpu.yarn.queues import check_queue
from hopsgpu.yarn.resource_manager import ResourceManager, web_addresses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PY_FILES = "spark.yarn.dist.pyFiles"
_MARKERS = "spark.hopsgpu.markers"
_STARTS = 3
_UI_RACE = "java.util.ConcurrentModificationException"


def session(
    name: str, *, master: str | None = None, conf: Mapping[str, object] | None = None
) -> SparkSession:
    """A SparkSession that can hold gangs and gives their GPUs back.

    Dynamic allocation with shuffle tracking and without minimum, the discovery script shipped
    to the nodes, and the settings of docs/how-it-works.md. Where an application runs already the
    script can be shipped no more: there the settings are checked.

    Args:
        name: the application's name.
        master: "yarn"; by default what spark-submit or spark-defaults.conf say, else "yarn".
        conf: more Spark properties; they win over ours, and are refused where they cannot work.

    Raises:
        ConfigError: a setting that cannot hold gangs, with what mends it; nothing was started.
        CapacityError: the queue (`spark.yarn.queue`) takes no applications; nothing was submitted.
        HopsGpuError: the ResourceManager does not answer.
    """
    given = _checked_conf(name, master, conf)
    # What can be refused is refused before a JVM is started.
    check_session({**_ours(given), "spark.yarn.dist.archives": f"#{ALIAS}"}.get)
    find_spark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if "SPARK_REMOTE" in os.environ or "spark.remote" in given:
        raise ConfigError(
            "Spark Connect has no JVM to ask; hopsgpu.session() needs a classic session:"
            " unset SPARK_REMOTE and spark.remote"
        )
    running = SparkContext._active_spark_context
    if running is not None:
        _check_running(dict(running.getConf().getAll()), given)
        return SparkSession.builder.getOrCreate()
    return _started(name, given)


def _ours(given: Mapping[str, str]) -> dict[str, str]:
    """The user's settings over what a gang needs; both win over spark-defaults.conf."""
    return {"spark.master": "yarn", **SESSION_DEFAULTS, **given}


def _check_running(facts: dict[str, str], wishes: Mapping[str, str]) -> None:
    """Checks an application that runs already; what it was not started with comes too late."""
    check_session(facts.get)
    late = {key: value for key, value in wishes.items() if facts.get(key) != value}
    if late:
        raise ConfigError(
            "an application runs already, and these settings count only at its start: "
            + ", ".join(f"{key}={value} (it has {facts.get(key)})" for key, value in late.items())
            + ". Leave them out, or spark.stop() first"
        )


def _started(name: str, given: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted and not (os.environ.keys() & {"HADOOP_CONF_DIR", "YARN_CONF_DIR"}):
        raise ConfigError(
            "HADOOP_CONF_DIR is not set, so YARN cannot be found: set it to the cluster's Hadoop"
            ' configuration (for the development cluster: eval "$(hopsgpu cluster env)")'
        )
    # The executors' Python is the driver's unless somebody said otherwise; Spark reads this
    # variable, and not the property, when a plain script starts the context.
    if "spark.pyspark.python" in given:
        os.environ["PYSPARK_PYTHON"] = given["spark.pyspark.python"]
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = _ours(given)
    # Starts the JVM as the context itself would. Only it knows spark-defaults.conf and what
    # spark-submit was told, and files that those ship must go on being shipped.
    SparkContext._ensure_initialized(
        conf=SparkConf(loadDefaults=False).setAll(list(settings.items()))
    )
    environment = dict(SparkConf().getAll())
    if submitted:
        # What spark-submit was told, spark-defaults.conf among it, is the user's own word.
        settings = settings | environment | dict(given)
    with tempfile.TemporaryDirectory(prefix="hopsgpu-ship-") as directory:
        shipped = environment | settings
        markers = parse_markers(shipped.get(_MARKERS) or os.environ.get("HOPSGPU_MARKERS"))
        scripts = pack_scripts(Path(directory) / "hopsgpu-discovery.tar.gz", markers.values())
        settings["spark.yarn.dist.archives"] = _joined(
            shipped.get("spark.yarn.dist.archives"), f"{scripts.as_uri()}#{ALIAS}"
        )
        # For the daemon, which is there before any task can bring it what Spark serves.
        package = pack_package(Path(directory) / "hopsgpu-shipped.zip")
        settings[_PY_FILES] = _joined(shipped.get(_PY_FILES), package.as_uri())
        check_session((environment | settings).get)
        _check_queue((environment | settings).get("spark.yarn.queue", "default"))
        builder = SparkSession.builder.appName(name)
        for key, value in settings.items():
            builder = builder.config(key, value)
        # YARN has its copies when this returns.
        return _created(builder)


def _check_queue(name: str) -> None:
    """Refuses a queue that takes no application, before one is submitted."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    hadoop = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
    check_queue(name, ResourceManager(web_addresses(hadoop.get)).queues())


def _created(builder: SparkSession.Builder) -> SparkSession:
    """The session; started again where Spark's user interface tripped over itself.

    Spark attaches the pages of its UI while the application master's filter is added to them, with
    no lock between the two: now and then a start fails by it, more often on few cores. Spark has
    stopped that context then, and the JVM takes a new one.
    """
    from py4j.protocol import Py4JJavaError

    for _ in range(_STARTS - 1):
        try:
            return builder.getOrCreate()
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() != _UI_RACE:
                raise
    return builder.getOrCreate()


def _checked_conf(
    name: object, master: object, conf: Mapping[str, object] | None
) -> dict[str, str]:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"name={name!r}: the application's name, a string, is wanted")
    if master is not None and not isinstance(master, str):
        raise ConfigError(f"master={master!r}: 'yarn' or None is wanted")
    if conf is not None and not isinstance(conf, Mapping):
        raise ConfigError(f"conf={conf!r}: a mapping of Spark properties to values is wanted")
    settings = {}
    for key, value in (conf or {}).items():
        if not isinstance(key, str) or not isinstance(value, (str, int, float, bool)):
            raise ConfigError(
                f"conf has {key!r}: {value!r}; a property's name with a string, a number or a"
                " truth value is wanted"
            )
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    if master is not None:
        settings["spark.master"] = master
    return settings


def _joined(first: str | None, second: str) -> str:
    return f"{first},{second}" if first else second


def find_spark() -> None:
    """Makes pyspark importable: the environment's, else the cluster's own (SPARK_HOME).

    Raises:
        ConfigError: there is none.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError:
        import findspark

        try:
            findspark.init()
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"no Spark was found ({error}): install pyspark, or set SPARK_HOME to the"
                " cluster's Spark"
            ) from error
