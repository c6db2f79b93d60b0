"""Gangs of a Spark application on YARN."""

from __future__ import annotations

import functools
import os
import sys

from pyspark import SparkContext

from hopsgpu.backends.spark.cluster_application import ClusterApplication
from hopsgpu.backends.spark.container_image import (
    image_of,
    network_of,
    refuse_other_image,
    runtime_of,
)
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.log4j import CapturedLog
from hopsgpu.backends.spark.package_archive import ship_package
from hopsgpu.backends.spark.settings import check_python, check_session, is_cluster_mode
from hopsgpu.backends.spark.token_renewal import expiry_warnings
from hopsgpu.backends.spark.yarn_driver import act_for_submitter
from hopsgpu.cluster_managers.manager_table import required_kind
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.container_runtime import runtime_problem, settings_of_runtime
from hopsgpu.cluster_managers.yarn.gpu_resource import SETTING, SPARK_SETTING, choose_gpu_resource
from hopsgpu.cluster_managers.yarn.kind import label_of
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.errors import ConfigError
from hopsgpu.storage.identity import ensure_credentials

_MAX_ASKED_NODES = 16
_SNAPSHOT_SECONDS = 10.0


class YarnApplication(ClusterApplication):
    """An application whose gangs run as its executors on YARN."""

    manager: YarnManager

    @property
    def partition(self) -> str:
        return label_of(self.setting) or ""

    @property
    def can_prefer_hosts(self) -> bool:
        # YARN's client refuses a request with both a node label and hosts, and that error ends
        # Spark's application master.
        return not self.partition

    @property
    def setup_warnings(self) -> tuple[str, ...]:
        return (*self.image_warnings, *expiry_warnings(self.jvm, self.setting))

    def check_wait(self, seconds: float | None) -> None:
        if self.jvm.is_kerberized() and not is_cluster_mode(self.setting):
            ensure_credentials(self.jvm.hadoop, self.setting, os.environ, seconds)

    def check_marker(self, marker: str, gpu_type: str) -> None:
        if not self.jvm.has_resource(marker):
            raise ConfigError(
                f"{marker}, which spark.hopsgpu.markers names for gpu_type={gpu_type!r}, is unknown"
                " here: resource-types.xml in HADOOP_CONF_DIR must name it in yarn.resource-types,"
                " as on the ResourceManager"
            )

    def removals(self) -> CapturedLog | None:
        return self.jvm.removals()

    @property
    def image(self) -> str | None:
        return image_of(self.setting)

    def check_image(self, requested: str) -> None:
        refuse_other_image(requested, self.image)

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
        settings = self.manager.node_managers.settings(
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


def yarn_application(context: SparkContext, jvm: Jvm) -> YarnApplication:
    """Return a `YarnApplication`; check the application's settings.

    Raises:
        ConfigError: the settings prevent gangs, or the Hadoop configuration here does not define
            the resource that counts GPUs.
    """
    settings = jvm.settings()
    check_session(settings)
    check_python(context.pythonExec, f"{sys.version_info[0]}.{sys.version_info[1]}")
    gpu_resource = choose_gpu_resource(settings, os.environ)
    of_spark = settings.get(SPARK_SETTING) or DEFAULT_GPU_RESOURCE
    if gpu_resource != of_spark:
        raise ConfigError(
            f"{SETTING} (or its environment variable) names {gpu_resource}, but this application"
            f" requests {of_spark}: start it with hopsgpu.session() or `hopsgpu submit`, or with"
            f" {SPARK_SETTING}={gpu_resource}"
        )
    if not jvm.has_resource(gpu_resource):
        raise ConfigError(
            f"{gpu_resource} is unknown here: resource-types.xml in HADOOP_CONF_DIR must name it in"
            f" yarn.resource-types, as on the ResourceManager; {SETTING} names the resource"
        )
    manager = required_kind("yarn").connect(settings, os.environ, jvm.hadoop)
    act_for_submitter(context)
    application = YarnApplication(context, jvm, manager, ship_package(context))
    application.check_options()
    return application
