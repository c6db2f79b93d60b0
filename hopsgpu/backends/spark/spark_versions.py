"""Differences between versions of Spark, and the supported versions.

Each difference is one function, so that a new version of Spark needs one more line.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError

_OLDEST = (3, 5)
_TOO_NEW = (5, 0)
_SUPPORTED = "hopsgpu supports Spark 3.5 and 4"
# Source: Spark's documentation, "Overview", of 3.5 and of 4.x.
_JAVAS_3, _JAVAS_4 = (8, 11, 17), (17, 21)
# PySpark 3.5 pickles functions with cloudpickle 2.2, which knows Python's bytecode up to 3.11.
_NEWEST_PYTHON_3 = (3, 11)
_OVERHEAD = "spark.driver.memoryOverhead"
_FACTOR = f"{_OVERHEAD}Factor"
_MIN_OVERHEAD = "spark.driver.minMemoryOverhead"
# Spark's rule before 4, where the minimum of 384 MiB is not a property.
_DEFAULT_FACTOR = 0.10
_INTERVAL = "spark.scheduler.barrier.maxConcurrentTasksCheck.interval"
_FAILURES = "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures"


def release_of(version: str) -> tuple[int, int]:
    """Return the major and minor version in a version of Spark or Python, as "3.5.4.7.1"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"{version!r} is not a version: must be two numbers, as in 3.5")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Problem:
    """A reason why a Spark cannot be used, and the remedy."""

    what: str
    fix: str


def version_problem(version: str, where: str) -> Problem | None:
    """Return why hopsgpu does not support a version of Spark; None if it does."""
    release, what = release_of(version), f"{where} is Spark {version}, and {_SUPPORTED}"
    if release < _OLDEST:
        return Problem(
            what,
            'pip install "pyspark>=3.5,<5" and unset SPARK_HOME: YARN runs applications of any'
            " Spark, also beside the one that is installed",
        )
    return Problem(what, 'pip install "pyspark<5"') if release >= _TOO_NEW else None


def pyspark_problem(pyspark: str, file: str, spark: str | None, where: str) -> Problem | None:
    """Return why the PySpark that Python imports cannot drive a Spark's JVM; None if it can.

    Patch releases of one minor version are compatible.

    Args:
        spark: version of Spark's jars; None if it is unknown.
        where: place of the jars, such as "SPARK_HOME=/usr/lib/spark".
    """
    if spark is None or release_of(spark) == release_of(pyspark):
        return None
    return Problem(
        f"{where} is Spark {spark}, but Python imports PySpark {pyspark} ({file}), which does not"
        " fit it",
        f'pip install "pyspark=={_of_apache(spark)}", or pip uninstall pyspark so that'
        " SPARK_HOME's own is imported, or unset SPARK_HOME",
    )


def _of_apache(version: str) -> str:
    """Return Apache's version of a distribution's Spark, such as 3.5.6 of 3.5.6-amzn-2."""
    match = re.match(r"\d+\.\d+\.\d+", version)
    return match[0] if match else version


def refuse(problem: Problem | None) -> None:
    if problem is not None:
        raise ConfigError(f"{problem.what}: {problem.fix}")


def java_versions(spark: str) -> tuple[int, ...]:
    """Return the major versions of Java on which a version of Spark runs, the oldest first."""
    return _JAVAS_3 if release_of(spark) < (4, 0) else _JAVAS_4


def java_problem(spark: str, java: int | None, where: str) -> Problem | None:
    """Return why a version of Spark does not run on a Java; None if it does, or may."""
    wanted = java_versions(spark)
    if java is None or java >= wanted[0]:
        return None
    return Problem(
        f"{where} is Java {java}, and Spark {spark} runs on Java {either(wanted)}",
        "set JAVA_HOME to one of these",
    )


def either(versions: tuple[int, ...]) -> str:
    """Return versions as "8, 11 or 17"."""
    *first, last = map(str, versions)
    return f"{', '.join(first)} or {last}" if first else last


