"""What an administrator sets for an application: ports, interface, heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.spark.local_application import LocalApplication
from hopsgpu.backends.spark.yarn_application import YarnApplication
from hopsgpu.errors import ConfigError


def application(**options: str) -> YarnApplication:
    """One whose Spark knows some properties `spark.hopsgpu.<name>`."""
    settings = {f"spark.hopsgpu.{name}": value for name, value in options.items()}
    rest: Any = None
    jvm: Any = SimpleNamespace(setting=settings.get)
    return YarnApplication(rest, jvm, rest, rest)


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        ("40000-40100", range(40000, 40101)),
        (" 40000-40000\n", range(40000, 40001)),
        ("1-65535", range(1, 65536)),
    ],
)
def test_ports_are_a_first_and_a_last(given: str, ports: range) -> None:
    assert application(ports=given).ports == ports


@pytest.mark.parametrize(
    "given",
    ["40000", "40100-40000", "0-5", "1-65536", "40000-", "a-b", "40000:40100", "1-2-3", "-1-5"],
)
def test_ports_that_are_none_are_refused_with_what_was_given(given: str) -> None:
    said = f"spark.hopsgpu.ports='{given}': must be .*as 40000-40100"
    with pytest.raises(ConfigError, match=said):
        _ = application(ports=given).ports


def test_a_property_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert application().ports is None
    monkeypatch.setenv("HOPSGPU_PORTS", "7-8")
    monkeypatch.setenv("HOPSGPU_INTERFACE", "ib0")
    assert application().ports == range(7, 9)
    assert application(ports="5-6").ports == range(5, 7)
    assert (application().interface, application(interface="eth1").interface) == ("ib0", "eth1")


@pytest.mark.parametrize(("given", "keeps"), [("true", True), (" False", False), ("", False)])
def test_whether_data_is_kept(given: str, keeps: bool) -> None:
    assert application(keep_data=given).should_keep_data is keeps


def test_keeping_data_is_true_or_false() -> None:
    with pytest.raises(
        ConfigError, match=r"spark.hopsgpu.keep_data='yes': must be 'true' or 'false'"
    ):
        _ = application(keep_data="yes").should_keep_data


@pytest.mark.parametrize(("given", "seconds"), [("", 300.0), ("90s", 90.0), ("2m", 120.0)])
def test_the_interval_between_growths(given: str, seconds: float) -> None:
    assert application(**{"elastic.interval": given}).elastic_interval == seconds


def test_an_interval_that_is_none() -> None:
    with pytest.raises(ConfigError, match="spark.hopsgpu.elastic.interval='often'"):
        _ = application(**{"elastic.interval": "often"}).elastic_interval


@pytest.mark.parametrize(("given", "gives"), [("", True), ("true", True), ("False", False)])
def test_whether_elastic_gangs_give_way(given: str, gives: bool) -> None:
    assert application(**{"elastic.give_way": given}).should_give_way is gives


def test_giving_way_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="spark.hopsgpu.elastic.give_way='no': must be 'true'"):
        _ = application(**{"elastic.give_way": "no"}).should_give_way


def test_the_environment_names_the_options_of_elastic_gangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOPSGPU_ELASTIC_INTERVAL", "1h")
    monkeypatch.setenv("HOPSGPU_ELASTIC_GIVE_WAY", "false")
    assert application().elastic_interval == 3600.0
    assert application().should_give_way is False


@pytest.mark.parametrize(("given", "requests"), [("", False), ("true", True)])
def test_whether_gangs_request_without_room(given: str, requests: bool) -> None:
    assert application(request_without_room=given).should_request_without_room is requests


@pytest.mark.parametrize(
    ("given", "seconds"), [("", 600.0), ("90s", 90.0), ("2m", 120.0), ("off", None)]
)
def test_how_long_gpus_may_idle_until_people_are_told(given: str, seconds: float | None) -> None:
    assert application(idle_warning=given).gpu_idle_warning == seconds


@pytest.mark.parametrize(("given", "seconds"), [("", None), ("30m", 1800.0), ("off", None)])
def test_how_long_gpus_may_idle_until_a_run_ends(given: str, seconds: float | None) -> None:
    assert application(idle_timeout=given).gpu_idle_timeout == seconds


@pytest.mark.parametrize(("given", "limit"), [("", 2**30), ("512m", 2**29)])
def test_how_much_of_a_log_is_kept(given: str, limit: int) -> None:
    assert application(**{"log.limit": given}).log_limit == limit


def test_the_limit_of_a_log_is_a_size() -> None:
    with pytest.raises(ConfigError, match="spark.hopsgpu.log.limit='10': must be a memory size"):
        application(**{"log.limit": "10"}).check_options()


@pytest.mark.parametrize("name", ["idle_warning", "idle_timeout"])
def test_idleness_is_a_duration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"HOPSGPU_{name.upper()}", "1h")
    found = application()
    assert (found.gpu_idle_warning if name == "idle_warning" else found.gpu_idle_timeout) == 3600.0
    with pytest.raises(ConfigError, match=f"spark.hopsgpu.{name}='0s': must be a duration above"):
        application(**{name: "0s"}).check_options()


def test_who_and_what_it_was_is_known_after_its_jvm_has_ended() -> None:
    """The record of the run that ended with the JVM shows it."""
    context: Any = SimpleNamespace(applicationId="application_1_1")
    jvm: Any = SimpleNamespace(user=lambda: "ann")
    application = LocalApplication(context, jvm)
    assert (application.id, application.user) == ("application_1_1", "ann")
    del context.applicationId, jvm.user
    assert (application.id, application.user) == ("application_1_1", "ann")
