"""The `GangApplication` of a session: the one object that hopsgpu keeps for it."""

from __future__ import annotations

import logging

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.backends.spark.local_application import local_application
from hopsgpu.backends.spark.spark_kinds import spark_kind_of
from hopsgpu.backends.spark.spark_versions import pyspark_problem, refuse, version_problem
from hopsgpu.cluster_managers.local_masters import is_local
from hopsgpu.core.own_log import show_on_stderr
from hopsgpu.errors import ConfigError

_ATTRIBUTE = "_hopsgpu_application"

log = logging.getLogger(__name__)


def application_of(spark: SparkSession | None) -> GangApplication:
    """Return the application of a session, by default of the active one; check its settings.

    Raises:
        ConfigError: there is no session, it has ended, or it cannot hold gangs.
    """
    if spark is not None and not isinstance(spark, SparkSession):
        raise ConfigError(f"spark={spark!r}: must be a classic SparkSession")
    # Use the active context: a session is active in one thread, a context in the whole process.
    context = spark.sparkContext if spark is not None else SparkContext._active_spark_context
    if context is None:
        raise ConfigError(
            "there is no active SparkSession: create one with hopsgpu.session(name), or pass spark="
        )
    if context._jsc is None or context._jsc.sc().isStopped():
        raise ConfigError(
            "this Spark application has ended: call spark.stop(), and create a session with"
            " hopsgpu.session(name)"
        )
    # PySpark's own lock, so that two concurrent first launches create only one application.
    with SparkContext._lock:
        application: GangApplication | None = getattr(context, _ATTRIBUTE, None)
        if application is None:
            application = _application(context)
            # As an attribute, the application lives exactly as long as its context.
            setattr(context, _ATTRIBUTE, application)
    return application


def _application(context: SparkContext) -> GangApplication:
    spark = str(context.version)
    refuse(version_problem(spark, "this application"))
    version, file = str(pyspark.__version__), str(pyspark.__file__)
    refuse(pyspark_problem(version, file, spark, "this application's JVM"))
    jvm = Jvm(context)
    master = jvm.setting("spark.master")
    application: GangApplication
    if is_local(master):
        application = local_application(context, jvm)
    else:
        application = spark_kind_of(master).attach(context, jvm)
    show_on_stderr(application.log_level)
    log.info("attached to %s: master %s, Spark %s", application.id, master, context.version)
    return application
