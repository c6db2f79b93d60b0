"""A driver inside YARN: in cluster mode it runs in the application master's container."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pyspark import SparkContext

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.settings import check_session, check_submitted, in_cluster_mode
from hopsgpu.control.peer import lake_environment


def settings_inside(
    ours: Mapping[str, str], submitted: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings with which a driver in YARN makes its context.

    Args:
        ours: what a gang needs, under what is given.
        submitted: what the application was submitted with.
        given: what the driver wants set.

    Raises:
        ConfigError: what spark-submit should have been told, or should have shipped.
    """
    check_submitted(submitted.get, given)
    settings = {**ours, **submitted, **given}
    check_session(settings)
    return settings


def act_for_submitter(context: SparkContext) -> None:
    """Has HDFS clients of a driver in YARN act for who submitted it, with their configuration.

    Its process is a container's: the NodeManager's user, with that node's HADOOP_CONF_DIR. With
    Kerberos the tokens that YARN put there say who it is. In client mode there is nothing to do.
    """
    jvm = Jvm(context)
    if in_cluster_mode(jvm.setting):
        user = None if jvm.is_kerberized() else jvm.user()
        os.environ.update(lake_environment(user, {}))
