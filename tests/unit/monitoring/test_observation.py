"""Observations of a ResourceManager and a NodeManager that are stood in for, and of local lakes."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.backends.gang_queue import QueueMember, make_queue_dir
from hopsgpu.errors import HopsGpuError
from hopsgpu.monitoring.observation import Look, Monitor, WaitingGangs
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.unit.cluster_managers.test_cluster_gpus import (
    FIELD_NAMES,
    RESOURCES,
    configuration,
    yarn_answers,
)
from tests.unit.records import RecordedRun
from tests.unit.rest import Daemon, serving

RUN = "fit-20261120-230000-aaaaaa"


class Cluster:
    """What an exporter sees: the daemon, the lake, the environment; and what it told."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon = daemon
        self.root = LakePath(f"file://{directory}/lake")
        self.locks = LakePath(f"file://{directory}/locks")
        self.told: list[str] = []
        site = {
            "yarn.resourcemanager.webapp.address": daemon.address,
            "yarn.resourcemanager.cluster-id": "blue",
        }
        self.environ = {
            "HADOOP_CONF_DIR": str(configuration(directory, **site)),
            "HOPSGPU_LOCKS": self.locks.url,
        }

    def monitor(self, **more: Any) -> Monitor:
        return Monitor(self.environ, lambda: ([self.root], []), self.told.append, **more)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with serving({**yarn_answers("capacity_half"), RESOURCES: FIELD_NAMES}) as daemon:
        for one in daemon.answers["/ws/v1/cluster/nodes"]["nodes"]["node"]:
            here = one["nodeHostName"] == "node2"
            one["nodeHTTPAddress"] = daemon.address if here else "127.0.0.1:1"
        yield Cluster(daemon, tmp_path)


def up(look: Look) -> Mapping[str, bool]:
    return {name: state.is_up for name, state in look.sources.items()}


ALL = {"resource_manager": True, "node_managers": True, "queue": True, "runs": True}


def test_all_sources_answer(cluster: Cluster) -> None:
    waits = QueueMember(
        make_queue_dir(cluster.locks, "blue", "default"),
        application="application_1",
        executors=2,
        gpus=3,
    )
    waits.file_ticket(dataclasses.replace(waits.ticket))
    (cluster.locks / "blue" / "default" / "turn-999999999999").write(b"")
    RecordedRun(cluster.root, RUN, time.time(), queue="a")
    look = cluster.monitor().look()
    assert up(look) == ALL and cluster.told == []
    assert look.gpus is not None and (look.gpus.total, look.gpus.free) == (4, 2)
    assert look.answering == {"node1": False, "node2": True}
    assert look.queue is not None and [gang.gpus for gang in look.queue.waiting] == [6]
    assert look.queue.ignored_files == 1
    # The ResourceManager's queues say which one "a" is.
    assert look.runs is not None and [run.queue for run in look.runs.live] == ["root.a"]
    assert abs(look.time - time.time()) < 60
    waits.leave()


def test_no_gang_has_waited_yet(cluster: Cluster) -> None:
    look = cluster.monitor().look()
    assert up(look) == ALL and look.queue == WaitingGangs((), 0)


def test_the_others_go_on_without_the_resource_manager(cluster: Cluster) -> None:
    monitor = cluster.monitor()
    before = dict(cluster.daemon.answers)
    cluster.daemon.answers["/ws/v1/cluster/nodes"] = (503, "starting")
    for _ in range(2):
        look = monitor.look()
        assert up(look) == ALL | {"resource_manager": False, "node_managers": False}
        assert (look.gpus, look.answering) == (None, {})
    assert [line.partition(":")[0] for line in cluster.told] == [
        "resource_manager",
        "node_managers",
    ]
    cluster.daemon.answers.update(before)
    assert up(monitor.look()) == ALL
    assert cluster.told[2:] == ["resource_manager: answers again", "node_managers: answers again"]


@pytest.mark.parametrize("odd", [[], 7, {"nodes": {"node": 7}}, {"nodes": None}, "text"])
def test_odd_answers_are_no_answers(cluster: Cluster, odd: object) -> None:
    cluster.daemon.answers["/ws/v1/cluster/nodes"] = odd
    look = cluster.monitor().look()
    assert (look.sources["runs"].is_up, look.sources["queue"].is_up) == (True, True)
    assert look.gpus is None or look.gpus.nodes == ()


def test_a_resource_manager_that_hangs_is_not_waited_for(cluster: Cluster) -> None:
    may_end = threading.Event()

    def hang() -> object:
        may_end.wait(HANG_SECONDS)
        return (503, "late")

    cluster.daemon.answers["/ws/v1/cluster/scheduler"] = hang
    began = time.monotonic()
    look = cluster.monitor(look_seconds=0.5).look()
    may_end.set()
    assert time.monotonic() - began < HANG_SECONDS
    assert look.sources["resource_manager"].problem == "no answer in time"
    assert up(look)["runs"]


def test_nodes_that_are_gone_are_forgotten(cluster: Cluster) -> None:
    monitor = cluster.monitor()
    assert set(monitor.look().answering) == {"node1", "node2"}
    nodes = cluster.daemon.answers["/ws/v1/cluster/nodes"]["nodes"]
    nodes["node"] = [one for one in nodes["node"] if one["nodeHostName"] == "node2"]
    assert set(monitor.look().answering) == {"node2"}
    nodes["node"][0]["nodeHTTPAddress"] = "127.0.0.1:1"
    nodes["node"][0]["id"] = "node2:2"
    look = monitor.look()
    assert up(look)["node_managers"] is False
    # A node that is there keeps its types.
    assert look.gpus is not None and [len(node.types) for node in look.gpus.nodes] == [1]


def test_without_a_configuration_the_records_are_there(cluster: Cluster) -> None:
    RecordedRun(cluster.root, RUN, time.time())
    cluster.environ.clear()
    look = cluster.monitor().look()
    assert [name for name, is_up in up(look).items() if is_up] == ["runs"]
    assert "HADOOP_CONF_DIR is not set" in cluster.told[0]
    assert look.runs is not None and [run.queue for run in look.runs.live] == ["root.default"]


def test_roots_that_cannot_be_read_are_told_once(cluster: Cluster) -> None:
    bad = ["the directories of other users: no"]
    RecordedRun(cluster.root, RUN, time.time())
    monitor = Monitor(cluster.environ, lambda: ([cluster.root], bad), cluster.told.append)
    for _ in range(2):
        look = monitor.look()
        assert look.runs is not None and look.runs.unreadable_roots == 1
    assert cluster.told == [f"runs: not read: {bad[0]}"]


def test_a_ticket_that_cannot_be_renewed_is_told(cluster: Cluster) -> None:
    def refuse() -> None:
        raise HopsGpuError("the keytab gives no ticket")

    monitor = cluster.monitor(sign_in=refuse)
    assert up(monitor.look()) == up(monitor.look()) == ALL
    assert cluster.told == ["kerberos: the keytab gives no ticket"]


def test_the_environment_of_the_process_is_not_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", os.devnull)
    assert up(cluster.monitor().look()) == ALL
