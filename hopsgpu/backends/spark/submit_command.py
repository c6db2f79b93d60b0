"""The spark-submit command of `hopsgpu submit`. Pure."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.backends.spark.container_image import IMAGE, image_properties, refuse_image
from hopsgpu.backends.spark.log_level import quiet
from hopsgpu.backends.spark.package_archive import ARCHIVES
from hopsgpu.backends.spark.settings import check_session, session_defaults
from hopsgpu.backends.spark.shell_safety import check_line
from hopsgpu.backends.spark.spark_versions import (
    driver_memory_overhead,
    jar_version,
    refuse,
    version_problem,
)
from hopsgpu.cluster_managers.kubernetes.kind import PYTHON_OF_IMAGE
from hopsgpu.cluster_managers.local_masters import is_local
from hopsgpu.cluster_managers.manager_table import MASTER, kind_of, required_kind
from hopsgpu.errors import ConfigError
from hopsgpu.gpu.script_archive import ALIAS

MODES = ("client", "cluster")
_MODE = "spark.submit.deployMode"
_YARN = "yarn"
_QUEUE = "spark.yarn.queue"
_PYTHON = "spark.pyspark.python"
_DRIVER_PYTHON = "spark.pyspark.driver.python"
_PYTHON_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class SubmitJob:
    """A job that a person wants to submit.

    Attributes:
        script: a Python file of this machine.
        deploy_mode: "client" or "cluster"; None for the mode of `conf` or spark-defaults.conf. The
            same holds for `queue`.
        name: name of the application; None for the script's name.
        is_detached: whether the application outlives the command, which only cluster mode allows.
        tag: identifies the submission in the cluster. In cluster mode, spark-submit then does not
            wait for the application's end.
    """

    script: str
    arguments: tuple[str, ...] = ()
    deploy_mode: str | None = None
    queue: str | None = None
    name: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    is_detached: bool = False
    tag: str | None = None


@dataclass(frozen=True)
class SubmitPlan:
    """A plan of how to submit a job.

    Attributes:
        properties: properties that the application will have, except for shipped files.
        arguments: the arguments of spark-submit, without those that a gang needs.
    """

    mode: str
    queue: str
    properties: Mapping[str, str]
    arguments: tuple[str, ...]


def plan_submission(
    job: SubmitJob, defaults: Mapping[str, str], environ: Mapping[str, str], python: str
) -> SubmitPlan:
    """Return the plan of how to submit a job.

    Args:
        environ: environment, with PYSPARK_PYTHON if the executors' Python is not this one.
        python: path of this Python, which has hopsgpu and is the driver's in client mode.

    Raises:
        ConfigError: the script is not a Python file, a setting prevents gangs, there is no Spark,
            or an argument would not reach the application unchanged.
    """
    if not Path(job.script).is_file() or not job.script.endswith(".py"):
        raise ConfigError(
            f"{job.script} is not a Python file on this machine: give a script (*.py)"
        )
    mode = deploy_mode(job.deploy_mode, job.conf, job.is_detached, defaults)
    requested = {name: value for name, value in job.conf.items() if name != _MODE}
    master = requested.pop(MASTER, None) or _default_master(defaults)
    if master == _YARN:
        with_mode = {**defaults, **requested, _MODE: mode}
        requested |= image_properties(with_mode.get, environ, _PYTHON_VERSION)
    else:
        implied = image_settings({**defaults, **requested}, master)
        if IMAGE not in requested:
            # If spark-defaults.conf contradicts itself, hopsgpu.session() says so.
            implied = {name: value for name, value in implied.items() if name not in defaults}
        requested = {**implied, **requested}
    pythons = _pythons(master, mode, {**defaults, **requested}, environ, python)
    requested = {**pythons, **requested}
    requested = {
        **_by_version(mode, {**defaults, **requested}, environ),
        **requested,
    }
    if job.queue is not None:
        requested[_QUEUE] = job.queue
    kind = kind_of(master)
    if mode == "cluster" and kind is not None and (job.is_detached or job.tag):
        setting = {**defaults, **requested}.get
        requested = {**requested, **kind.submission_settings(job.tag or "", setting)}
    ours = session_defaults(master, defaults)
    properties = {**defaults, **ours, **requested, MASTER: master, _MODE: mode}
    if is_local(master):
        raise ConfigError(
            f"spark.master={master} runs on this machine only, and `hopsgpu submit` is for"
            f" clusters: remove it, or run `python {job.script}`"
        )
    check_queue_option(job.queue, master)
    check_session({**properties, ARCHIVES: f"#{ALIAS}"})
    of_master = [] if master == _YARN else ["--master", master]
    words = [*of_master, "--deploy-mode", mode]
    if job.name is not None:
        words += ["--name", job.name]
    for name, value in requested.items():
        words += ["--conf", f"{name}={value}"]
    check_line(words, properties if required_kind(master).has_shell else {}, (), environ)
    # An absolute path, so that the command line is the same in every directory.
    arguments = (*words, str(Path(job.script).absolute()), *job.arguments)
    return SubmitPlan(mode, properties.get(_QUEUE, "default"), properties, arguments)


def check_queue_option(queue: str | None, master: str | None) -> None:
    """Refuse a queue on a cluster manager that has none.

    Raises:
        ConfigError: the master is that of a cluster without queues.
    """
    kind = kind_of(master)
    if queue is not None and kind is not None and not kind.has_queues:
        instead = f"; {kind.queue_replacement}" if kind.queue_replacement else ""
        raise ConfigError(f"--queue {queue}: {kind.title} has no queues; leave it out{instead}")


def image_settings(properties: Mapping[str, str], master: str | None) -> dict[str, str]:
    """Return the properties that `spark.hopsgpu.image` implies outside of YARN.

    Raises:
        ConfigError: the executors of this cluster manager run in no image.
    """
    image, kind = properties.get(IMAGE), kind_of(master)
    if not image or kind is None:
        return {}
    if not kind.has_images:
        refuse_image(image, kind.title)
    return dict(kind.image_settings(image))


def _default_master(defaults: Mapping[str, str]) -> str:
    named = defaults.get(MASTER)
    return named if named is not None and kind_of(named) is not None else _YARN


def deploy_mode(
    option: str | None, conf: Mapping[str, str], is_detached: bool, defaults: Mapping[str, str]
) -> str:
    """Return "client" or "cluster": that of the option, of a property, or the default.

    Raises:
        ConfigError: it is neither, or a detached application would end with this command.
    """
    requested = option or conf.get(_MODE)
    mode = requested or ("cluster" if is_detached else defaults.get(_MODE, "client"))
    if mode not in MODES:
        raise ConfigError(f"deploy mode {mode!r}: must be client or cluster")
    if is_detached and mode == "client":
        raise ConfigError(
            "--detach needs --deploy-mode cluster: in client mode the command itself is the driver"
        )
    return mode


def _pythons(
    master: str, mode: str, properties: Mapping[str, str], environ: Mapping[str, str], python: str
) -> dict[str, str]:
    """Return the properties that name the executors' and the driver's Python, if not given."""
    pythons = {}
    kind = kind_of(master)
    # The path of this machine's Python names none in an image.
    is_in_image = kind is not None and kind.has_images and master != _YARN
    of_executors = environ.get("PYSPARK_PYTHON") or (PYTHON_OF_IMAGE if is_in_image else python)
    if _PYTHON not in properties:
        pythons[_PYTHON] = of_executors
    if mode == "client" and _DRIVER_PYTHON not in properties:
        # Ignore PYSPARK_DRIVER_PYTHON, which people set to jupyter.
        pythons[_DRIVER_PYTHON] = python
    return pythons


def _by_version(
    mode: str, properties: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the properties that depend on the version of Spark.

    Raises:
        ConfigError: there is no Spark, or hopsgpu does not support it.
    """
    home = find_spark_submit(environ).resolve().parents[1]
    spark = jar_version(home / "jars")
    if spark is not None:
        refuse(version_problem(spark, str(home)))
    if mode == "client":
        return quiet(properties, environ, home)
    return {} if spark is None else driver_memory_overhead(spark, properties)


def parse_conf(texts: Sequence[str]) -> dict[str, str]:
    """Return properties from texts NAME=VALUE; the last one of a name counts.

    Raises:
        ConfigError: a text has another form, or its name is not a Spark property.
    """
    properties = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise ConfigError(
                f"--conf {text}: must be a Spark property in the form spark.NAME=VALUE"
            )
        properties[name] = value
    return properties


def find_spark_submit(environ: Mapping[str, str]) -> Path:
    """Return SPARK_HOME's spark-submit, else that of this Python's pyspark, else the PATH's.

    Raises:
        ConfigError: no spark-submit was found.
    """
    if home := environ.get("SPARK_HOME"):
        binary = Path(home, "bin", "spark-submit")
        if not binary.is_file():
            raise ConfigError(f"there is no {binary}: set SPARK_HOME to the cluster's Spark")
        return binary
    spec = importlib.util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (binary := Path(place, "bin", "spark-submit")).is_file():
            return binary
    if on_path := shutil.which("spark-submit", path=environ.get("PATH", "")):
        return Path(on_path)
    raise ConfigError(
        "there is no spark-submit: set SPARK_HOME to the cluster's Spark, or pip install pyspark"
    )
