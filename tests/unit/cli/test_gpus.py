"""`hopsgpu gpus`: tables for people, JSON for programs, and looking again and again."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

from hopsgpu.cli.gpu_tables import tables
from hopsgpu.cli.main import main
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, GpuQueue, GpuType, GpuUser
from tests.bounds import HANG_SECONDS
from tests.conftest import as_in_a_terminal
from tests.unit.cluster_managers.test_cluster_gpus import (
    FIELD_NAMES,
    RESOURCES,
    configuration,
    yarn_answers,
)
from tests.unit.rest import Daemon, serving

NOW = 1_795_300_000.0
A100 = GpuType("NVIDIA A100-SXM4-80GB", 81559, 2)
FOUND = ClusterGpus(
    time=NOW,
    user="alice",
    nodes=(
        GpuNode("node1", "RUNNING", "", (A100,), "550.54.15", 2, 1, 1, 0, ""),
        GpuNode("node2", "UNHEALTHY", "", (), "", 2, 0, 0, 2, "ERROR no GPU can be used"),
    ),
    nodes_without=3,
    users=(
        GpuUser("application_1_0001", "nightly", "bob", "root.a", 1, NOW - 7500, 1.0, {"node1": 1}),
        GpuUser("application_1_0002", "[red]x\x1b[31m\n", "eve", "root.a", 1, None, NOW - 61, {}),
    ),
    queues=(
        GpuQueue("root", "", "RUNNING", False, 4, 4, 1, 3, None, "", ""),
        GpuQueue("root.a", "", "RUNNING", True, 2, 4, 1, 3, 1, "user", "root.a"),
        GpuQueue("root.b", "slow", "STOPPED", True, 2, 2, 0, None, 0, "state", ""),
    ),
    unexplained=1,
    acls=True,
    executor="1 GPU, 2 cores, 6144 MiB",
    problems=("node3: the NodeManager does not describe its GPUs: timed out",),
)
EXPECTED = """\
1 of 4 GPUs free, 1 used, 2 unhealthy (HH:MM:SS)
alice could get 1 now in queue root.a

NODE   STATE      FREE  USED  TOTAL   MEMORY  DRIVER     TYPE
node1  RUNNING       1     1      2  79.6GiB  550.54.15  NVIDIA A100-SXM4-80GB
node2  UNHEALTHY     0     0      2        -  -          -

