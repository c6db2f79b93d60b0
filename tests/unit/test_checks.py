"""Settings that cannot hold gangs, each refused with what mends it; nothing is started."""

from __future__ import annotations

import pytest

import hopsgpu
from hopsgpu.discovery.shipping import ALIAS
from hopsgpu.errors import ConfigError
from hopsgpu.spark.checks import SESSION_DEFAULTS, check_gang, check_session

GOOD = {
    "spark.master": "yarn",
    **SESSION_DEFAULTS,
    "spark.yarn.dist.archives": f"hdfs:///x.zip#x,file:///tmp/s.tar.gz#{ALIAS}",
}


def test_our_own_settings_are_accepted() -> None:
    check_session(GOOD.get)
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
        ("spark.master", "local[4]", r"master=local\[4\].*not available yet; yarn is accepted"),
        ("spark.master", "spark://h:7077", "not available yet; yarn is accepted"),
        ("spark.master", "k8s://https://h", "Kubernetes cannot hold gangs"),
        ("spark.submit.deployMode", "cluster", "deployMode=cluster is not available yet"),
        ("spark.yarn.dist.archives", "file:///x.zip#x", "discovery script is not shipped"),
        ("spark.resources.discoveryPlugin", "com.nvidia.X", "discoveryPlugin=com.nvidia.X: hops"),
    ],
)
def test_each_setting_in_the_way_is_named(name: str, value: str | None, words: str) -> None:
    settings = {k: v for k, v in {**GOOD, name: value}.items() if v is not None}
    with pytest.raises(ConfigError, match=words):
        check_session(settings.get)


def test_all_findings_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check_session({"spark.master": "local", "spark.executor.instances": "2"}.get)
    for part in ("spark.master=local", "executor.instances=2", "dynamicAllocation.enabled"):
        assert part in str(error.value)


def test_a_gang_above_the_most_executors() -> None:
    settings = {"spark.dynamicAllocation.maxExecutors": "3"}
    check_gang(settings.get, 3)
    with pytest.raises(ConfigError, match="maxExecutors=3 is below the 4 executors"):
        check_gang(settings.get, 4)


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"spark.dynamicAllocation.enabled": False}, "dynamicAllocation.enabled is off"),
        ({"spark.executor.instances": 2}, "executor.instances=2"),
        ({"spark.master": "local[2]"}, "masters other than YARN are not available yet"),
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


def test_session_without_a_cluster_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="HADOOP_CONF_DIR is not set"):
        hopsgpu.session("nowhere")


def test_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost")
    with pytest.raises(ConfigError, match="Spark Connect"):
        hopsgpu.session("remote")
