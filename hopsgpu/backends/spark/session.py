"""The creation of a SparkSession that can hold gangs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopsgpu.backends.masters import is_local
from hopsgpu.backends.spark.authorities import shipped_bundle
from hopsgpu.backends.spark.console import gateway
from hopsgpu.backends.spark.container_image import IMAGE, image_properties, refuse_local_image
from hopsgpu.backends.spark.log4j import suppressed
from hopsgpu.backends.spark.package_archive import (
    ARCHIVES,
    MARKERS,
    PACKAGE,
    PY_FILES,
    pack_package,
    with_entry,
)
from hopsgpu.backends.spark.pyspark_archives import bytecode_of_new_jvm
from hopsgpu.backends.spark.settings import (
    SESSION_DEFAULTS,
    check_session,
    check_submitted,
    is_cluster_mode,
)
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
from hopsgpu.cluster_managers.yarn.gpu_resource import SPARK_SETTING, choose_gpu_resource
from hopsgpu.cluster_managers.yarn.queues import check_queue
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.core.boundary import public
from hopsgpu.core.gpu_types import parse_markers
from hopsgpu.core.image_names import check_image_name
from hopsgpu.core.own_log import level_of, show_on_stderr
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.gpu.script_archive import ALIAS, pack_scripts
from hopsgpu.rank.context import VARIABLE
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
from hopsgpu.storage.identity import ensure_credentials
from hopsgpu.storage.spark_defaults import spark_defaults
from hopsgpu.tracebacks import VARIABLE as LOG

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_MAX_STARTS = 3
_PYTHON = "spark.pyspark.python"
_PYTHON_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_TAGS = "spark.yarn.tags"
_OWN_TAG = re.compile(r"(^|,)hopsgpu-[0-9a-f]{12}$")
_LOCAL_MASTER = "local[*]"
# No other machine connects to this application's JVM, and this machine may change its network.
_LOCAL_DEFAULTS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
}
# A frame of Spark's user interface in a Java stack, as py4j prints it.
_IN_UI = "\tat org.apache.spark.ui."
_CONTEXT = "org.apache.spark.SparkContext"
# Spark logs the first message with the stack of an error that is also raised, and the second at the
# next start.
_FAILED = "Error initializing SparkContext"
_FAILED_BEFORE = "Another SparkContext is being constructed (or threw an exception"


@public
def session(
    name: str,
    *,
    master: str | None = None,
    conf: Mapping[str, object] | None = None,
    image: str | None = None,
) -> SparkSession:
    """Return a SparkSession that can hold gangs and releases their GPUs.

    The session runs on YARN. It runs on this machine if the master is local[N] or local[*], or if
    neither a Hadoop configuration (HADOOP_CONF_DIR) nor a master is given; a line on stderr then
    says so. A session on YARN has dynamic allocation without a minimum, and the settings of
    docs/how-it-works.md; the discovery script is shipped to the nodes. If an application already
    runs, or the driver runs in YARN (cluster mode), the settings are only checked: it is too late
    to ship the script.

    Args:
        name: name of the application.
        master: "yarn", "local[*]" or "local[N]"; by default spark-submit's, else "yarn" if
            HADOOP_CONF_DIR or YARN_CONF_DIR is set, else that of spark-defaults.conf, else
            "local[*]".
        conf: more Spark properties, which override hopsgpu's. Properties that prevent gangs are
            refused.
        image: container image in which all executors run, by YARN's Docker runtime (or runc, with
            `spark.hopsgpu.image.runtime`), as "registry/name:tag". Their Python is the image's:
            `python3.N` on its PATH, of this Python's version. By default executors run in no
            image, or in `spark.hopsgpu.image` of spark-defaults.conf.

    Raises:
        ConfigError: a setting prevents gangs, or two settings name different resources of GPUs (the
            message says how to fix it); or the call is in a rank. Nothing was started.
        CapacityError: the queue (`spark.yarn.queue`) accepts no applications; nothing was
            submitted.
        HopsGpuError: the ResourceManager does not answer.
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
        refuse_local_image(requested[IMAGE])
    if master is not None and not is_local(master):
        # Refuse wrong settings before a JVM is started; it alone knows spark-submit's arguments.
        choose_gpu_resource({**spark_defaults(os.environ), **requested}, os.environ)
        check_session({**_ours(requested), "spark.yarn.dist.archives": f"#{ALIAS}"})
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
        master = SparkConf().get("spark.master", _LOCAL_MASTER)
    log.info("session requested: starts one on master %s", master)
    if is_local(master):
        return _start_local(name, master, requested)
    with _python_of_image_only_here():
        return _start_on_yarn(name, requested)


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


