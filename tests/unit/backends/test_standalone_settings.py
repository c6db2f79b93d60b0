"""The settings of sessions on a standalone master."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.backends.spark.settings import check_session, session_defaults
from hopsgpu.backends.spark.standalone_session import check_standalone
from hopsgpu.errors import ConfigError

MASTER = "spark://h:7077"
CORES = "spark.executor.cores"


def test_cpu_executors_have_a_core_unless_spark_defaults_says_otherwise() -> None:
    assert session_defaults(MASTER)[CORES] == "1"
    assert CORES not in session_defaults(MASTER, {CORES: "4"})
    assert CORES not in session_defaults("yarn")


def test_nothing_of_yarn_is_set() -> None:
    assert not [name for name in session_defaults(MASTER) if ".yarn." in name]
    assert "spark.python.daemon.module" not in session_defaults(MASTER)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"spark.submit.deployMode": "cluster"}, "a standalone master runs no Python drivers"),
        ({"spark.scheduler.mode": "FAIR"}, "set it to FIFO"),
        ({"spark.hopsgpu.image": "a/b:1"}, "only YARN and Kubernetes start executors in images"),
        ({"spark.dynamicAllocation.minExecutors": "1"}, "set it to 0"),
    ],
)
def test_what_prevents_gangs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], words: str
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    check_standalone({"spark.master": MASTER})
    with pytest.raises(ConfigError, match=words):
        check_standalone({"spark.master": MASTER, **setting})


def test_an_application_without_cores_of_executors_is_refused() -> None:
    settings = {**session_defaults(MASTER), "spark.master": MASTER}
    check_session(settings)
    del settings[CORES]
    with pytest.raises(ConfigError, match="take all cores of the workers"):
        check_session(settings)


def test_a_shell_starts_no_executor() -> None:
    settings = {**session_defaults(MASTER), "spark.master": MASTER}
    check_session({**settings, "spark.executorEnv.PRICE": "$5"})
    with pytest.raises(ConfigError, match="executorEnv.PRICE"):
        check_session(
            {**session_defaults("yarn"), "spark.master": "yarn", "spark.executorEnv.PRICE": "$5"}
        )
