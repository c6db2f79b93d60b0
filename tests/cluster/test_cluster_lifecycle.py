"""One small real cluster from `up` to `down`, by the command line alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from hopsgpu.devcluster.daemons import members
from hopsgpu.devcluster.layout import address_of
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal, gone, until

# `make test` starts clusters too, by the library.
pytestmark = pytest.mark.soak

DAEMONS = {"namenode", "datanode", "resourcemanager", "node1"}
UP = ("up", "--nodes", "1", "--gpus-per-node", "1")


def hopsgpu(directory: Path, command: str, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hopsgpu.cli.main", "cluster", command, "--dir", str(directory)]
    return subprocess.run(
        [*argv, *args], capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )


def status(directory: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(hopsgpu(directory, "status", "--json").stdout)
    return said


def daemon(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(d for d in status(directory)["daemons"] if d["name"] == name)
    return found


def open_ports(directory: Path) -> list[str]:
    ports: dict[str, int] = json.loads((directory / "cluster.json").read_text())["ports"]
    found = []
    for name, port in ports.items():
        with socket.socket() as client:
            if client.connect_ex((address_of(name.partition(".")[0]), port)) == 0:
                found.append(name)
    return found


def processes(directory: Path) -> list[str]:
    """Command lines that name the directory, and processes marked as this cluster's."""
    found = [str(p.pid) for p in members(directory)]
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"{directory}/" in words:
            found.append(words.replace("\0", " "))
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A cluster's directory, and what its first `up` printed."""
    directory = tmp_path_factory.mktemp("lifecycle")
    try:
        first = hopsgpu(directory, *UP)
        assert first.returncode == 0, first.stderr
        yield directory, first.stdout
    finally:
        last = hopsgpu(directory, "down")
    assert last.returncode == 0, last.stderr
    assert processes(directory) == []


def test_up_says_where_each_log_is_and_what_the_gpus_are(running: tuple[Path, str]) -> None:
    directory, said = running
    for name in DAEMONS:
        log = directory / "logs" / f"{name}.log"
        assert f"{name}: log {log}" in said
        assert log.stat().st_size > 0
    assert "GPUs: 1 × 1, simulated" in said or "GPUs: 1 × 1, real" in said


def test_up_on_a_running_cluster_says_so(running: tuple[Path, str]) -> None:
    directory, _ = running
    pids = {d["name"]: d["pid"] for d in status(directory)["daemons"]}
    again = hopsgpu(directory, "up")
    assert again.returncode == 0
    assert "is already running" in again.stdout
    other = hopsgpu(directory, "up", "--nodes", "2")
    assert other.returncode == 1
    assert "nodes differ" in other.stderr
    assert {d["name"]: d["pid"] for d in status(directory)["daemons"]} == pids


def test_status_shows_daemons_nodes_and_gpus(running: tuple[Path, str]) -> None:
    directory, _ = running
    shown = hopsgpu(directory, "status")
    assert shown.returncode == 0
    said = status(directory)
    assert {d["name"] for d in said["daemons"]} == DAEMONS
    for d in said["daemons"]:
        assert d["alive"]
        # The page is up, and it is this process's.
        assert requests.get(f"{d['web']}/jmx", timeout=HANG_SECONDS).ok
        for value in (d["name"], str(d["pid"]), d["rpc"], d["web"], d["log"]):
            assert value in shown.stdout
    assert [(n["name"], n["state"], n["gpus"]) for n in said["nodes"]] == [("node1", "RUNNING", 1)]
    assert (said["gpus_total"], said["gpus_used"]) == (1, 0)
    assert "0 of 1 used" in shown.stdout


def test_daemons_keep_what_they_store_in_the_clusters_directory(
    running: tuple[Path, str],
) -> None:
    """In Hadoop's own places below /tmp they would meet those of another cluster."""
    directory, _ = running
    said = "".join(log.read_text() for log in (directory / "logs").glob("*.log"))
    stores = re.findall(r"(?:store directory |mirror at|editlog file at):\s*file:(/\S+)", said)
    assert len(stores) >= 3
    assert all(Path(store).is_relative_to(directory / "yarn") for store in stores), stores
    for started in json.loads((directory / "cluster.json").read_text())["processes"].values():
        environ = Path(f"/proc/{started['pid']}/environ").read_bytes().split(b"\0")
        (temporary,) = (v.decode() for v in environ if v.startswith(b"TMPDIR="))
        assert Path(temporary.removeprefix("TMPDIR=")).is_relative_to(directory / "tmp")


