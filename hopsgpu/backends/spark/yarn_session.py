"""The start of a SparkSession on YARN."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopsgpu.backends.spark.authorities import shipped_bundle
from hopsgpu.backends.spark.console import gateway
from hopsgpu.backends.spark.container_image import IMAGE, image_properties
from hopsgpu.backends.spark.package_archive import (
    ARCHIVES,
    MARKERS,
    PACKAGE,
    PY_FILES,
    pack_package,
    with_entry,
)
from hopsgpu.backends.spark.pyspark_archives import bytecode_of_new_jvm
from hopsgpu.backends.spark.session_builder import choose_python, create_session, new_builder
from hopsgpu.backends.spark.settings import check_session, is_cluster_mode, session_defaults
from hopsgpu.cluster_managers.yarn.gpu_resource import SPARK_SETTING, choose_gpu_resource
from hopsgpu.cluster_managers.yarn.queues import check_queue
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.core.gpu_types import parse_markers
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.gpu.script_archive import ALIAS, pack_scripts
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
from hopsgpu.storage.identity import ensure_credentials
from hopsgpu.storage.spark_defaults import spark_defaults

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from hopsgpu.backends.spark.cluster_application import ClusterApplication
    from hopsgpu.backends.spark.jvm import Jvm

log = logging.getLogger(__name__)

_PYTHON = "spark.pyspark.python"
_PYTHON_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_TAGS = "spark.yarn.tags"


def check_yarn(requested: Mapping[str, str]) -> None:
    """Check settings that are known before a JVM is started.

    Raises:
        ConfigError: a setting prevents gangs.
    """
    choose_gpu_resource({**spark_defaults(os.environ), **requested}, os.environ)
    check_session({**_ours(requested), ARCHIVES: f"#{ALIAS}"})


def attach_to_yarn(context: SparkContext, jvm: Jvm) -> ClusterApplication:
    """Return the application of a running context; see `yarn_application`."""
    # A late import: a session finds Spark before anything imports pyspark.
    from hopsgpu.backends.spark.yarn_application import yarn_application

    return yarn_application(context, jvm)


def start_on_yarn(name: str, master: str, requested: Mapping[str, str]) -> SparkSession:
    """Return a session on YARN.

    Raises:
        ConfigError, CapacityError, HopsGpuError: as `hopsgpu.session`.
    """
    with _python_of_image_only_here():
        return _start(name, requested)


def _ours(requested: Mapping[str, str]) -> dict[str, str]:
    """Return a gang's settings, overridden by the user's; both override spark-defaults.conf."""
    return {"spark.master": "yarn", **session_defaults("yarn"), **requested}


def _start(name: str, requested: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkConf, SparkContext

    from hopsgpu.backends.spark.yarn_driver import act_for_submitter, settings_inside

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted and not is_configured(os.environ):
        raise ConfigError(
            "HADOOP_CONF_DIR is not set, so YARN cannot be found: set it to the cluster's Hadoop"
            ' configuration (for the development cluster: eval "$(hopsgpu cluster env)");'
            " master='local[*]' runs on this machine"
        )
    settings = _ours(requested)
    if not is_submitted:
        defaults = spark_defaults(os.environ)
        settings |= image_properties({**defaults, **settings}.get, os.environ, _PYTHON_VERSION)
        choose_python(settings.get(_PYTHON))
        # Check before a JVM starts: without a ticket it would print a stack every second.
        ensure_credentials(
            HadoopConf.load_hdfs(os.environ).get, {**defaults, **settings}.get, os.environ
        )
    elif _PYTHON in requested:
        os.environ["PYSPARK_PYTHON"] = requested[_PYTHON]
    # Start the JVM as the context would. Only the JVM knows spark-defaults.conf and spark-submit's
    # arguments, and the files that they name must still be shipped.
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with bytecode_of_new_jvm():
        SparkContext._ensure_initialized(gateway=gateway(conf), conf=conf)
    environment = dict(SparkConf().getAll())
    if is_cluster_mode(environment.get):
        inside = settings_inside(settings, environment, requested)
        session = create_session(new_builder(name, inside))
        act_for_submitter(session.sparkContext)
        return session
    if is_submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # The settings of spark-submit, including spark-defaults.conf, are the user's settings.
        settings = settings | environment | dict(requested)
        settings |= image_properties(settings.get, os.environ, _PYTHON_VERSION)
        if IMAGE in settings:
            choose_python(settings[_PYTHON])
        ensure_credentials(HadoopConf.load_hdfs(os.environ).get, settings.get, os.environ)
    with tempfile.TemporaryDirectory(prefix="hopsgpu-ship-") as directory:
        shipped = environment | settings
        markers = parse_markers(shipped.get(MARKERS) or os.environ.get("HOPSGPU_MARKERS"))
        scripts = pack_scripts(Path(directory) / "hopsgpu-discovery.tar.gz", markers.values())
        settings[ARCHIVES] = with_entry(shipped.get(ARCHIVES), f"{scripts.as_uri()}#{ALIAS}")
        # Spark's Python daemon needs the package before a task brings files that Spark serves.
        package = pack_package(Path(directory) / PACKAGE)
        settings[PY_FILES] = with_entry(shipped.get(PY_FILES), package.as_uri())
        settings[SPARK_SETTING] = choose_gpu_resource(shipped, os.environ)
        settings |= shipped_bundle(shipped, os.environ)
        check_session(environment | settings)
        queue = (environment | settings).get("spark.yarn.queue", "default")
        check_queue(queue, _manager().queues())
        tag = f"hopsgpu-{secrets.token_hex(6)}"
        tags = (environment | settings).get(_TAGS)
        settings[_TAGS] = ",".join(filter(None, (tags, tag)))
        # After the creation, YARN has copies of the files.
        return create_session(new_builder(name, settings), functools.partial(_end_application, tag))


@contextlib.contextmanager
def _python_of_image_only_here() -> Iterator[None]:
    """Restore PYSPARK_PYTHON on exit if the session's executors run in an image.

    The next session of this process may have another image, or none.
    """
    from pyspark import SparkContext

    before = os.environ.get("PYSPARK_PYTHON")
    try:
        yield
    finally:
        context = SparkContext._active_spark_context
        if context is not None and context.getConf().get(IMAGE):
            if before is None:
                os.environ.pop("PYSPARK_PYTHON", None)
            else:
                os.environ["PYSPARK_PYTHON"] = before


def _manager() -> ResourceManager:
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    hadoop = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
    return ResourceManager(web_addresses(hadoop.get))


def _end_application(tag: str) -> None:
    """End the application of a failed start of Spark, if YARN still has it.

    An application master that registers while its driver ends does not notice that end, and would
    run forever.
    """
    try:
        manager = _manager()
        application = manager.find_by_tag(tag)
        if application is None or application.has_ended:
            return
        log.info("ends %s, whose driver failed to start", application.id)
        manager.kill(application.id, application.user)
    except HopsGpuError as error:
        print(
            "hopsgpu: the application of the failed start may still be in YARN, because it could"
            f" not be ended ({error}): `yarn application -list -appTags {tag}` shows it, and"
            " `yarn application -kill ID` ends it",
            file=sys.stderr,
            flush=True,
        )
