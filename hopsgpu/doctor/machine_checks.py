"""Checks of this machine: Java, Spark, Python, and the Hadoop configuration. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hopsgpu.devcluster.java import ACCEPTED
from hopsgpu.doctor.report import Check, ok, unknown, wrong
from hopsgpu.yarn.resources import GPU

_JAVA = "set JAVA_HOME to a JDK 17 or 21, the versions that Spark 4 runs on"
_CONF_DIR = (
    "set HADOOP_CONF_DIR to the cluster's Hadoop configuration (for the development cluster:"
    ' eval "$(hopsgpu cluster env)")'
)


@dataclass(frozen=True)
class Machine:
    """What drivers on this machine would run with.

    Attributes:
        java: major version of the Java that Spark's scripts would start; None if none works.
        java_at: path of that Java, and which setting names it.
        python: version of this Python.
        executors_python: the executors' Python, and which setting names it.
        pyspark: version of the PySpark that Python finds; None without one.
        spark: version of Spark's jars; None if there are none.
        spark_home: their directory, or "".
    """

    java: int | None
    java_at: str
    python: str
    executors_python: str
    pyspark: str | None
    spark: str | None
    spark_home: str


@dataclass(frozen=True)
class Client:
    """The Hadoop configuration of this machine.

    Attributes:
        places: directories that HADOOP_CONF_DIR and YARN_CONF_DIR name.
        problem: why it cannot be read, or "".
        filesystem: `fs.defaultFS`, or None.
        managers: web addresses of the ResourceManagers.
        types: `yarn.resource-types`; None if neither resource-types.xml nor yarn-site.xml has it.
    """

    places: tuple[str, ...]
    problem: str
    filesystem: str | None
    managers: tuple[str, ...]
    types: tuple[str, ...] | None


def check_java(machine: Machine) -> Check:
    """Check whether Spark runs on this Java."""
    if machine.java is None:
        return wrong("java", f"no Java runs ({machine.java_at})", _JAVA)
    seen = f"{machine.java} ({machine.java_at})"
    if machine.java in ACCEPTED:
        return ok("java", seen)
    if machine.java > max(ACCEPTED):
        return unknown(
            "java", f"{seen}, newer than the versions that hopsgpu was tested with", _JAVA
        )
    return wrong("java", f"{seen} is too old for Spark 4", _JAVA)


def check_spark(machine: Machine) -> Check:
    """Check whether there is a Spark, and Python's part of it matches the JVM's."""
    if machine.spark is None:
        where = f" in {machine.spark_home}" if machine.spark_home else ""
        return wrong(
            "spark",
            f"no Spark was found{where}",
            "pip install pyspark, or set SPARK_HOME to the cluster's Spark",
        )
    seen = f"{machine.spark} ({machine.spark_home})"
    release = _release(machine.spark)
    if machine.pyspark is not None and _release(machine.pyspark) != release:
        return wrong(
            "spark",
            f"{seen}, but Python imports PySpark {machine.pyspark}",
            f"pip install pyspark=={release}, or unset SPARK_HOME",
        )
    if int(machine.spark.partition(".")[0]) < 4:
        return wrong("spark", f"{seen}: hopsgpu is written for Spark 4", "install Spark 4")
    return ok("spark", seen)


def _release(version: str) -> str:
    """Return Apache's version of a distribution's Spark, such as 3.5.6 of 3.5.6-amzn-2."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found is not None else version


def check_python(machine: Machine) -> Check:
    """Report which Python the driver and the executors run."""
    return ok("python", f"{machine.python}; executors: {machine.executors_python}")


def check_hadoop_conf(client: Client) -> Check:
    """Check whether the Hadoop configuration says where HDFS and YARN are."""
    if not client.places:
        seen = f"HADOOP_CONF_DIR is not set, so no cluster was checked: {_CONF_DIR}"
        return wrong("hadoop conf", seen, _CONF_DIR)
    if client.problem:
        return wrong("hadoop conf", client.problem, _CONF_DIR)
    where = ":".join(client.places)
    missing = []
    if not client.filesystem or client.filesystem.startswith("file:"):
        missing.append(f"core-site.xml names no HDFS (fs.defaultFS={client.filesystem})")
    if not client.managers:
        missing.append("yarn-site.xml names no ResourceManager (yarn.resourcemanager.hostname)")
    if missing:
        return wrong("hadoop conf", f"{where} is incomplete", _CONF_DIR, missing)
    return ok("hadoop conf", f"{where}: {client.filesystem}, {', '.join(client.managers)}")


def check_resource_types(client: Client) -> Check:
    """Check whether the configuration here defines GPUs, so that Spark can request them."""
    name = "resource types"
    fix = (
        "copy yarn-scripts/resource-types.xml into HADOOP_CONF_DIR (the ResourceManager and the"
        " NodeManagers need it too)"
    )
    if client.types is None:
        return wrong(name, f"no resource-types.xml here names {GPU}", fix)
    if GPU not in client.types:
        return wrong(name, f"yarn.resource-types={','.join(client.types)} lacks {GPU}", fix)
    return ok(name, f"{GPU} is known here")
