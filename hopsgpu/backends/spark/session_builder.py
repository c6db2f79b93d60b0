"""The creation of a SparkSession from settings, with another try if Spark's pages fail to start."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hopsgpu.backends.spark.console import gateway
from hopsgpu.backends.spark.log4j import suppressed
from hopsgpu.backends.spark.settings import session_defaults
from hopsgpu.storage.spark_defaults import spark_defaults

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_MAX_STARTS = 3
# A frame of Spark's user interface in a Java stack, as py4j prints it.
_IN_UI = "\tat org.apache.spark.ui."
_CONTEXT = "org.apache.spark.SparkContext"
# Spark logs the first message with the stack of an error that is also raised, and the second at the
# next start.
_FAILED = "Error initializing SparkContext"
_FAILED_BEFORE = "Another SparkContext is being constructed (or threw an exception"


def choose_python(named: str | None) -> None:
    """Choose the executors' Python: the named one, else PYSPARK_PYTHON, else the driver's.

    If a plain script starts the context, Spark reads this variable and not the property.
    """
    if named is not None:
        os.environ["PYSPARK_PYTHON"] = named
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def resolve_settings(
    master: str, requested: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment's properties, and those of a session in client mode.

    The environment's are spark-defaults.conf's, or under spark-submit those of its JVM.
    """
    from pyspark import SparkConf, SparkContext

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    environment = dict(spark_defaults(os.environ))
    if is_submitted:
        SparkContext._ensure_initialized()
        environment = dict(SparkConf().getAll())
    settings = {**session_defaults(master, environment), **requested, "spark.master": master}
    if is_submitted:
        # The settings of spark-submit, including spark-defaults.conf, are the user's settings.
        settings = {**settings, **environment, **requested}
    return environment, settings


def start_in_client_mode(name: str, settings: Mapping[str, str]) -> SparkSession:
    """Return a session whose driver is this process, and which can hold gangs.

    Raises:
        ConfigError: as `attach_or_stop`.
    """
    from pyspark import SparkConf, SparkContext

    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    SparkContext._ensure_initialized(gateway=gateway(conf), conf=conf)
    return attach_or_stop(create_session(new_builder(name, settings)))


def new_builder(name: str, settings: Mapping[str, str]) -> SparkSession.Builder:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder


def attach_or_stop(session: SparkSession) -> SparkSession:
    """Return a session that can hold gangs; stop it if it cannot.

    Raises:
        ConfigError: a setting prevents gangs, or an option `spark.hopsgpu.*` is invalid.
    """
    from hopsgpu.backends.spark.attachment import application_of

    try:
        application_of(session)
    except BaseException:
        session.stop()
        raise
    return session


def create_session(
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
