"""Applications of their own on a YARN with Docker: commands, and images that cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hopsgpu
from hopsgpu.errors import ConfigError
from tests.bounds import HANG_SECONDS
from tests.docker.conftest import BARE, CONF, MOUNTS, TRAIN
from tests.docker.images import PYTHON

Docker = Callable[..., str]
JOB = """
import sys, hopsgpu
spark = hopsgpu.session("job")
ranks = hopsgpu.launch(lambda: sys.executable, workers=1, cores_per_worker=1).values
print("driver", sys.executable, "ranks", *ranks)
spark.stop()
"""
GANG: dict[str, Any] = {"workers": 1, "cores_per_worker": 1, "memory_per_worker": "1g"}
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in", sys.executable)
sys.exit(7 if os.environ["RANK"] == "0" else 0)
"""


def hopsgpu_command(
    env: dict[str, str], cwd: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    conf = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
    command = [sys.executable, "-m", "hopsgpu.cli.main", words[0], "--image", TRAIN]
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [*command, *conf, *words[1:]],
        env={**env, "PYTHONPATH": root},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def test_submit_runs_the_driver_in_the_image_too_in_cluster_mode(
    cluster_env: dict[str, str],
    gpus_back: Callable[[], int],
    docker: Docker,
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    ran = hopsgpu_command(cluster_env, tmp_path, "submit", "--deploy-mode", "cluster", "job.py")
    assert ran.returncode == 0, ran.stderr[-4000:]
    python = f"/usr/local/bin/{PYTHON}"
    assert f"driver {python} ranks {python}" in ran.stderr


def test_run_runs_a_script_in_the_image(
    cluster_env: dict[str, str],
    gpus_back: Callable[[], int],
    docker: Docker,
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = hopsgpu_command(
        cluster_env, tmp_path, "run", "--workers", "2", "--cores-per-worker", "1", "train.py"
    )
    assert ran.returncode == 7, ran.stderr[-4000:]
    assert f"rank 0 of 2 in /usr/local/bin/{PYTHON}" in ran.stdout


def test_the_doctor_checks_the_nodes_and_the_containers(
    cluster_env: dict[str, str], gpus_back: Callable[[], int], docker: Docker, tmp_path: Path
) -> None:
    ran = hopsgpu_command(cluster_env, tmp_path, "doctor", "--json", "--seconds", "300")
    checks = {check["name"]: check for check in map(json.loads, ran.stdout.splitlines())}
    assert checks["image"]["seen"] == f"{TRAIN} by docker: allowed on 2 nodes"
    assert checks["python"]["seen"].endswith(f"{PYTHON} in {TRAIN}")
    for name in (
        "node managers",
        "session",
        "gang",
        "shared memory",
        "limits",
        "user",
        "tokens",
        "hadoop conf",
    ):
        assert checks[name]["state"] == "ok", checks[name]
    assert "root (uid 0) on node1, node2" in checks["user"]["seen"]
    # The container sees one of the node's two GPUs.
    assert checks["isolation"]["seen"] == "on: node1, node2"
    assert ran.returncode == 0, [c for c in checks.values() if c["state"] == "wrong"]


REFUSED = (
    ("evil/train:1", {}, r"registry of the image evil/train:1 is not trusted"),
    ("local/absent:1", {}, r"image local/absent:1 is not on the node, and cannot be pulled"),
    (BARE, {}, r"no python3 on its PATH"),
    (
        TRAIN,
        {MOUNTS: "/home:/home:ro"},
        r"the mount of /home is refused: list it in docker.allowed.ro-mounts",
    ),
    (
        TRAIN,
        {"spark.executorEnv.YARN_CONTAINER_RUNTIME_DOCKER_CONTAINER_NETWORK": "bridge"},
        r"the network bridge of the container is not allowed",
    ),
)


@pytest.mark.parametrize(("image", "conf", "message"), REFUSED)
def test_the_first_containers_tell_what_is_wrong(
    cluster_env: dict[str, str],
    gpus_back: Callable[[], int],
    docker: Docker,
    image: str,
    conf: dict[str, str],
    message: str,
) -> None:
    session = hopsgpu.session("refused", conf={**CONF, **conf}, image=image)
    try:
        with pytest.raises(ConfigError, match=message):
            hopsgpu.launch(print, acquire_timeout="3m", **GANG)
    finally:
        session.stop()


def test_a_launch_on_the_machine_itself_refuses_an_image(
    cluster_env: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="only YARN and Kubernetes start executors in images"):
        hopsgpu.session("local", master="local[1]", image=TRAIN)