GPUS  USER     FOR  APPLICATION         QUEUE   NODES    NAME
   1  bob    2h05m  application_1_0001  root.a  node1:1  nightly
   1  eve   ≤1m01s  application_1_0002  root.a  -        [red]x?[31m?

QUEUE   LABEL  GUARANTEED  MAXIMUM  USED  PENDING  COULD GET
root.a  -               2        4     1        3  1 (user limit in root.a)
root.b  slow            2        2     0        -  0 (it is STOPPED)
COULD GET: in executors of 1 GPU, 2 cores, 6144 MiB, if only you request GPUs

1 GPU is in use by applications that are not shown to the caller, or that have just ended
queues have ACLs; only administrators can see who may submit where
node2 is UNHEALTHY: ERROR no GPU can be used
node3: the NodeManager does not describe its GPUs: timed out
"""


def rendered(found: ClusterGpus, encoding: str = "utf-8", width: int | None = None) -> str:
    """What is printed, on a terminal of some width or elsewhere."""
    console = Console(width=width or 1000, color_system=None, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(tables(found, encoding, width), soft_wrap=width is None)
    lines = (line.rstrip() for line in capture.get().splitlines())
    return re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", "\n".join(lines) + "\n")


def test_what_is_free_who_has_the_rest_what_i_could_get() -> None:
    assert rendered(FOUND) == EXPECTED


def test_a_terminal_that_knows_only_ascii() -> None:
    said = rendered(FOUND, "ascii")
    assert said.isascii()
    assert "\\u2264" in said
    assert rendered(WIDE, "ascii", 60).isascii()


ON_A_NODE = ("550.54.15", 8, 6, 2, 0, "")
WIDE = dataclasses.replace(
    FOUND,
    nodes=tuple(
        GpuNode(f"gpu-a100-{i}.prod.example.com", "RUNNING", "", (kind,), *ON_A_NODE)
        for i, kind in enumerate((GpuType("NVIDIA H100 80GB HBM3", 81559, 8), A100))
    ),
    users=(
        GpuUser(
            "application_1763768000000_0042",
            "a name as long as its user has found it to be good",
            "alice",
            "root.research.vision.training",
            12,
            NOW - 7500,
            1.0,
            {"gpu-a100-0.prod.example.com": 6, "gpu-a100-1.prod.example.com": 6},
        ),
    ),
    queues=(
        GpuQueue("root.research", "", "RUNNING", False, 4, 4, 1, 3, None, "", ""),
        *(
            GpuQueue(f"root.research.vision.{name}", "", "RUNNING", True, 10, 16, 12, 0, 4, *bound)
            for name, bound in (("training", ("queue", "root.research")), ("tuning", ("nodes", "")))
        ),
    ),
)


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60, 40, 20])
def test_on_a_terminal_a_row_is_a_line(width: int) -> None:
    lines = rendered(WIDE, width=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    first = {line.split()[0] for line in lines if line}
    # None is broken: each begins with what it is of.
    assert {"NODE", "gpu-a100-0", "gpu-a100-1", "GPUS", "12", "QUEUE"} <= first
    rows = [line for line in lines if line.startswith(("NODE", "gpu-a100-"))]
    assert len(rows) == 3
    # Columns are under their headers.
    if width >= 60:
        header, *others = rows
        assert {line.index("RUNNING") for line in others} == {header.index("STATE")}


def test_the_least_important_goes_first() -> None:
    assert "550.54.15" in rendered(WIDE, width=100)
    at_80, at_60 = rendered(WIDE, width=80), rendered(WIDE, width=60)
    assert "  H100 80GB" in at_80
    assert "  H100 80G" in at_60
    assert "DRIVER" not in at_60
    for said in (at_80, at_60):
        # What one would type, and what tells a queue from its neighbours, is whole.
        assert "1763768000000_0042" in said
        assert re.search(r"^…\S*\.training .* 10 +16 +12 +0 +4 \(", said, re.MULTILINE)
        assert re.search(r"^…\S*n\.tuning .* 4 \(room o", said, re.MULTILINE)


def test_names_of_hosts_that_their_domains_tell_apart_stay_whole() -> None:
    names = ("a.x", "a.y", "b.x", "10.0.0.1")
    nodes = tuple(dataclasses.replace(WIDE.nodes[0], host=name) for name in names)
    said = rendered(dataclasses.replace(WIDE, nodes=nodes), width=200)
    assert [line.split()[0] for line in said.splitlines() if "RUNNING" in line] == [
        "a.x",
        "a.y",
        "b",
        "10.0.0.1",
    ]


def test_elsewhere_than_on_a_terminal_awk_finds_the_columns() -> None:
    lines = rendered(WIDE).splitlines()
    for header, row in (("NODE", "gpu-a100-0"), ("GPUS", "  12"), ("QUEUE", "root.research.")):
        names = next(line for line in lines if line.startswith(header)).split()
        found = next(line for line in lines if line.startswith(row)).split()
        columns = dict(zip(names, found, strict=False))
        expected = {
            "NODE": {"NODE": "gpu-a100-0.prod.example.com", "TOTAL": "8", "TYPE": "NVIDIA"},
            "GPUS": {"NODES": "gpu-a100-0.prod.example.com:6,gpu-a100-1.prod.example.com:6"},
            "QUEUE": {"PENDING": "0", "COULD": "4"},
        }[header]
        assert expected.items() <= columns.items()
    assert WIDE.users[0].name in "\n".join(lines)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0m00s"), (59.9, "0m59s"), (3600, "1h00m"), (90000, "1d01h")]
)
def test_how_long(seconds: float, shown: str) -> None:
    user = GpuUser("a", "", "", "", 1, NOW - seconds, 1.0, {})
    row = rendered(ClusterGpus(NOW, "x", (), 0, (user,), (), 0, False, "", ()))
    assert shown in row.split()


def test_no_gpus_at_all() -> None:
    said = rendered(ClusterGpus(NOW, "alice", (), 3, (), (), 0, False, "", ()))
    assert said.startswith("no node of this YARN has GPUs (3 nodes running)")
    assert len(said.splitlines()) == 1


# Against daemons that are stood in for.


@pytest.fixture
def yarn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with serving({**yarn_answers("capacity_half"), RESOURCES: FIELD_NAMES}) as daemon:
        for one in daemon.answers["/ws/v1/cluster/nodes"]["nodes"]["node"]:
            one["nodeHTTPAddress"] = daemon.address
        site = {"yarn.resourcemanager.webapp.address": daemon.address}
        monkeypatch.setenv("HADOOP_CONF_DIR", str(configuration(tmp_path, **site)))
        monkeypatch.setenv("HADOOP_USER_NAME", "alice")
        monkeypatch.setenv("COLUMNS", "40")
        for name in ("YARN_CONF_DIR", "FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        yield daemon


def run(*options: str) -> Any:
    return CliRunner().invoke(main, ["gpus", *options])


@pytest.mark.usefixtures("yarn")
def test_piped_it_has_neither_colours_nor_broken_lines() -> None:
    ran = run()
    assert ran.exit_code == 0, ran.output
    assert "\x1b" not in ran.stdout
    node1 = next(line for line in ran.stdout.splitlines() if line.startswith("node1"))
    assert "NVIDIA A100-SXM4-80GB" in node1
    assert "550.54.15" in node1


@pytest.mark.usefixtures("yarn")
def test_piped_in_colours_it_is_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run().stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run().stdout
    assert "\x1b[32m" in coloured
    lines = re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()
    assert lines[2:] == plain.splitlines()[2:]


@pytest.mark.usefixtures("yarn")
def test_json_for_programs() -> None:
    ran = run("--json", "--user", "bob")
    said = json.loads(ran.stdout)
    assert (said["user"], said["gpus"]["total"], said["gpus"]["free"]) == ("bob", 4, 2)
    assert said["nodes"][0]["types"][0]["memory_mib"] == 81559


def test_no_resource_manager_is_one_line(yarn: Daemon) -> None:
    yarn.answers.clear()
    for options in ((), ("--json",)):
        ran = run(*options)
        assert (ran.exit_code, ran.stdout) == (1, "")
        assert ran.stderr.startswith("hopsgpu: the ResourceManager does not answer")
        assert len(ran.stderr.splitlines()) == 1


def test_a_node_manager_that_is_not_there_is_one_line_and_the_rest(yarn: Daemon) -> None:
    yarn.answers["/ws/v1/cluster/nodes"]["nodes"]["node"][0]["nodeHTTPAddress"] = "127.0.0.1:1"
    ran = run()
    assert ran.exit_code == 0
    (line,) = [line for line in ran.stdout.splitlines() if "does not describe" in line]
    assert line == "node2: the NodeManager does not describe its GPUs: Connection refused"
    assert "NVIDIA A100-SXM4-80GB" in ran.stdout


@pytest.mark.parametrize("given", ["0", "0.1", "often", "nan", "inf"])
def test_how_often_must_be_a_time(given: str) -> None:
    ran = run(f"--watch={given}")
    assert ran.exit_code == 2
    assert "--watch" in ran.stderr


def started(*options: str, terminal: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hopsgpu.cli.main", "gpus", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        text=True,
        preexec_fn=as_in_a_terminal,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, err


def test_watching_goes_on_until_ctrl_c(yarn: Daemon) -> None:
    with started("--watch", "0.5") as process:
        assert process.stdout is not None
        firsts = [line for line in _until(process, "GPUs free", 2) if "GPUs free" in line]
        assert len(firsts) == 2
        assert ended(process) == (0, "")
    # Neither a GPU nor a driver changes: each of the two nodes was asked once.
    assert yarn.asked.count(RESOURCES) == 2


def test_watching_bears_a_resource_manager_that_restarts(yarn: Daemon) -> None:
    before = dict(yarn.answers)
    with started("--json", "--watch", "0.5") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        yarn.answers.clear()
        assert process.stderr is not None
        assert "does not answer" in process.stderr.readline()
        yarn.answers.update(before)
        again = json.loads(process.stdout.readline())
        assert again["gpus"] == first["gpus"]
        assert again["time"] > first["time"]
        assert ended(process)[0] == 0


def _until(process: subprocess.Popen[str], words: str, times: int) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        times -= words in line
        if not times:
            return


@pytest.mark.usefixtures("yarn")
def test_on_a_terminal_it_is_drawn_in_place_with_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    try:
        with started("--watch", "0.5", terminal=theirs) as process:
            os.close(theirs)
            shown = _read(ours, lambda text: text.count("GPUs free") >= 2)
            process.send_signal(signal.SIGINT)
            rest = _read(ours, lambda _: False)
            assert process.wait(timeout=HANG_SECONDS) == 0
    finally:
        os.close(ours)
    # The alternate screen, in which nothing scrolls, and back.
    assert "\x1b[?1049h" in shown
    # Where a row is cut rather than broken.
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.replace("\x1b[H", "\n"))
    drawn = plain.splitlines()
    assert any(re.fullmatch(r"node1 +RUNNING +\d +\d +2", line.rstrip()) for line in drawn)
    assert max(len(line) for line in drawn) <= 40
    before, left, after = rest.partition("\x1b[?1049l")
    assert left, before
    assert "\x1b[32m" in after, "no colours"
    # The last table stays.
    assert re.search(r"node1 .*RUNNING", after)
    assert "Traceback" not in after


def _read(terminal: int, enough: Any) -> str:
    """What a terminal is told until it is enough, or nobody writes any more."""
    found, deadline = "", time.monotonic() + HANG_SECONDS
    while not enough(found) and time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            found += os.read(terminal, 65536).decode()
        except OSError:  # the other end is closed
            break
    return found