def is_python_supported(spark: str, python: str) -> bool:
    """Return whether a version of PySpark can pickle functions of a version of Python."""
    return release_of(spark) >= (4, 0) or release_of(python) <= _NEWEST_PYTHON_3


def driver_memory_overhead(spark: str, properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties by which a driver in YARN gets memory for its Python, at least 1 GiB.

    Spark 4 has a property for the minimum, which sessions on YARN set. Spark 3.5 ignores that
    property and adds 10 % or 384 MiB, so the overhead is computed here unless the user has set it.
    """
    if release_of(spark) >= (4, 0) or _OVERHEAD in properties:
        return {}
    try:
        factor = float(properties.get(_FACTOR, _DEFAULT_FACTOR))
    except ValueError:  # Spark itself refuses the value, with the name of the property
        return {}
    memory = _mebibytes(properties.get("spark.driver.memory", "1g"))
    least = _mebibytes(properties.get(_MIN_OVERHEAD, "1g"))
    return {_OVERHEAD: f"{max(least, int(memory * factor))}m"}


def _mebibytes(text: str) -> int:
    """Return a memory size of Spark in MiB, the default unit; 0 for an invalid text.

    Spark itself refuses an invalid text, with the name of the property.
    """
    match = re.fullmatch(r"(\d+)\s*(?:([kmgtp])b?)?", text.strip().lower())
    if match is None:
        return 0
    return int(int(match[1]) * 1024.0 ** ("kmgtp".index(match[2] or "m") - 1))


def other_python(error: str) -> tuple[str, str] | None:
    """Return the executors' and the driver's Python if Spark's worker refused the mismatch.

    Spark 4 says "has different version: 3.10 than that in driver: 3.11,", and Spark 3.5 "has
    different version (3, 10) than that in driver 3.11,".
    """
    match = re.search(
        r"different version:? \(?(\d+)[.,] ?(\d+)\)? than that in driver:? (\d+\.\d+),", error
    )
    return None if match is None else (f"{match[1]}.{match[2]}", match[3])


def slot_check_warning(spark: str, setting: Callable[[str], str | None]) -> str | None:
    """Return a warning if a cancelled gang, without GPUs, could stay in Spark for long.

    Spark 3.5 does not cancel a barrier job that waits for free slots. The job ends after its
    retries, by default after 10 minutes.
    """
    if release_of(spark) >= (4, 0):
        return None
    interval, failures = setting(_INTERVAL), setting(_FAILURES)
    if interval in ("1s", "1") and failures is not None and failures.isdigit():
        return None if int(failures) <= 10 else _linger_warning(spark, f"{_FAILURES}={failures}")
    return _linger_warning(
        spark, f"{_INTERVAL}={interval or '15s'}, {_FAILURES}={failures or '40'}"
    )


def _linger_warning(spark: str, settings: str) -> str:
    return (
        f"Spark {spark} cannot cancel a gang that lost an executor while it started, until the"
        f" retries of {settings} end; set them to 1s and 3, as hopsgpu.session() does"
    )


def jar_version(directory: Path) -> str | None:
    """Return the version of the Spark whose jars are in a directory; None if there are none."""
    names = (
        re.search(r"_[\d.]+-(.+)\.jar$", jar.name) for jar in directory.glob("spark-core_*.jar")
    )
    return next((name[1] for name in names if name), None)


def java_version(home: Path) -> str:
    """Return the version of the JDK in a directory, from its file `release`; "" without one."""
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r'^JAVA_VERSION="?([^"\n]+)', text, re.MULTILINE)
    return match[1] if match else ""


def java_here(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the major version of the Java that Spark's scripts start, without starting it.

    Returns:
        The version, None if it is unknown; and where it was found, for messages.
    """
    if home := environ.get("JAVA_HOME"):
        return _major(java_version(Path(home))), f"JAVA_HOME={home}"
    binary = shutil.which("java", path=environ.get("PATH", ""))
    if binary is None:
        return None, "the PATH"
    return _major(java_version(Path(binary).resolve().parents[1])), f"{binary} of the PATH"


def _major(version: str) -> int | None:
    match = re.match(r"(?:1\.)?(\d+)", version)
    return int(match[1]) if match else None
