"""What differs by the version of Spark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hopsgpu.backends.spark.spark_versions import (
    driver_memory_overhead,
    is_python_supported,
    java_here,
    java_problem,
    java_versions,
    other_python,
    pyspark_problem,
    refuse,
    release_of,
    slot_check_warning,
    version_problem,
)
from hopsgpu.errors import ConfigError

OVERHEAD = "spark.driver.memoryOverhead"
SLOTS = "spark.scheduler.barrier.maxConcurrentTasksCheck."


@pytest.mark.parametrize("version", ["3.5.0", "3.5.4.7.3.1.0-197", "4.0.1", "4.4.0-SNAPSHOT"])
def test_supported_versions(version: str) -> None:
    assert version_problem(version, "/usr/lib/spark") is None


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("2.4.8", 'pip install "pyspark>=3.5,<5" and unset SPARK_HOME'),
        ("3.4.4", 'pip install "pyspark>=3.5,<5" and unset SPARK_HOME'),
        ("5.0.0", 'pip install "pyspark<5"'),
    ],
)
def test_other_versions_are_refused_with_the_place_and_the_remedy(version: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse(version_problem(version, "/usr/lib/spark"))
    said = f"/usr/lib/spark is Spark {version}, and hopsgpu supports Spark 3.5 and 4: {fix}"
    assert str(raised.value).startswith(said)


def test_no_version() -> None:
    with pytest.raises(ValueError, match="'master' is not a version: must be two numbers"):
        release_of("master")


def test_python_part_and_jvm_part_of_different_versions() -> None:
    home = "SPARK_HOME=/usr/lib/spark"
    assert pyspark_problem("3.5.9", "/site", None, home) is None
    assert pyspark_problem("3.5.9", "/site", "3.5.1-amzn-0", home) is None
    with pytest.raises(ConfigError) as raised:
        refuse(pyspark_problem("4.3.0", "/site", "3.5.1-amzn-0", home))
    assert str(raised.value) == (
        "SPARK_HOME=/usr/lib/spark is Spark 3.5.1-amzn-0, but Python imports PySpark 4.3.0 (/site),"
        ' which does not fit it: pip install "pyspark==3.5.1", or pip uninstall pyspark so that'
        " SPARK_HOME's own is imported, or unset SPARK_HOME"
    )


def test_javas() -> None:
    assert java_versions("3.5.9") == (8, 11, 17)
    assert java_versions("4.0.0") == java_versions("4.3.0") == (17, 21)
    assert java_problem("3.5.9", 8, "JAVA_HOME=/jdk8") is None
    assert java_problem("4.3.0", None, "the PATH") is None
    assert java_problem("4.3.0", 25, "JAVA_HOME=/jdk25") is None
    with pytest.raises(ConfigError) as raised:
        refuse(java_problem("4.3.0", 11, "JAVA_HOME=/jdk11"))
    assert str(raised.value) == (
        "JAVA_HOME=/jdk11 is Java 11, and Spark 4.3.0 runs on Java 17 or 21: set JAVA_HOME to one"
        " of these"
    )


@pytest.mark.parametrize(
    ("text", "version"), [("1.8.0_392", 8), ("11.0.21", 11), ("17", 17), ("25-ea", 25)]
)
def test_the_java_is_known_without_starting_it(tmp_path: Path, text: str, version: int) -> None:
    (tmp_path / "bin").mkdir()
    binary = tmp_path / "bin" / "java"
    binary.touch(mode=0o755)
    assert java_here({"JAVA_HOME": str(tmp_path)}) == (None, f"JAVA_HOME={tmp_path}")
    (tmp_path / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{text}"\n')
    assert java_here({"JAVA_HOME": str(tmp_path)}) == (version, f"JAVA_HOME={tmp_path}")
    link = tmp_path / "links" / "java"
    link.parent.mkdir()
    link.symlink_to(binary)
    assert java_here({"PATH": str(link.parent)}) == (version, f"{link} of the PATH")
    assert java_here({"PATH": str(tmp_path / "none")}) == (None, "the PATH")


def test_pythons() -> None:
    assert is_python_supported("3.5.9", "3.11.7") and not is_python_supported("3.5.9", "3.12.1")
    assert is_python_supported("4.0.0", "3.13.0")


@pytest.mark.parametrize(
    ("given", "sum_of"),
    [
        ({}, "1024m"),
        ({"spark.driver.memory": "4g"}, "1024m"),
        ({"spark.driver.memory": "20G"}, "2048m"),
        ({"spark.driver.memory": "20480"}, "2048m"),
        ({"spark.driver.memory": "20480mb", f"{OVERHEAD}Factor": "0.2"}, "4096m"),
        ({"spark.driver.memory": "20971520k", "spark.driver.minMemoryOverhead": "3g"}, "3072m"),
        ({"spark.driver.memory": "as much as there is"}, "1024m"),
    ],
)
def test_a_driver_in_yarn_gets_memory_for_its_python(given: dict[str, str], sum_of: str) -> None:
    assert driver_memory_overhead("3.5.9", given) == {OVERHEAD: sum_of}
    assert driver_memory_overhead("4.0.0", given) == {}


def test_a_users_own_overhead_stays() -> None:
    assert driver_memory_overhead("3.5.9", {OVERHEAD: "500m"}) == {}
    assert driver_memory_overhead("3.5.9", {f"{OVERHEAD}Factor": "much"}) == {}


@pytest.mark.parametrize(
    "words",
    [
        "Python in worker has different version: 3.9 than that in driver: 3.11, PySpark",
        "Python in worker has different version 3.9 than that in driver 3.11, PySpark",
        "Python in worker has different version (3, 9) than that in driver 3.11, PySpark",
    ],
)
def test_pythons_that_do_not_match(words: str) -> None:
    assert other_python(f"pyspark...: [PYTHON_VERSION_MISMATCH] {words} cannot") == ("3.9", "3.11")
    assert other_python("Job aborted: something else") is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "interval=15s, .*maxFailures=40 end; set them to 1s and 3"),
        ({f"{SLOTS}interval": "1s", f"{SLOTS}maxFailures": "40"}, "maxFailures=40 end"),
        ({f"{SLOTS}interval": "1s"}, "interval=1s, .*maxFailures=40 end"),
        ({f"{SLOTS}interval": "15s", f"{SLOTS}maxFailures": "3"}, "interval=15s"),
    ],
)
def test_a_gang_that_cannot_be_cancelled_while_it_starts(
    settings: dict[str, str], words: str
) -> None:
    warning = slot_check_warning("3.5.9", settings.get)
    assert warning is not None and re.search(words, warning), warning
    assert slot_check_warning("4.0.0", settings.get) is None


def test_the_settings_of_a_session_let_a_gang_be_cancelled() -> None:
    settings = {f"{SLOTS}interval": "1s", f"{SLOTS}maxFailures": "3"}
    assert slot_check_warning("3.5.9", settings.get) is None