def test_env_points_a_shell_at_it(running: tuple[Path, str]) -> None:
    directory, _ = running
    script = (
        'eval "$(cat)" && echo "$HADOOP_CONF_DIR $SPARK_CONF_DIR" && "$JAVA_HOME/bin/java" -version'
    )
    said = hopsgpu(directory, "env")
    ran = subprocess.run(
        ["bash", "-euc", script], input=said.stdout, capture_output=True, text=True, check=True
    )
    conf, spark_conf = map(Path, ran.stdout.split())
    for name in ("core-site.xml", "yarn-site.xml", "resource-types.xml"):
        assert (conf / name).is_file()
    assert (spark_conf / "spark-defaults.conf").is_file()
    assert "HADOOP_USER_NAME" not in said.stdout


def test_a_dead_daemon_is_seen_and_started_again(running: tuple[Path, str]) -> None:
    directory, _ = running
    killed = daemon(directory, "node1")["pid"]
    os.kill(killed, signal.SIGKILL)
    assert until(lambda: gone(killed))
    seen = hopsgpu(directory, "status")
    assert seen.returncode == 1
    assert "dead" in seen.stdout
    assert status(directory)["gpus_total"] == 0
    mended = hopsgpu(directory, "up")
    assert mended.returncode == 0, mended.stderr
    assert "starting the missing daemons: node1" in mended.stdout
    assert "namenode: log" not in mended.stdout
    assert hopsgpu(directory, "status").returncode == 0
    assert status(directory)["gpus_total"] == 1


def test_down_leaves_no_process_and_no_port_but_the_files(running: tuple[Path, str]) -> None:
    directory, _ = running
    file = f"{daemon(directory, 'namenode')['web']}/webhdfs/v1/user/alice/f?user.name=alice"
    requests.put(f"{file}&op=CREATE", data=b"kept", timeout=HANG_SECONDS).raise_for_status()
    ports = json.loads((directory / "cluster.json").read_text())["ports"]

    assert hopsgpu(directory, "down").returncode == 0
    assert processes(directory) == []
    assert open_ports(directory) == []
    assert hopsgpu(directory, "status").returncode == 1
    assert "no cluster runs" in hopsgpu(directory, "env").stderr

    assert hopsgpu(directory, *UP).returncode == 0
    assert json.loads((directory / "cluster.json").read_text())["ports"] == ports
    assert requests.get(f"{file}&op=OPEN", timeout=HANG_SECONDS).content == b"kept"


def test_a_daemon_that_cannot_start_ends_up_and_no_other_daemon(tmp_path: Path) -> None:
    conf = tmp_path / "broken.yaml"
    key = "yarn.resourcemanager.scheduler.class"
    conf.write_text(f"yarn-site: {{{key}: org.example.NoSuchScheduler}}\n")
    directory = tmp_path / "cluster"
    ran = hopsgpu(directory, *UP, "--conf", str(conf))
    assert ran.returncode == 1
    assert "resourcemanager ended during startup" in ran.stderr
    assert str(directory / "logs" / "resourcemanager.log") in ran.stderr
    assert "org.example.NoSuchScheduler" in ran.stderr
    assert "Traceback" not in ran.stderr
    left = {d["name"]: d["alive"] for d in status(directory)["daemons"]}
    assert hopsgpu(directory, "down").returncode == 0
    assert left == {name: name != "resourcemanager" for name in DAEMONS}
    assert processes(directory) == []
    assert open_ports(directory) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_up_continues_after_an_interrupted_one(tmp_path: Path, sent: signal.Signals) -> None:
    argv = [sys.executable, "-m", "hopsgpu.cli.main", "cluster", *UP, "--dir", str(tmp_path)]
    quiet = subprocess.DEVNULL
    try:
        with subprocess.Popen(argv, stdout=quiet, stderr=quiet, preexec_fn=as_in_a_terminal) as up:
            assert until(lambda: bool(members(tmp_path)))
            up.send_signal(sent)
            assert up.wait(HANG_SECONDS) != 0
        left = {d["name"]: d["pid"] for d in status(tmp_path)["daemons"] if d["alive"]}
        assert left
        continued = hopsgpu(tmp_path, *UP)
        assert continued.returncode == 0, continued.stderr
        now = {d["name"]: d["pid"] for d in status(tmp_path)["daemons"]}
        assert set(now) == DAEMONS and now.items() >= left.items()
    finally:
        hopsgpu(tmp_path, "down")
    assert processes(tmp_path) == []
