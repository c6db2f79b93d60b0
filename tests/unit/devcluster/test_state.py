"""The saved state of a cluster's directory, and its lock."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hopsgpu.devcluster import down, environment, status, up
from hopsgpu.devcluster.config import ClusterSpec, SiteConf
from hopsgpu.devcluster.daemons import DaemonProcess
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.ports import port_names
from hopsgpu.devcluster.state import ClusterState, load, locked, save
from hopsgpu.errors import ClusterError, ConfigError
from tests.bounds import HANG_SECONDS

GONE = DaemonProcess(2**22 - 1, "never")


def state(**other: object) -> ClusterState:
    spec = ClusterSpec(1, 1, SiteConf(sites={"yarn-site": {"a": "b"}}, nodes={"node1": {"c": "d"}}))
    ports = {name: 20000 + i for i, name in enumerate(port_names(spec.daemons))}
    return ClusterState(spec, "simulated: why", "/jdk", ports, **other)  # type: ignore[arg-type]


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    layout = ClusterLayout(tmp_path)
    assert load(layout) is None
    said = state().with_process("namenode", GONE)
    save(layout, said)
    assert load(layout) == said
    assert said.dead == ["namenode"]
    assert said.missing == ["namenode", "datanode", "resourcemanager", "node1"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"form": 99}', '{"form": 1, "spec": {}}'])
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, text: str) -> None:
    layout = ClusterLayout(tmp_path)
    layout.state.write_text(text)
    with pytest.raises(ClusterError, match=r"cluster\.json"):
        load(layout)


def test_one_at_a_time(tmp_path: Path) -> None:
    layout = ClusterLayout(tmp_path / "new")
    waiting, order, said = threading.Event(), [], []

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    def second() -> None:
        with locked(layout, say):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(layout, print):
        thread.start()
        assert waiting.wait(HANG_SECONDS)
        order.append("first")
    thread.join(HANG_SECONDS)
    assert order == ["first", "second"]
    assert "waiting for another" in said[0]


def test_where_no_cluster_is(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="hopsgpu cluster up --dir"):
        environment(tmp_path)
    found = status(tmp_path)
    assert (found.running, found.healthy, found.daemons) == (False, False, ())
    said: list[str] = []
    down(tmp_path / "none", say=said.append)
    down(tmp_path, say=said.append)
    assert all("no cluster" in line for line in said)
    assert not (tmp_path / "none").exists()


def test_the_status_of_a_cluster_that_died(tmp_path: Path) -> None:
    save(ClusterLayout(tmp_path), state(processes={"namenode": GONE, "node1": GONE}))
    found = status(tmp_path)
    assert not found.running
    assert not found.healthy
    assert not found.resourcemanager_answers
    assert [d.name for d in found.daemons if not d.alive] == ["namenode", "node1"]
    assert found.daemons[1].rpc.startswith("127.0.0.11:")
    assert found.to_json()["daemons"][0]["pid"] == GONE.pid
    with pytest.raises(ClusterError, match="no cluster runs"):
        environment(tmp_path)


def test_clients_of_another_spark_are_refused(tmp_path: Path) -> None:
    alive = DaemonProcess.of(os.getpid())
    save(ClusterLayout(tmp_path), state(processes={"master": alive}, spark="1.6.3"))
    with pytest.raises(ClusterError, match=r"Spark 1\.6\.3, .* PySpark \d"):
        environment(tmp_path)


def test_wrong_values_are_refused_before_anything_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with pytest.raises(ConfigError, match="nodes must be"):
        up(directory, nodes=0)
    with pytest.raises(ConfigError, match="accepted are"):
        up(directory, conf={"yarn": {}})
    with pytest.raises(ConfigError, match="letters"):
        up(tmp_path / "a b")
    assert not directory.exists()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot use"):
        up(tmp_path / "file")
