"""Four executors get four GPUs again and again; types of GPUs; a node's health."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import requests

from hopsgpu import cluster
from hopsgpu.yarn.resource_manager import ResourceManager
from tests.conftest import until
from tests.contention import start_script

ROUNDS = 20
KILLS = ("", "rank", "keeper", "executor")

LAUNCHES = f"""
    import os, signal, sys, time
    from pathlib import Path
    import hopsgpu

    def keepers(gpu):
        "The processes that have the lease of a GPU open."
        found = []
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if descriptor.readlink().name == gpu:
                    found.append(int(descriptor.parts[2]))
            except OSError:
                continue
        return sorted(set(found))

    def executor():
        own = os.environ["CONTAINER_ID"].encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                java = (process / "comm").read_text() == "java\\n"
                if java and b"CONTAINER_ID=" + own in (process / "environ").read_bytes():
                    return int(process.name)
            except OSError:
                continue

    def gpus(kill, notes):
        context = hopsgpu.context()
        (gpu,) = context.gpus
        leased = keepers(gpu)
        assert leased, "nobody has the lease of " + gpu
        (notes / str(context.rank)).write_text(gpu)
        if context.rank == 1:
            while len(list(notes.iterdir())) < 4:
                time.sleep(0.05)  # nobody tells
            if kill == "rank":
                os.kill(os.getpid(), signal.SIGKILL)
            if kill == "executor":
                os.kill(executor(), signal.SIGKILL)
                signal.pause()
            if kill == "keeper":
                os.kill(leased[0], signal.SIGKILL)
        return gpu

    hopsgpu.session("gpus")
    for number in range({ROUNDS}):
        kill = {KILLS}[number % {len(KILLS)}]
        notes = Path(sys.argv[1], str(number))
        notes.mkdir()
        try:
            hopsgpu.launch(gpus, args=(kill, notes), workers=4, progress="off")
        except hopsgpu.RankFailed as error:
            assert kill in ("rank", "executor"), error
        else:
            assert kill in ("", "keeper"), kill
        given = [note.read_text() for note in notes.iterdir()]
        print("round", number, kill or "none", len(given), len(set(given)), flush=True)
"""


@pytest.mark.timeout(900)
def test_four_executors_get_four_gpus_across_kills(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory = tmp_path_factory.mktemp("gpus")
    cluster.up(directory)
    try:
        script = start_script({**os.environ, **cluster.environment(directory)}, LAUNCHES, tmp_path)
        out, err = script.communicate(timeout=840)
        assert script.returncode == 0, err[-3000:]
        rounds = [line.split()[1:] for line in out.splitlines() if line.startswith("round")]
        assert rounds == [
            [str(number), KILLS[number % len(KILLS)] or "none", "4", "4"]
            for number in range(ROUNDS)
        ]
    finally:
        cluster.down(directory)


TYPES = """
    import os, sys, time
    import hopsgpu
    from pathlib import Path

    def where(directory):
        context = hopsgpu.context()
        Path(directory, str(context.rank)).touch()
        while not Path(directory, "go").exists():
            time.sleep(0.05)
        return context.host

    directory, label, *options = sys.argv[1:]
    conf = {"spark.hopsgpu.markers": "A100=example.com/gpu-a100"} if label == "-" else {
        "spark.yarn.executor.nodeLabelExpression": label}
    hopsgpu.session("types", conf=conf)
    result = hopsgpu.launch(where, args=(directory,), workers=2, progress="off", gpu_type="A100",
        acquire_timeout="60s", **dict(option.split("=") for option in options))
    print(*sorted({rank.host for rank in result.ranks}), flush=True)
