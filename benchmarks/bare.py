"""The rivals: plain Spark with the same profile, without hopsgpu's lease."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from pyspark import InheritableThread
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.jvm import wait_until
from hopsgpu.core.spec import GangSpec, shape_of

_LOOK_SECONDS = 0.05
_MOST_SECONDS = 180.0


@contextlib.contextmanager
def bare_stage(spark: SparkSession, tasks: int) -> Iterator[tuple[float, ResourceProfile]]:
    """Yield the seconds until all tasks of a plain stage run, on newly started executors.

    The tasks end with the context; the executors stay, so that the caller can measure their end.
    """
    application = application_of(spark)
    profile = application.profiles.build(shape_of(GangSpec("bare", workers=tasks), cores_per_gpu=2))
    context = spark.sparkContext
    with socket.create_server((application.driver_address, 0)) as listener:
        address = listener.getsockname()

        def task(_: object) -> bytes:
            with socket.create_connection(address) as connection:
                return connection.recv(1)

        rows = context.parallelize(range(tasks), tasks).withResources(profile).map(task)
        thread = InheritableThread(target=rows.collect, daemon=True)
        began = time.monotonic()
        thread.start()
        connections = [listener.accept()[0] for _ in range(tasks)]
        took = time.monotonic() - began
        try:
            yield took, profile
        finally:
            for connection in connections:
                connection.close()
            thread.join()


def idle_release(spark: SparkSession, tasks: int) -> float:
    """Return seconds until the GPUs of a bare stage are free by Spark's idle timeout."""
    with bare_stage(spark, tasks):
        pass
    return _until_free(spark)


def floor_of_release(spark: SparkSession, tasks: int) -> float:
    """Return the seconds from one kill of idle executors until their GPUs are free."""
    with bare_stage(spark, tasks) as (_, profile):
        pass
    return release_bare(spark, profile)


def release_bare(spark: SparkSession, profile: ResourceProfile) -> float:
    """Kill a bare stage's executors once its tasks have ended; return the seconds taken."""
    jvm = application_of(spark).jvm
    # A kill while Spark still wants executors brings new ones.
    assert wait_until(lambda: jvm.target(profile.id) == 0, threading.Event(), _MOST_SECONDS)
    jvm.kill(jvm.registered_executors(profile.id))
    return _until_free(spark)


def _until_free(spark: SparkSession) -> float:
    manager, began = application_of(spark).manager, time.monotonic()
    assert wait_until(
        lambda: not manager.gpus()[0], threading.Event(), _MOST_SECONDS, _LOOK_SECONDS
    )
    return time.monotonic() - began
