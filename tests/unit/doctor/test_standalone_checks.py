"""The doctor's checks of a standalone master, and their order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.cli.main import main
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.standalone.master_page import read_version
from hopsgpu.doctor import lake_checks, settings_checks, standalone_checks
from hopsgpu.doctor.examination import Examination, examined_master
from hopsgpu.doctor.free_nodes import nodes_to_inspect
from hopsgpu.doctor.machine_checks import HadoopClient
from hopsgpu.doctor.report import CheckState
from hopsgpu.doctor.standalone_checks import NODE_REMEDIES, MasterFacts
from hopsgpu.doctor.standalone_probe import StandaloneProbe
from tests.unit.doctor.test_checks import BIG, NODE, gpu_node, gpus, seen, state_of
from tests.unit.rest import serving

MASTER = "spark://m:7077"
CLIENT = HadoopClient(("/conf",), "", "hdfs://nn:8020", (), None)


def worker(host: str, state: str = "RUNNING", number: int = 1, total: Amount = BIG) -> Node:
    return Node(f"worker-{number}-{host}", host, state, total, NOTHING)


FACTS = MasterFacts(
    address="http://m:8080",
    standby={},
    spark="4.3.0",
    nodes=(worker("a"), worker("b")),
    gpus=gpus(gpu_node("a"), gpu_node("b")),
)


def test_a_master_and_its_standby() -> None:
    check = standalone_checks.check_master(FACTS)
    assert check.seen == "http://m:8080 is ALIVE, Spark 4.3.0, 2 workers"
    two = replace(FACTS, spark="", standby={"http://n:8080": "STANDBY"})
    check = standalone_checks.check_master(two)
    assert check.seen == "http://m:8080 is ALIVE, 2 workers; http://n:8080 is STANDBY"
    silent = standalone_checks.check_no_answer("no Spark master is ALIVE")
    for name in ("spark.hopsgpu.master.ui", "8080", "spark.hopsgpu.master.token_file"):
        assert state_of(silent, "no Spark master", name) == "wrong"


def test_the_version_of_the_master() -> None:
    same = standalone_checks.check_version("4.3.1", "4.3.0")
    assert same is not None and same.state == "ok"
    other = standalone_checks.check_version("3.5.6", "4.3.0")
    assert other is not None
    assert state_of(other, "runs Spark 3.5.6, and this machine 4.3.0", "pyspark==3.5.6") == "wrong"
    assert standalone_checks.check_version("", "4.3.0") is None
    assert standalone_checks.check_version("4.3.0", None) is None


@pytest.mark.parametrize(
    ("html", "version"),
    [
        ('<span class="version me-3">4.3.0</span>', "4.3.0"),
        ('<span class="version" style="margin-right: 15px;">3.5.6-amzn-2</span>', "3.5.6-amzn-2"),
        ("<span>4.3.0</span>", ""),
        ('<span class="version"><b>x</b></span>', ""),
    ],
)
def test_the_version_on_the_masters_page(html: str, version: str) -> None:
    assert read_version(f"<html>{html}</html>") == version


def test_gpus_of_the_workers() -> None:
    assert state_of(standalone_checks.check_gpus(FACTS), "4 on 2 workers (a 2, b 2)") == "ok"
    cpus = replace(FACTS, nodes=(worker("a", total=Amount(0, 8, 8)),))
    for name in ("spark.worker.resource.gpu.amount", "discoveryScript", "spark-scripts"):
        check = standalone_checks.check_gpus(cpus)
        assert state_of(check, "none of 1 worker has GPUs", name) == "wrong"
    none = standalone_checks.check_gpus(replace(FACTS, nodes=()))
    assert state_of(none, "no worker has registered", "start-worker.sh") == "wrong"
    lost = replace(FACTS, nodes=(worker("a"), worker("b", "LOST")))
    check = standalone_checks.check_gpus(lost)
    assert state_of(check, "2 on 1 worker (a 2); LOST: b", "start these workers") == "wrong"
    # Another worker of the host lives.
    both = replace(FACTS, nodes=(worker("a"), worker("a", "LOST", 2)))
    assert standalone_checks.check_gpus(both).state == "ok"


def test_a_hadoop_configuration_is_optional() -> None:
    check = functools.partial(
        lake_checks.check_hadoop_conf,
        manager="a standalone master",
        shared=standalone_checks.SHARED_LAKE,
    )
    lake = "hdfs://nn:8020/user/me/hopsgpu"
    assert state_of(check(CLIENT, lake, is_kerberized=False), f"runs go to {lake}") == "ok"
    none = check(replace(CLIENT, places=()), "file:///home/me/hopsgpu", is_kerberized=False)
    assert state_of(none, "all workers must share", "spark.hopsgpu.root") == "unknown"
    secure = check(CLIENT, "", is_kerberized=True)
    assert state_of(secure, "passes no tokens", "without Kerberos") == "wrong"
    broken = check(replace(CLIENT, problem="cannot read x"), "", is_kerberized=False)
    assert state_of(broken, "cannot read x", "unset HADOOP_CONF_DIR") == "wrong"


def test_remedies_of_nodes_name_settings_of_workers() -> None:
    other = replace(NODE, spark="4.0.0", leases=replace(NODE.leases, problem="mode 755"))
    found = seen(other, failed={"b": "no nvidia-smi"}, remedies=NODE_REMEDIES)
    assert state_of(found["executor spark"], "", "run the workers with Spark 4.3.0") == "wrong"
    assert state_of(found["gpu leases"], "", "HOPSGPU_LEASE_DIR in conf/spark-env.sh") == "wrong"
    assert state_of(found["discovery"], "", "PYSPARK_PYTHON") == "wrong"
    assert "yarn" not in " ".join(check.fix for check in found.values())


def test_a_python_that_the_nodes_lack() -> None:
    problem = 'java.io.IOException: Cannot run program "/env/python": error=2'
    found = seen(problem=problem, remedies=NODE_REMEDIES)
    assert state_of(found["executor python"], "cannot run /env/python", "PYSPARK_PYTHON") == "wrong"


def test_hosts_with_several_workers_are_inspected_once() -> None:
    nodes = (worker("a"), worker("a", number=2, total=Amount(2, 0, 0)), worker("b", "LOST"))
    full = gpu_node("a", used=2)
    observed = gpus(full, gpu_node("a"), gpu_node("b", state="LOST"))
    free, why = nodes_to_inspect(nodes, observed)
    assert (free, why) == (("a",), {"b": "it is LOST"})


def test_a_session_that_is_late_and_an_executor_that_ended() -> None:
    probe = StandaloneProbe(gpus(), (), {}, MASTER)
    starting: Any = None
    why, fix = probe.give_up("name", "it has not started within 9 s", starting)
    assert why.startswith("it has not started within 9 s") and MASTER in fix
    assert probe.exclude({}, ("a",)) is None
    reason = probe.end_reason("app-1/000002", "a")
    assert reason.startswith("app-1/000002 ended there.") and "work/app-1/2" in reason


def test_settings_are_those_of_the_master() -> None:
    check = settings_checks.check_settings(MASTER, {"spark.master": "yarn"}, {}, 2)
    assert check.state is CheckState.OK
    cluster_mode = {"spark.submit.deployMode": "cluster"}
    check = settings_checks.check_settings(MASTER, {}, cluster_mode, 2)
    assert state_of(check, "a standalone master runs no Python drivers") == "wrong"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An environment that names no cluster; the lake is a local directory."""
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/root")
    monkeypatch.setenv("HOPSGPU_LOCKS", f"file://{tmp_path}/locks")
    yield


