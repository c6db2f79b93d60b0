"""Drivers in pods that `hopsgpu submit` and `hopsgpu run` create, as a person submits them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.lake_root import default_root
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.kubernetes.conftest import Kubectl

JOB = """
    import argparse, sys, time
    import helper
    import hopsgpu

    class Options:
        def __init__(self, word):
            self.word = word

    def train(options, seconds):
        import helper
        time.sleep(seconds)
        return hopsgpu.__file__, helper.words(), options.word

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--code", type=int, default=0)
        parser.add_argument("--seconds", type=float, default=0)
        parser.add_argument("--word", default="")
        arguments = parser.parse_args()
        hopsgpu.session("job")
        result = hopsgpu.launch(train, args=(Options(arguments.word), arguments.seconds), workers=2)
        # The image may have another hopsgpu: driver and ranks have the one that was shipped.
        assert "hopsgpu-shipped.zip/" in hopsgpu.__file__, hopsgpu.__file__
        assert all("hopsgpu-package.zip/" in value[0] for value in result.values), result.values
        print("found", ascii([value[1:] for value in result.values]))
        sys.exit(arguments.code)
"""
WORD = 'it\'s "q" $(id) `id` {{PWD}} é\n'
SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("total", float(total), sys.argv[1:])
"""
Env = dict[str, str]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script with a package beside it, which reads a file beside itself."""
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "words.txt").write_text("packed")
    (tmp_path / "helper" / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def words():\n    return (Path(__file__).parent / 'words.txt').read_text()\n"
    )
    return tmp_path


@pytest.fixture
def env(cluster_env: Env) -> Env:
    """Without PYTHONPATH, which would hide what is shipped."""
    return {k: v for k, v in cluster_env.items() if k != "PYTHONPATH"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hopsgpu.cli.main", *arguments]


def ran(env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def uploads(env: Env) -> list[str]:
    directory = LakePath(default_root(env)) / "uploads"
    return [name for cluster in directory.names() for name in (directory / cluster).names()]


def drivers(kubectl: Kubectl) -> list[dict[str, Any]]:
    pods: list[dict[str, Any]]
    pods = kubectl("get", "pods", "--selector", "spark-role=driver", is_json=True)["items"]
    return pods


def test_the_exit_code_is_the_scripts_and_its_output_is_shown(
    env: Env, project: Path, kubectl: Kubectl, gpus_back: Callable[[], int]
) -> None:
    given = ("--code", "3", "--word", WORD)
    submitted = ran(
        env,
        "submit",
        "--deploy-mode",
        "cluster",
        "--name",
        "exits",
        str(project / "job.py"),
        *given,
    )
    assert submitted.returncode == 3, submitted.stderr
    assert f"found {ascii([('packed', WORD)] * 2)}" in submitted.stderr
    assert "'exits' is in namespace default, pod exits-" in submitted.stderr
    assert "Running, GPUs held: 2" in submitted.stderr
    assert "has ended: Failed: the driver exited with code 3." in submitted.stderr
    match = re.search(r"kubectl (logs --namespace default \S+)", submitted.stderr)
    assert match is not None and "found" in kubectl(*match[1].split())
    assert uploads(env) == []


def test_a_detached_application_runs_on_until_its_pod_is_deleted(
    env: Env, project: Path, kubectl: Kubectl, manager: ClusterManager
) -> None:
    submitted = ran(env, "submit", "--detach", str(project / "job.py"), "--seconds", "600")
    assert submitted.returncode == 0, submitted.stderr
    application = submitted.stdout.strip()
    assert re.fullmatch(r"spark-[0-9a-f]{32}", application)
    assert f"hopsgpu logs -f {application}\n" in submitted.stderr
    match = re.search(rf"kubectl (delete pod .*{application})\n", submitted.stderr)
    assert match is not None
    assert gpus_become(manager, 2, seconds=HANG_SECONDS)
    assert len(uploads(env)) == 1
    kubectl(*match[1].split(), "--wait=false")
    assert gpus_become(manager, 0, seconds=HANG_SECONDS)
    # The files may be needed for an hour by a submission whose pod does not exist yet.
    (name,) = uploads(env)
    directory = LakePath(default_root(env)) / "uploads"
    (cluster,) = directory.names()
    _, _, tag = name.partition("-")
    assert (directory / cluster / name).rename(directory / cluster / f"1000000-{tag}")
    next_one = ran(env, "submit", "--deploy-mode", "cluster", str(project / "job.py"))
    assert next_one.returncode == 0, next_one.stderr
    assert uploads(env) == []


def test_a_signal_ends_the_application(
    env: Env, project: Path, kubectl: Kubectl, manager: ClusterManager
) -> None:
    arguments = ("submit", "--deploy-mode", "cluster", str(project / "job.py"), "--seconds", "600")
    process = subprocess.Popen(
        command(*arguments), env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert gpus_become(manager, 2, seconds=HANG_SECONDS)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "ending spark-" in errors
    assert gpus_become(manager, 0)
    assert not [pod for pod in drivers(kubectl) if pod["status"]["phase"] == "Running"]
    assert uploads(env) == []
    # The driver had no time to record its end.
    assert until(lambda: "was deleted" in ran(env, "runs", "show", "last").stdout, step=1)


def test_an_image_that_does_not_exist_is_an_error_at_once(
    env: Env, project: Path, kubectl: Kubectl
) -> None:
    before = {pod["metadata"]["name"] for pod in drivers(kubectl)}
    pull = "spark.kubernetes.container.image.pullPolicy=Never"
    image = ("--image", "hopsgpu.local/absent:1", "--conf", pull)
    submitted = ran(env, "submit", "--deploy-mode", "cluster", *image, str(project / "job.py"))
    assert submitted.returncode == 1
    assert "Kubernetes does not start the driver" in submitted.stderr, submitted.stderr
    assert "ErrImageNeverPull" in submitted.stderr
    assert until(lambda: {pod["metadata"]["name"] for pod in drivers(kubectl)} <= before)
    assert uploads(env) == []


def test_a_driver_that_no_node_can_take_waits_with_the_schedulers_reason(
    env: Env, project: Path, tmp_path: Path
) -> None:
    cores = ("--conf", "spark.kubernetes.driver.request.cores=1000")
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            command("submit", "--deploy-mode", "cluster", *cores, str(project / "job.py")),
            env=env,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
    try:
        assert until(lambda: "Insufficient cpu" in errors.read_text(), seconds=HANG_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_SECONDS) == 128 + signal.SIGINT
    finally:
        process.kill()
    assert "Pending: Kubernetes cannot schedule 1 pod" in errors.read_text()


def test_a_script_of_torchrun_runs_with_its_driver_in_a_pod(
    env: Env, tmp_path: Path, gpus_back: Callable[[], int]
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    given = ("--nproc-per-node", "2", "--working-dir", str(tmp_path))
    submitted = ran(
        {**env, "PYTHONUNBUFFERED": "1"},
        *("run", "--deploy-mode", "cluster", *given, str(tmp_path / "train.py"), "--epochs", "2"),
    )
    assert submitted.returncode == 0, submitted.stderr
    runs = RunStore(default_root(os.environ | env))
    newest = runs.read(runs.ids()[:1])[0].record
    assert newest is not None and newest.state == "succeeded"
    assert "total 2.0 ['--epochs', '2']" in submitted.stderr
