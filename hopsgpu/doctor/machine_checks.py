"""Checks of this machine: Java, Spark, Python, and the Hadoop configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.backends.spark.spark_versions import (
    either,
    is_python_supported,
    java_versions,
    pyspark_problem,
    version_problem,
)
from hopsgpu.doctor.report import Check, ok, unknown, wrong

# The version of the advice on a machine without a Spark.
_NEWEST = "4.0"
_CONF_DIR = (
    "set HADOOP_CONF_DIR to the cluster's Hadoop configuration (for the development cluster:"
    ' eval "$(hopsgpu cluster env)")'
)


@dataclass(frozen=True)
class DriverMachine:
    """The Java, Python and Spark of a driver on this machine.

    Attributes:
        java: major version of the Java that Spark's scripts would start; None if none works.
        java_at: path of that Java, and which setting names it.
        python: version of this Python.
        executors_python: the executors' Python, and which setting names it.
        pyspark: version of the PySpark that Python finds; None without PySpark.
        spark: version of Spark's jars; None without jars.
        spark_home: directory of Spark, or "".
    """

    java: int | None
    java_at: str
    python: str
    executors_python: str
    pyspark: str | None
    spark: str | None
    spark_home: str


@dataclass(frozen=True)
class HadoopClient:
    """The Hadoop configuration of this machine.

    Attributes:
        places: directories that HADOOP_CONF_DIR and YARN_CONF_DIR name.
        problem: why the configuration cannot be read, or "".
        filesystem: `fs.defaultFS`, or None.
        managers: web addresses of the ResourceManagers.
        types: `yarn.resource-types`; None if no file has it.
    """

    places: tuple[str, ...]
    problem: str
    filesystem: str | None
    managers: tuple[str, ...]
    types: tuple[str, ...] | None


def check_java(machine: DriverMachine) -> Check:
    spark = machine.spark or _NEWEST
    accepted = java_versions(spark)
    fix = f"set JAVA_HOME to a JDK {either(accepted)}, the versions that Spark {spark} runs on"
    if machine.java is None:
        return wrong("java", f"no Java runs ({machine.java_at})", fix)
    seen = f"{machine.java} ({machine.java_at})"
    if machine.java in accepted:
        return ok("java", seen)
    if machine.java > max(accepted):
        return unknown("java", f"{seen}, newer than the versions that Spark {spark} names", fix)
    return wrong("java", f"{seen} is not a version that Spark {spark} runs on", fix)


def check_spark(machine: DriverMachine) -> Check:
    """Check whether there is a supported Spark, and PySpark matches the jars."""
    if machine.spark is None:
        where = f" in {machine.spark_home}" if machine.spark_home else ""
        return wrong(
            "spark",
            f"no Spark was found{where}",
            "pip install pyspark, or set SPARK_HOME to the cluster's Spark",
        )
    seen = f"{machine.spark} ({machine.spark_home})"
    pyspark = machine.pyspark or machine.spark
    problem = version_problem(machine.spark, machine.spark_home) or pyspark_problem(
        pyspark, "this Python's", machine.spark, machine.spark_home
    )
    if problem is not None:
        return wrong("spark", problem.what, problem.fix)
    # Distributions append to Apache's version, as in 3.5.6-amzn-2.
    if not machine.spark.startswith(pyspark):
        return ok("spark", f"{seen}; Python imports PySpark {pyspark}, of the same minor version")
    return ok("spark", seen)


def check_python(machine: DriverMachine) -> Check:
    """Report which Python the driver and the executors run, and whether PySpark knows it."""
    seen = f"{machine.python}; executors: {machine.executors_python}"
    if machine.spark is not None and not is_python_supported(machine.spark, machine.python):
        return unknown(
            "python",
            f"{seen}; PySpark {machine.spark} names versions up to 3.11",
            "run the driver and the executors with Python 3.11, or use Spark 4",
        )
    return ok("python", seen)


def check_hadoop_conf(client: HadoopClient) -> Check:
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


def check_resource_types(client: HadoopClient, gpu_resource: str) -> Check:
    """Check whether the configuration here defines GPUs, so that Spark can request them."""
    name = "resource types"
    fix = (
        "copy yarn-scripts/resource-types.xml into HADOOP_CONF_DIR (the ResourceManager and the"
        f" NodeManagers need it too); yarn.resource-types must name {gpu_resource}"
    )
    if client.types is None:
        return wrong(name, f"no resource-types.xml here names {gpu_resource}", fix)
    if gpu_resource not in client.types:
        types = ",".join(client.types)
        return wrong(name, f"yarn.resource-types={types} lacks {gpu_resource}", fix)
    return ok(name, f"{gpu_resource} is known here")
