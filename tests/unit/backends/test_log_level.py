"""How much Spark says under `hopsgpu submit`, whose driver is the command itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hopsgpu.backends.spark.log_level import quiet
from hopsgpu.backends.spark.submit_command import SubmitJob, plan_submission

LEVEL = "spark.log.level"


def test_a_driver_says_what_a_person_needs(tmp_path: Path) -> None:
    assert quiet({}, {}, tmp_path) == {LEVEL: "WARN"}
    assert quiet({"spark.driver.extraJavaOptions": "-Xss4m"}, {}, tmp_path) == {LEVEL: "WARN"}


@pytest.mark.parametrize(
    ("properties", "environ"),
    [
        ({LEVEL: "INFO"}, {}),
        ({"spark.driver.extraJavaOptions": "-Xss4m -Dlog4j2.configurationFile=own.xml"}, {}),
        ({"spark.driver.defaultJavaOptions": "-Dlog4j.configuration=file:own"}, {}),
        ({}, {"SPARK_SUBMIT_OPTS": "-Dlog4j.configurationFile=own.xml"}),
        ({}, {"JAVA_TOOL_OPTIONS": "-Dlog4j2.configurationFile=own.xml"}),
        ({}, {"LOG4J_CONFIGURATION_FILE": "own.xml"}),
    ],
)
def test_own_logging_wins(
    tmp_path: Path, properties: dict[str, str], environ: dict[str, str]
) -> None:
    assert quiet(properties, environ, tmp_path) == {}


@pytest.mark.parametrize("name", ["log4j2.properties", "log4j2.xml", "log4j2.yaml", "log4j2.json"])
def test_an_own_file_wins_where_spark_reads_it(tmp_path: Path, name: str) -> None:
    for directory in ("conf", "site"):
        (tmp_path / directory).mkdir()
    site = {"SPARK_CONF_DIR": str(tmp_path / "site")}
    (tmp_path / "conf" / name).write_text("rootLogger.level = info")
    assert quiet({}, {}, tmp_path) == {}
    # Spark does not look into its own where another directory is named.
    assert quiet({}, site, tmp_path) == {LEVEL: "WARN"}
    (tmp_path / "site" / name).write_text("rootLogger.level = info")
    assert quiet({}, site, tmp_path) == {}
    (tmp_path / "conf" / name).rename(tmp_path / "conf" / f"{name}.template")
    assert quiet({}, {}, tmp_path) == {LEVEL: "WARN"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ["WARN"]),
        ({"conf": {LEVEL: "INFO"}}, ["INFO"]),
        # The driver's log is in YARN, where nobody has to read past it.
        ({"deploy_mode": "cluster"}, []),
    ],
)
def test_it_is_on_spark_submits_line(
    tmp_path: Path, changed: dict[str, Any], said: list[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text("")
    environ = {"SPARK_CONF_DIR": str(tmp_path)}
    job = SubmitJob(str(script), **changed)
    given = plan_submission(job, {}, environ, "/v/bin/python").arguments
    assert [word.partition("=")[2] for word in given if word.startswith(LEVEL)] == said