"""
MARKER = "example.com/gpu-a100"
CS = "yarn.scheduler.capacity.root"
MARKED: Mapping[str, Any] = {
    "resource-types": {"yarn.resource-types": f"yarn.io/gpu,{MARKER}"},
    "nodes": {"node2": {f"yarn.nodemanager.resource-type.{MARKER}": 2}},
    "yarn-site": {"yarn.node-labels.enabled": True},
    "capacity-scheduler": {
        f"{CS}.accessible-node-labels.fast.capacity": 100,
        f"{CS}.default.accessible-node-labels": "*",
        f"{CS}.default.accessible-node-labels.fast.capacity": 100,
    },
}


def hosts_of(env: dict[str, str], *arguments: str) -> str:
    """Where a gang of two on A100s has run."""
    script = start_script(env, TYPES, *arguments)
    out, err = script.communicate(timeout=180)
    assert script.returncode == 0, err[-3000:]
    return out.strip()


def rest(web: str, path: str, body: object = None) -> Any:
    """The ResourceManager's answer; an administrator's POST where there is a body."""
    url, who = f"{web}/ws/v1/cluster/{path}", {"user.name": getpass.getuser()}
    if body is None:
        answer = requests.get(url, timeout=20)
    else:
        answer = requests.post(url, json=body, params=who, timeout=20)
    answer.raise_for_status()
    return answer.json() if body is None else None


def test_marker_resources_and_node_labels(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory = tmp_path_factory.mktemp("types")
    cluster.up(directory, conf=MARKED)
    try:
        env = {**os.environ, **cluster.environment(directory)}
        (web,) = (d.web for d in cluster.status(directory).daemons if d.name == "resourcemanager")

        def marked() -> dict[str, int]:
            """Marker resources in use on each node."""
            return {
                node["nodeHostName"]: told["value"]
                for node in rest(web, "nodes")["nodes"]["node"]
                for told in node["usedResource"]["resourceInformations"]["resourceInformation"]
                if told["name"] == MARKER
            }

        assert marked() == {"node1": 0, "node2": 0}
        script = start_script(env, TYPES, str(tmp_path), "-")
        try:
            assert until(lambda: len(list(tmp_path.iterdir())) == 2, 120)
            assert marked() == {"node1": 0, "node2": 2}
            (tmp_path / "go").touch()
            out, err = script.communicate(timeout=60)
        finally:
            script.kill()
            script.communicate()
        assert out.split() == ["node2"], err[-3000:]
        assert until(lambda: marked() == {"node1": 0, "node2": 0}, 20)

        label = {"nodeLabelInfo": [{"name": "fast", "exclusivity": "true"}]}
        rest(web, "add-node-labels", label)
        (node,) = (n["id"] for n in rest(web, "nodes")["nodes"]["node"] if "node1" in n["id"])
        rest(web, f"nodes/{node}/replace-labels?labels=fast", {})
        # Spark's application master would end by a request for a host and a label.
        for options in ((), ("placement=pack",)):
            assert hosts_of(env, str(tmp_path), "fast", *options) == "node1"
    finally:
        cluster.down(directory)


def test_a_node_without_a_usable_gpu_is_unhealthy_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("health")
    often = {"yarn-site": {"yarn.nodemanager.health-checker.interval-ms": "1000"}}
    cluster.up(directory, conf=often)
    try:
        daemons = cluster.status(directory).daemons
        (web,) = (daemon.web for daemon in daemons if daemon.name == "resourcemanager")
        manager = ResourceManager((web,))
        smi = directory / "nodes" / "node1" / "bin" / "nvidia-smi"
        before = smi.read_text()

        def state() -> str:
            return next(node.state for node in manager.nodes() if node.host == "node1")

        assert state() == "RUNNING"
        broken = before.replace(
            "<product_name>",
            "<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>"
            "<product_name>",
        )
        smi.write_text(broken)
        assert until(lambda: state() == "UNHEALTHY", 60)
        assert [n.state for n in manager.nodes() if n.host != "node1"] == ["RUNNING"]
        smi.write_text(before)
        assert until(lambda: state() == "RUNNING", 60)
    finally:
        cluster.down(directory)