BEFORE = ["java", "spark", "python", "hadoop conf", "master"]


def test_the_order_of_the_checks(bare: None) -> None:
    answer = {"status": "ALIVE", "workers": [], "activeapps": [], "completedapps": []}
    with serving({"/json/": answer}) as server:
        conf = {"spark.master": MASTER, "spark.hopsgpu.master.ui": f"http://{server.address}"}
        checks = list(Examination(conf, True, 1.0).checks())
    names = [check.name for check in checks]
    assert names[:10] == [*BEFORE, "gpus", "settings", "lake", "gang queue", "session"]
    states = {check.name: check for check in checks}
    assert states["master"].seen == f"http://{server.address} is ALIVE, 0 workers"
    assert states["lake"].state == "ok"
    assert states["session"].seen == "not tried: no node has GPUs"


def test_a_master_that_does_not_answer(bare: None) -> None:
    # Nobody listens on port 1.
    conf = {"spark.master": MASTER, "spark.hopsgpu.master.ui": "http://127.0.0.1:1"}
    checks = {check.name: check for check in Examination(conf, True, 1.0).checks()}
    assert state_of(checks["master"], "does not answer", "token_file") == "wrong"
    assert checks["gpus"].state == "unknown"
    assert checks["session"].seen == "not tried: the master does not answer"
    invalid = {**conf, "spark.hopsgpu.master.ui": "nothing"}
    checks = {check.name: check for check in Examination(invalid, False, 1.0).checks()}
    assert state_of(checks["master"], "spark.hopsgpu.master.ui='nothing'") == "wrong"
    assert "session" not in checks


def test_options_of_yarn_alone_are_refused(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--queue", "--image"):
        with pytest.raises(SystemExit):
            main(["doctor", "--master", MASTER, option, "x"])
        assert "a standalone master" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--master", "mesos://m"])
    assert "spark.master=mesos://m: it must be yarn" in capsys.readouterr().err
    assert examined_master({}, {}) == "yarn"