def default_master(requested: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return the master of a new application; None if spark-submit has set it."""
    if "spark.master" in requested:
        return requested["spark.master"]
    if "PYSPARK_GATEWAY_PORT" in environ:
        return None
    if is_configured(environ):
        return "yarn"
    return spark_defaults(environ).get("spark.master", _LOCAL_MASTER)


def _start_local(name: str, master: str, requested: Mapping[str, str]) -> SparkSession:
    """Return a session with a local master; print to stderr how it differs from YARN.

    Raises:
        ConfigError: an option `spark.hopsgpu.*` is invalid (the session is then stopped), or the
            driver runs in YARN, which expects a context on YARN.
    """
    from pyspark import SparkConf, SparkContext

    from hopsgpu.backends.spark.attachment import application_of

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**_LOCAL_DEFAULTS, **requested, "spark.master": master}
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    SparkContext._ensure_initialized(gateway=gateway(conf), conf=conf)
    environment = dict(SparkConf().getAll())
    if is_cluster_mode(environment.get):
        check_submitted(environment.get, {"spark.master": master})
    session = _create_session(_builder(name, settings))
    try:
        application_of(session)
    except BaseException:
        session.stop()
        raise
    return session


def _ours(requested: Mapping[str, str]) -> dict[str, str]:
    """Return a gang's settings, overridden by the user's; both override spark-defaults.conf."""
    return {"spark.master": "yarn", **SESSION_DEFAULTS, **requested}


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


def _start_on_yarn(name: str, requested: Mapping[str, str]) -> SparkSession:
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
        _choose_python(settings.get(_PYTHON))
        # Check before a JVM starts: without a ticket it would print a stack every second.
        ensure_credentials(
            HadoopConf.load_hdfs(os.environ).get, {**defaults, **settings}.get, os.environ
        )
    elif _PYTHON in requested:
        os.environ["PYSPARK_PYTHON"] = requested[_PYTHON]
    # Start the JVM as the context would. Only the JVM knows spark-defaults.conf and the arguments
    # of spark-submit, whose files must still be shipped.
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with bytecode_of_new_jvm():
        SparkContext._ensure_initialized(gateway=gateway(conf), conf=conf)
    environment = dict(SparkConf().getAll())
    if is_cluster_mode(environment.get):
        session = _create_session(_builder(name, settings_inside(settings, environment, requested)))
        act_for_submitter(session.sparkContext)
        return session
    if is_submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # The settings of spark-submit, including spark-defaults.conf, are the user's settings.
        settings = settings | environment | dict(requested)
        settings |= image_properties(settings.get, os.environ, _PYTHON_VERSION)
        if IMAGE in settings:
            _choose_python(settings[_PYTHON])
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
        _check_queue((environment | settings).get("spark.yarn.queue", "default"))
        tag = f"hopsgpu-{secrets.token_hex(6)}"
        tags = (environment | settings).get(_TAGS)
        settings[_TAGS] = ",".join(filter(None, (tags, tag)))
        # After the creation, YARN has copies of the files.
        return _create_session(_builder(name, settings), functools.partial(_end_application, tag))


def _choose_python(named: str | None) -> None:
    """Choose the executors' Python: the named one, else PYSPARK_PYTHON, else the driver's.

    If a plain script starts the context, Spark reads this variable and not the property.
    """
    if named is not None:
        os.environ["PYSPARK_PYTHON"] = named
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


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


def _builder(name: str, settings: Mapping[str, str]) -> SparkSession.Builder:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder


def _check_queue(name: str) -> None:
    check_queue(name, _manager().queues())


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


def _create_session(
    builder: SparkSession.Builder, clear: Callable[[], None] = lambda: None
) -> SparkSession:
    """Return the session; start again if Spark's user interface failed to start.

    Spark attaches the pages of its UI and adds the application master's filter to them without a
    common lock. Some starts fail because of this (8 of 176, with three at once on two cores),
    mostly with a ConcurrentModificationException, always in the UI. Spark has then stopped the
    context, and the JVM accepts a new one.

    Args:
        clear: removes the leftovers of a failed start.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    for start in range(1, _MAX_STARTS + 1):
        try:
            messages = (_FAILED,) if start == 1 else (_FAILED, _FAILED_BEFORE)
            with suppressed(SparkContext._jvm, _CONTEXT, *messages):
                return builder.getOrCreate()
        except Py4JJavaError as error:
            clear()
            if start == _MAX_STARTS or _IN_UI not in str(error):
                raise
            why = str(error.java_exception.toString()).splitlines()[0]
        log.info("start %d of Spark failed: %s", start, why)
        print(
            "hopsgpu: Spark's user interface failed to start, which happens on busy machines"
            f" ({why}); Spark is started again (start {start + 1} of {_MAX_STARTS})",
            file=sys.stderr,
            flush=True,
        )
    raise AssertionError("the last start returns or raises")


def _check_conf(
    name: object, master: object, conf: Mapping[str, object] | None, image: object
) -> dict[str, str]:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"name={name!r}: must be a string, the application's name")
    if master is not None and not isinstance(master, str):
        raise ConfigError(f"master={master!r}: must be 'yarn', 'local[*]', 'local[N]' or None")
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
