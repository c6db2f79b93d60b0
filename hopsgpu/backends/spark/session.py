"""The creation of a SparkSession that can hold gangs."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hopsgpu.backends.spark.console import gateway
from hopsgpu.backends.spark.container_image import IMAGE, refuse_image
from hopsgpu.backends.spark.session_builder import attach_or_stop, create_session, new_builder
from hopsgpu.backends.spark.settings import check_session, check_submitted, is_cluster_mode
from hopsgpu.backends.spark.spark_kinds import spark_kind_of
from hopsgpu.backends.spark.spark_location import find_spark
from hopsgpu.backends.spark.spark_versions import (
    is_python_supported,
    jar_version,
    java_here,
    java_problem,
    java_versions,
    pyspark_problem,
    refuse,
    version_problem,
)
from hopsgpu.cluster_managers.local_masters import is_local
from hopsgpu.cluster_managers.manager_table import (
    LOCAL_MASTER,
    default_master,
)
from hopsgpu.core.boundary import public
from hopsgpu.core.image_names import check_image_name
from hopsgpu.core.own_log import level_of, show_on_stderr
from hopsgpu.errors import ConfigError
from hopsgpu.rank.context import VARIABLE
from hopsgpu.tracebacks import VARIABLE as LOG

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_TAGS = "spark.yarn.tags"
_OWN_TAG = re.compile(r"(^|,)hopsgpu-[0-9a-f]{12}$")
# No other machine connects to this application's JVM, and this machine may change its network.
_LOCAL_DEFAULTS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
}


@public
def session(
    name: str,
    *,
    master: str | None = None,
    conf: Mapping[str, object] | None = None,
    image: str | None = None,
) -> SparkSession:
    """Return a SparkSession that can hold gangs and releases their GPUs.

    The session runs on YARN, on a standalone master or on Kubernetes. It runs here if the master is
    local[N] or local[*], or if neither a Hadoop configuration (HADOOP_CONF_DIR) nor a master is
    given; a line on stderr then says so. A session on a cluster has dynamic allocation without a
    minimum, and the settings of docs/how-it-works.md; on YARN, the discovery script is shipped to
    the nodes. If an application already runs, or the driver runs in YARN (cluster mode), the
    settings are only checked: it is too late to ship the script.

    Args:
        name: name of the application.
        master: "yarn", "spark://HOST:PORT", "k8s://https://HOST:PORT", "local[*]" or "local[N]"; by
            default spark-submit's; else that of spark-defaults.conf if it is a cluster's; else
            "yarn" if HADOOP_CONF_DIR or YARN_CONF_DIR is set. Without any, the one of
            spark-defaults.conf, else "local[*]".
        conf: more Spark properties, which override hopsgpu's. Properties that prevent gangs are
            refused.
        image: container image in which all executors run, as "registry/name:tag": by YARN's Docker
            runtime (or runc, with `spark.hopsgpu.image.runtime`), or on Kubernetes. Their Python is
            the image's, of this Python's minor version: on its PATH, `python3.N` on YARN and
            `python3` on Kubernetes. By default, the image is `spark.hopsgpu.image` of
            spark-defaults.conf; without it, executors on YARN run in no image.

    Raises:
        ConfigError: a setting prevents gangs, or two settings name different resources of GPUs (the
            message says how to fix it); or the call is in a rank. Nothing was started.
        CapacityError: the queue (`spark.yarn.queue`) accepts no applications; nothing was
            submitted.
        HopsGpuError: the cluster manager does not answer.
    """
    if VARIABLE in os.environ:
        raise ConfigError(
            "a rank cannot start a Spark session: call session() in the driver, under"
            ' `if __name__ == "__main__":` in modules that ranks import, and pass rows with data='
        )
    requested = _check_conf(name, master, conf, image)
    show_on_stderr(level_of(requested.get("spark.hopsgpu.log") or os.environ.get(LOG)))
    master = default_master(requested, os.environ)
    if is_local(master) and IMAGE in requested:
        refuse_image(requested[IMAGE], "a local master")
    if master is not None and not is_local(master):
        # Refuse wrong settings before a JVM is started; it alone knows spark-submit's arguments.
        spark_kind_of(master).check({"spark.master": master, **requested})
    find_spark()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    _check_versions(os.environ)
    if "SPARK_REMOTE" in os.environ or "spark.remote" in requested:
        raise ConfigError(
            "Spark Connect has no JVM to ask, and hopsgpu.session() needs a classic session:"
            " unset SPARK_REMOTE and spark.remote"
        )
    running = SparkContext._active_spark_context
    if running is not None:
        log.info("session requested: application %s is already running", running.applicationId)
        _check_running(dict(running.getConf().getAll()), requested)
        return SparkSession.builder.getOrCreate()
    if master is None:
        # spark-submit has started the JVM, which alone knows the master.
        SparkContext._ensure_initialized()
        master = SparkConf().get("spark.master", LOCAL_MASTER)
    log.info("session requested: starts one on master %s", master)
    if is_local(master):
        return _start_local(name, master, requested)
    return spark_kind_of(master).start(name, master, requested)


def _check_versions(environ: Mapping[str, str]) -> None:
    """Check that PySpark, Spark and Java are compatible.

    Raises:
        ConfigError: they are not; no JVM was started.
    """
    import pyspark

    version, place = str(pyspark.__version__), str(Path(pyspark.__file__).parent)
    refuse(version_problem(version, place))
    if "PYSPARK_GATEWAY_PORT" in environ:
        return  # spark-submit has started the JVM, and Python imports the PySpark of that Spark
    if home := environ.get("SPARK_HOME"):
        jars = jar_version(Path(home, "jars"))
        refuse(pyspark_problem(version, place, jars, f"SPARK_HOME={home}"))
    java, where = java_here(environ)
    refuse(java_problem(version, java, where))
    if java is not None and java > java_versions(version)[-1]:
        log.warning("%s is Java %d, newer than those that Spark %s names", where, java, version)
    if not is_python_supported(version, platform.python_version()):
        log.warning(
            "PySpark %s names versions of Python up to 3.11, and this is %s",
            version,
            platform.python_version(),
        )


def _start_local(name: str, master: str, requested: Mapping[str, str]) -> SparkSession:
    """Return a session with a local master; print to stderr how it differs from YARN.

    Raises:
        ConfigError: an option `spark.hopsgpu.*` is invalid (the session is then stopped), or the
            driver runs in YARN, which expects a context on YARN.
    """
    from pyspark import SparkConf, SparkContext

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**_LOCAL_DEFAULTS, **requested, "spark.master": master}
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    SparkContext._ensure_initialized(gateway=gateway(conf), conf=conf)
    environment = dict(SparkConf().getAll())
    if is_cluster_mode(environment.get):
        check_submitted(environment.get, {"spark.master": master})
    return attach_or_stop(create_session(new_builder(name, settings)))


def _check_running(facts: dict[str, str], requested: Mapping[str, str]) -> None:
    if not is_local(facts.get("spark.master")):
        check_session(facts)
    # hopsgpu has added its own tag to the user's tags.
    tags = facts.get(_TAGS, "").rpartition(",")[0]
    effective = {**facts, _TAGS: tags} if _OWN_TAG.search(facts.get(_TAGS, "")) else facts
    late = {key: value for key, value in requested.items() if effective.get(key) != value}
    if late:
        raise ConfigError(
            "an application already runs, and these settings take effect only at its start: "
            + ", ".join(f"{key}={value} (it has {facts.get(key)})" for key, value in late.items())
            + ". Remove them, or call spark.stop() first"
        )


def _check_conf(
    name: object, master: object, conf: Mapping[str, object] | None, image: object
) -> dict[str, str]:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"name={name!r}: must be a string, the application's name")
    if master is not None and not isinstance(master, str):
        raise ConfigError(
            f"master={master!r}: must be 'yarn', 'spark://HOST:PORT', 'k8s://https://HOST:PORT',"
            " 'local[*]', 'local[N]' or None"
        )
    if conf is not None and not isinstance(conf, Mapping):
        raise ConfigError(f"conf={conf!r}: must be a mapping of Spark properties to values")
    settings = {}
    for key, value in (conf or {}).items():
        if not isinstance(key, str) or not isinstance(value, (str, int, float, bool)):
            raise ConfigError(
                f"conf has {key!r}: {value!r}; the key must be the name of a property, and the"
                " value a string, a number or a bool"
            )
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    if master is not None:
        settings["spark.master"] = master
    if image is not None:
        check_image_name(image, "image")
        settings[IMAGE] = str(image)
    return settings
