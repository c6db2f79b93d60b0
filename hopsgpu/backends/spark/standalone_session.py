"""The start of a SparkSession on a standalone master."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hopsgpu.backends.spark.container_image import IMAGE, refuse_image
from hopsgpu.backends.spark.session_builder import (
    choose_python,
    resolve_settings,
    start_in_client_mode,
)
from hopsgpu.backends.spark.settings import check_session, session_defaults
from hopsgpu.cluster_managers.manager_table import required_kind
from hopsgpu.storage.spark_defaults import spark_defaults

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from hopsgpu.backends.spark.cluster_application import ClusterApplication
    from hopsgpu.backends.spark.jvm import Jvm

_PYTHON = "spark.pyspark.python"


def check_standalone(requested: Mapping[str, str]) -> None:
    """Check settings that are known before a JVM is started.

    Raises:
        ConfigError: a setting prevents gangs.
    """
    configured = spark_defaults(os.environ)
    ours = session_defaults(requested["spark.master"], configured)
    settings = {**configured, **ours, **requested}
    if IMAGE in settings:
        refuse_image(settings[IMAGE], "a standalone master")
    check_session(settings)


def attach_to_standalone(context: SparkContext, jvm: Jvm) -> ClusterApplication:
    """Return the application of a running context; see `standalone_application`."""
    # A late import: a session finds Spark before anything imports pyspark.
    from hopsgpu.backends.spark.standalone_application import standalone_application

    return standalone_application(context, jvm)


def start_on_standalone(name: str, master: str, requested: Mapping[str, str]) -> SparkSession:
    """Return a session on a standalone master.

    Raises:
        ConfigError: a setting prevents gangs; nothing was started.
        HopsGpuError: the master does not answer.
    """
    environment, settings = resolve_settings(master, requested)
    check_standalone({**environment, **settings})
    # Spark itself waits for a minute for a master that does not answer.
    required_kind(master).connect({**environment, **settings}, os.environ).check_submission()
    choose_python(settings.get(_PYTHON))
    return start_in_client_mode(name, settings)
