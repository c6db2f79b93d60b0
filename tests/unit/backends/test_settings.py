"""Settings that cannot hold gangs, each refused with what mends it; nothing is started."""

from __future__ import annotations

import pytest

import hopsgpu
from hopsgpu.backends.spark.settings import (
    check_gang,
    check_python,
    check_session,
    refuse_other_python,
    session_defaults,
)
from hopsgpu.errors import ConfigError
from hopsgpu.gpu.script_archive import ALIAS

GOOD = {
    "spark.master": "yarn",
    **session_defaults("yarn"),
    "spark.yarn.dist.archives": f"hdfs:///x.zip#x,file:///tmp/s.tar.gz#{ALIAS}",
}


def test_our_own_settings_are_accepted() -> None:
    check_session(GOOD)
    check_gang(GOOD.get, 10_000)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("spark.dynamicAllocation.enabled", "false", "dynamicAllocation.enabled is off"),
        ("spark.dynamicAllocation.enabled", None, "dynamicAllocation.enabled is off"),
        ("spark.dynamicAllocation.minExecutors", "1", "minExecutors=1.*set it to 0"),
        ("spark.dynamicAllocation.initialExecutors", "2", "initialExecutors=2.*set it to 0"),
        ("spark.executor.instances", "3", "spark.executor.instances=3.*set it to 0"),
        ("spark.dynamicAllocation.executorAllocationRatio", "0.5", "Ratio=0.5.*set it to 1"),
        (
            "spark.dynamicAllocation.shuffleTracking.enabled",
            "false",
            "shuffleTracking.enabled=true",
        ),
        ("spark.decommission.enabled", "true", "decommission.enabled=true: set it to false"),
        ("spark.scheduler.mode", "FAIR", "scheduler.mode=FAIR.*set it to FIFO"),
        ("spark.excludeOnFailure.enabled", "true", "excludeOnFailure.enabled=true"),
        ("spark.master", "local-cluster[1,1,1024]", r"cannot hold gangs; it must be yarn"),
        ("spark.master", "mesos://h:5050", "cannot hold gangs; it must be yarn"),
        ("spark.master", "k8s://https://h", "spark.kubernetes.container.image is not set"),
        ("spark.submit.deployMode", "both", "deployMode=both: must be client or cluster"),
        ("spark.yarn.dist.archives", "file:///x.zip#x", "discovery script is not shipped"),
        (
            "spark.executor.pyspark.memory",
            "2g",
            "pyspark.memory=2g: Spark limits the address space",
        ),
        ("spark.executorEnv.A", "`id`", "spark.executorEnv.A has '`', which the shell"),
        ("spark.resources.discoveryPlugin", "com.nvidia.X", "discoveryPlugin=com.nvidia.X: hops"),
    ],
)
def test_each_setting_in_the_way_is_named(name: str, value: str | None, words: str) -> None:
    settings = {k: v for k, v in {**GOOD, name: value}.items() if v is not None}
    with pytest.raises(ConfigError, match=words):
        check_session(settings)


@pytest.mark.parametrize("threshold", ["3s", "100", "29d", "400h", "soon"])
def test_a_second_copy_of_an_agents_task_is_prevented(threshold: str) -> None:
    """A company's defaults may let Spark start one; our sessions set a threshold of 365 days."""
    name = "spark.speculation.task.duration.threshold"
    settings = {**GOOD, "spark.speculation": "true", name: threshold}
    with pytest.raises(ConfigError, match="threshold=.*a second copy of a task that supervises"):
        check_session(settings)
    check_session({**settings, "spark.speculation": "false"})
    check_session({**settings, **session_defaults("yarn")})
    check_session({**settings, name: "525600min"})


def test_the_newer_name_of_a_setting_counts() -> None:
    old = {"spark.blacklist.enabled": "true"}
    check_session({**GOOD, **old})
    settings = {**GOOD, **old}
    del settings["spark.excludeOnFailure.enabled"]
    with pytest.raises(ConfigError, match="blacklist.enabled=true"):
        check_session(settings)


def test_a_limit_of_zero_is_none() -> None:
    for given in ("0", "0m", " 0g "):
        check_session({**GOOD, "spark.executor.pyspark.memory": given})


def test_all_findings_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check_session({"spark.master": "mesos://a", "spark.executor.instances": "2"})
    for part in ("spark.master=mesos://a", "executor.instances=2", "dynamicAllocation.enabled"):
        assert part in str(error.value)


def test_a_gang_above_the_most_executors() -> None:
    settings = {"spark.dynamicAllocation.maxExecutors": "3"}
    check_gang(settings.get, 3)
    with pytest.raises(ConfigError, match="maxExecutors=3 is below the 4 executors"):
        check_gang(settings.get, 4)


YARN = {"spark.master": "yarn"}


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({**YARN, "spark.dynamicAllocation.enabled": False}, "dynamicAllocation.enabled is off"),
        ({**YARN, "spark.executor.instances": 2}, "executor.instances=2"),
        ({"spark.master": "mesos://h:5050"}, "cannot hold gangs: spark.master=mesos"),
        ({"spark.app": None}, "conf has 'spark.app'"),
        ({3: "x"}, "conf has 3"),
        (["spark.app=x"], "conf="),
    ],
)
def test_session_refuses_before_it_starts_anything(conf: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hopsgpu.session("never", conf=conf)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_session_wants_a_name(name: object) -> None:
    with pytest.raises(ConfigError, match="name="):
        hopsgpu.session(name)  # type: ignore[arg-type]


def test_session_is_refused_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSGPU_CONTEXT", "/somewhere")
    with pytest.raises(ConfigError, match="a rank cannot start a Spark session"):
        hopsgpu.session("inner", master="local[1]")


def test_session_on_yarn_without_a_cluster_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="HADOOP_CONF_DIR is not set"):
        hopsgpu.session("nowhere", master="yarn")


def test_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost")
    with pytest.raises(ConfigError, match="Spark Connect"):
        hopsgpu.session("remote")


@pytest.mark.parametrize("executable", ["python3", "/opt/python3.11", "./env/bin/python"])
def test_a_python_that_may_be_the_drivers(executable: str) -> None:
    check_python(executable, "3.11")


def test_a_python_whose_name_says_another_version() -> None:
    words = r"the executors' Python \(/usr/bin/python3.9\) is 3.9, but the driver's is 3.11"
    with pytest.raises(ConfigError, match=words):
        check_python("/usr/bin/python3.9", "3.11")


def test_what_sparks_worker_says_of_another_version() -> None:
    told = (
        "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in"
        " worker has different version: 3.9 than that in driver: 3.11, PySpark cannot run with"
        " different minor versions."
    )
    with pytest.raises(ConfigError, match="the executors' Python is 3.9, but the driver's is 3.11"):
        refuse_other_python(f"Job aborted: {told}")
    refuse_other_python("Job aborted: something else")
