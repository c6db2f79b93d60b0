"""Gangs of a Spark application on a standalone master."""

from __future__ import annotations

import os
import sys

from pyspark import SparkContext

from hopsgpu.backends.spark.cluster_application import ClusterApplication
from hopsgpu.backends.spark.container_image import refuse_image
from hopsgpu.backends.spark.hadoop_conf_archive import ship_hadoop_conf
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.package_archive import ship_package
from hopsgpu.backends.spark.resource_profiles import ProfilePool, build_standalone_profile
from hopsgpu.backends.spark.settings import check_python, check_session
from hopsgpu.cluster_managers.manager_table import required_kind
from hopsgpu.errors import ConfigError


class StandaloneApplication(ClusterApplication):
    """An application whose gangs run as its executors on the workers of a standalone master."""

    @property
    def can_prefer_hosts(self) -> bool:
        # The master chooses the workers of executors without knowing the tasks.
        return False

    def check_marker(self, marker: str, gpu_type: str) -> None:
        raise ConfigError(
            f"spark.hopsgpu.markers names {marker} for gpu_type={gpu_type!r}, but only YARN marks"
            " nodes with resources: remove it, and executors on other GPUs get no rank"
        )

    @property
    def image(self) -> str | None:
        return None

    def check_image(self, requested: str) -> None:
        refuse_image(requested, "a standalone master")


def standalone_application(context: SparkContext, jvm: Jvm) -> StandaloneApplication:
    """Return a `StandaloneApplication`; check the application's settings.

    Raises:
        ConfigError: the settings prevent gangs, or HDFS requires Kerberos.
    """
    settings = jvm.settings()
    check_session(settings)
    check_python(context.pythonExec, f"{sys.version_info[0]}.{sys.version_info[1]}")
    if jvm.is_kerberized():
        raise ConfigError(
            "the Hadoop configuration requires Kerberos, and a standalone master passes no tokens"
            " to executors: use YARN, or a Hadoop configuration without Kerberos"
        )
    manager = required_kind(settings.get("spark.master")).connect(settings, os.environ)
    application = StandaloneApplication(
        context, jvm, manager, ship_package(context), ProfilePool(build_standalone_profile)
    )
    ship_hadoop_conf(context, application.package.name, os.environ)
    application.check_options()
    return application
