"""Four executors get four GPUs again and again; types of GPUs."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests

from hopsgpu import devcluster
from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.contention import start_script

# Of each gang: its first round has four new executors, one that follows a killed executor has one.
KILLS = ("executor", "keeper executor", "rank", "executor")
GANGS = 2

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

    def gpus(kills, notes):
        context = hopsgpu.context()
        (gpu,) = context.gpus
        leased = keepers(gpu)
        assert leased, "nobody has the lease of " + gpu
        if context.rank == 2 and "keeper" in kills:
            os.kill(leased[0], signal.SIGKILL)
        (notes / str(context.rank)).write_text(f"{{gpu}} {{os.environ['CONTAINER_ID']}}")
        if context.rank == 1:
            while sum(bool(note.read_text()) for note in notes.iterdir()) < 4:
                time.sleep(0.05)  # nobody tells
            os.kill(executor() if "executor" in kills else os.getpid(), signal.SIGKILL)
        signal.pause()

    hopsgpu.session("gpus")
    for gang in range({GANGS}):
        before = set()
        with hopsgpu.hold(workers=4, progress="off") as held:
            for number, kills in enumerate({KILLS}):
                notes = Path(sys.argv[1], f"{{gang}}-{{number}}")
                notes.mkdir()
                try:
                    held.launch(gpus, (kills, notes), progress="off")
                except hopsgpu.RankFailed as error:
                    assert error.rank == 1, error
                given = [note.read_text().split() for note in notes.iterdir()]
                containers = {{container for _, container in given}}
                new, before = len(containers - before), containers
                different = len({{gpu for gpu, _ in given}})
                print("round", gang, number, new, len(given), different, flush=True)
"""


def test_four_executors_get_four_gpus_again_and_again_across_kills(
    cluster_env: dict[str, str],
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    script = start_script(cluster_env, LAUNCHES, tmp_path)
    try:
        out, err = script.communicate(timeout=HANG_SECONDS)
    finally:
        script.kill()
        script.communicate()
    assert script.returncode == 0, err[-3000:]
    rounds = [[*map(int, line.split()[1:])] for line in out.splitlines() if line[:5] == "round"]
    new = (4, 1, 1, 0)
    assert rounds == [
        [gang, number, new[number], 4, 4] for gang in range(GANGS) for number in range(len(KILLS))
    ]


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

    directory, label, *placements = sys.argv[1:]
    conf = {"spark.hopsgpu.markers": "A100=example.com/gpu-a100"} if label == "-" else {
        "spark.yarn.executor.nodeLabelExpression": label}
    hopsgpu.session("types", conf=conf)
    for given in placements:
        placement = None if given == "any" else given
        result = hopsgpu.launch(where, args=(directory,), workers=2, progress="off",
            gpu_type="A100", acquire_timeout="120s", placement=placement)
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


def rest(web: str, path: str, body: object = None) -> Any:
    """The ResourceManager's answer; an administrator's POST where there is a body."""
    url, who = f"{web}/ws/v1/cluster/{path}", {"user.name": getpass.getuser()}
    if body is None:
        answer = requests.get(url, timeout=HANG_SECONDS)
    else:
        answer = requests.post(url, json=body, params=who, timeout=HANG_SECONDS)
    answer.raise_for_status()
    return answer.json() if body is None else None


def test_marker_resources_and_node_labels(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory = tmp_path_factory.mktemp("types")
    try:
        devcluster.up(directory, conf=MARKED)
        env = {**os.environ, **devcluster.environment(directory)}
        (web,) = (
            d.web for d in devcluster.status(directory).daemons if d.name == "resourcemanager"
        )

        def marked() -> dict[str, int]:
            """Marker resources in use on each node."""
            return {
                node["nodeHostName"]: told["value"]
                for node in rest(web, "nodes")["nodes"]["node"]
                for told in node["usedResource"]["resourceInformations"]["resourceInformation"]
                if told["name"] == MARKER
            }

        assert marked() == {"node1": 0, "node2": 0}
        script = start_script(env, TYPES, str(tmp_path), "-", "any")
        try:
            assert until(lambda: len(list(tmp_path.iterdir())) == 2)
            assert marked() == {"node1": 0, "node2": 2}
            (tmp_path / "go").touch()
            out, err = script.communicate(timeout=HANG_SECONDS)
        finally:
            script.kill()
            script.communicate()
        assert out.split() == ["node2"], err[-3000:]
        assert until(lambda: marked() == {"node1": 0, "node2": 0})

        label = {"nodeLabelInfo": [{"name": "fast", "exclusivity": "true"}]}
        rest(web, "add-node-labels", label)
        (node,) = (n["id"] for n in rest(web, "nodes")["nodes"]["node"] if "node1" in n["id"])
        rest(web, f"nodes/{node}/replace-labels?labels=fast", {})
        # Spark's application master would end by a request for a host and a label.
        script = start_script(env, TYPES, str(tmp_path), "fast", "any", "pack")
        try:
            out, err = script.communicate(timeout=HANG_SECONDS)
        finally:
            script.kill()
            script.communicate()
        assert out.split() == ["node1", "node1"], err[-3000:]
    finally:
        devcluster.down(directory)
