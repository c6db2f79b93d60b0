"""A driver inside YARN: in cluster mode it runs in the application master's container."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pyspark import SparkContext

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.settings import check_session, check_submitted, in_cluster_mode
from hopsgpu.control.peer import lake_environment


def settings_inside(
    defaults: Mapping[str, str], submitted: Mapping[str, str], requested: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings with which a driver in YARN creates its context.

    Args:
        defaults: the settings that a gang needs, which `requested` overrides.
        submitted: the settings that the application was submitted with.
        requested: the settings that the driver requests.

    Raises:
        ConfigError: a setting comes too late, or prevents gangs; the message says what spark-submit
            should have received or shipped.
    """
    check_submitted(submitted.get, requested)
    settings = {**defaults, **submitted, **requested}
    check_session(settings)
    return settings


def act_for_submitter(context: SparkContext) -> None:
    """Make HDFS clients of a driver in YARN act for the submitter.

    They use the submitter's Hadoop configuration. The driver's process belongs to a container,
    which runs as the NodeManager's user, with that node's HADOOP_CONF_DIR. With Kerberos, the
    tokens that YARN put there identify the submitter. In client mode there is nothing to do.
    """
    jvm = Jvm(context)
    if in_cluster_mode(jvm.setting):
        user = None if jvm.is_kerberized() else jvm.user()
        os.environ.update(lake_environment(user, {}))
