"""`up` fails, and the next one continues: with real processes, which only answer as daemons do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.devcluster import down, status, up
from hopsgpu.devcluster.daemons import members
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.state import load
from hopsgpu.errors import ClusterError
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal, until

# A release whose jars are not known: nothing is in the directory of its jars.
HADOOP = "3.3.99"
DAEMONS = ("namenode", "datanode", "resourcemanager", "node1")
UP = (sys.executable, "-m", "hopsgpu.cli.main", "cluster", "up", "--hadoop", HADOOP)
UP += ("--nodes", "1", "--gpus-per-node", "1")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a cluster whose `java` is `fake_java`."""
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    source = (Path(__file__).parent / "fake_java.py").read_text()
    java.write_text(f"#!{sys.executable}\n{source}")
    java.chmod(0o755)
    # Only the directory of the classes is necessary; the last argument is the source.
    compiler = java.with_name("javac")
    compiler.write_text('#!/bin/sh\nfor file; do :; done\nmkdir "${file%/*}/classes"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hopsgpu" / f"hadoop-daemons-{HADOOP}-unshaded").mkdir(parents=True)
    (tmp_path / "faults").mkdir()
    cluster = tmp_path / "cluster"
    yield cluster
    down(cluster)
    assert members(cluster) == []


def make_fault(directory: Path, daemon: str, fault: str) -> Path:
    file = directory.parent / "faults" / daemon
    file.write_text(fault)
    return file


def pids(directory: Path) -> dict[str, int]:
    state = load(ClusterLayout.at(directory))
    assert state is not None
    return {daemon: process.pid for daemon, process in state.processes.items() if process.alive}


def start(
    directory: Path, timeout: float | None = None, is_standalone: bool | None = None
) -> tuple[tuple[str, ...], str]:
    """Return the daemons that an `up` started, and what it said."""
    lines: list[str] = []
    info = up(
        directory,
        hadoop=HADOOP,
        nodes=1,
        gpus_per_node=1,
        is_standalone=is_standalone,
        timeout=timeout,
        say=lines.append,
    )
    return info.started, "\n".join(lines)


def test_only_the_daemon_that_died_is_started_again(directory: Path) -> None:
    fault = make_fault(directory, "resourcemanager", "die")
    with pytest.raises(ClusterError) as failed:
        start(directory)
    assert re.search(r"^resourcemanager ended .*/resourcemanager\.log", str(failed.value))
    assert "the fault of this test" in str(failed.value)
    running = pids(directory)
    assert set(running) == set(DAEMONS) - {"resourcemanager"}

    fault.unlink()
    started, said = start(directory)
    assert started == ("resourcemanager",)
    assert "starting the missing daemons: resourcemanager" in said
    assert pids(directory).items() > running.items()

    running = pids(directory)
    started, said = start(directory)
    assert (started, said) == ((), f"the cluster in {directory} is already running")
    assert pids(directory) == running


def test_a_timeout_names_what_is_missing_and_stops_no_daemon(directory: Path) -> None:
    start(directory)
    running = pids(directory)
    registered = directory / "registered" / "node1"
    registered.unlink()
    os.kill(running["node1"], signal.SIGSTOP)
    missing = "within 1 s.*node1 has not registered.*node1 is stopped by a signal"
    with pytest.raises(ClusterError, match=missing):
        start(directory, timeout=1)
    assert pids(directory) == running

    os.kill(running["node1"], signal.SIGCONT)
    registered.touch()
    assert start(directory)[0] == ()
    assert pids(directory) == running


def test_an_up_continues_after_an_interrupted_one(directory: Path) -> None:
    fault = make_fault(directory, "datanode", "hang")
    with subprocess.Popen(
        [*UP, "--dir", str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    ) as first:
        assert until(
            lambda: (directory / "cluster.json").exists() and len(pids(directory)) == 4,
        )
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=HANG_SECONDS)
    assert first.returncode != 0
    assert f"`hopsgpu cluster up --dir {directory}` continues with them" in said
    running = pids(directory)
    assert set(running) == set(DAEMONS)

    fault.unlink()
    assert start(directory)[0] == ()
    assert pids(directory) == running


def test_a_standalone_cluster_starts_its_workers_after_the_master(directory: Path) -> None:
    fault = make_fault(directory, "master", "hang")
    first = {"namenode", "datanode", "master"}
    with subprocess.Popen(
        [*UP, "--dir", str(directory), "--standalone"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    ) as starting:
        assert until(
            lambda: (directory / "cluster.json").exists() and set(pids(directory)) == first
        )
        # Nothing else starts while the master does not answer.
        assert not until(lambda: set(pids(directory)) != first, 1.0)
        starting.send_signal(signal.SIGINT)
        starting.communicate(timeout=HANG_SECONDS)
    running = pids(directory)
    assert set(running) == first

    fault.unlink()
    started, said = start(directory)
    assert started == ("node1",)
    assert "Spark spark://127.0.0.1:" in said
    assert pids(directory).items() > running.items()
    seen = status(directory)
    assert seen.healthy and seen.masters == {"master": "ALIVE"}
    assert [(node.name, node.state, node.gpus) for node in seen.nodes] == [("node1", "ALIVE", 1)]

    # A flag that is not given keeps the kind of the cluster.
    assert start(directory)[0] == ()
    with pytest.raises(ClusterError, match="preemption differ; .*a Spark Master"):
        up(directory, preemption=True)


def test_a_cluster_of_the_other_kind_is_refused(directory: Path) -> None:
    start(directory)
    running = pids(directory)
    with pytest.raises(ClusterError, match=r"is_standalone differ; .*cluster down.*--dir"):
        start(directory, is_standalone=True)
    assert pids(directory) == running
