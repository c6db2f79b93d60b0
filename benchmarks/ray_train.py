"""Ray Train on Kubernetes: warm and cold runs, and GPUs after the end, as `warm` and `release` are.

A head in a pod corresponds to Spark's driver, and a worker's pod with a GPU to an executor. Without
Ray's operator, the pods are created and deleted here. `python -m benchmarks.ray_train DIRECTORY` is
what the head's pod runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.table import heading, row
from hopsgpu.cluster_managers.kubernetes.credentials import load_access
from hopsgpu.cluster_managers.kubernetes.kind import IMAGE
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.pod_template import TEMPLATE
from hopsgpu.storage.spark_defaults import spark_defaults

WORKERS, COLD, WARM = 2, 5, 10
_PORT = 6379
_STORE_BYTES = str(100 * 2**20)
_WAIT_SECONDS = 180.0
_POLL_SECONDS = 0.05
_HEAD = "ray-head"


def measure() -> Mapping[str, Sequence[float]]:
    """Return seconds of warm and cold runs, and until the GPUs of deleted workers are free."""
    from kubernetes.client import ApiClient, CoreV1Api

    properties = spark_defaults(os.environ)
    access = load_access(properties, os.environ)
    api = CoreV1Api(ApiClient(access.configuration))
    manager = KubernetesManager(access, gpu_resource="nvidia.com/gpu")
    exchange = Path(os.environ["SPARK_CONF_DIR"]).parent / "ray"
    exchange.mkdir(exist_ok=True)
    cold: list[float] = []
    released: list[float] = []
    with _pod(api, manager.namespace, _HEAD, _command("head", str(exchange)), properties):
        address = _wait_for(exchange / "address").strip()
        for number in range(COLD):
            began = time.time()
            with contextlib.ExitStack() as stack:
                for worker in range(WORKERS):
                    name, command = f"ray-worker-{number}-{worker}", _command("worker", address)
                    stack.enter_context(
                        _pod(api, manager.namespace, name, command, properties, gpus=1)
                    )
                answer = json.loads(_wait_for(exchange / f"cold-{number}"))
                cold.append(answer["first_line"] - began)
                if number == COLD - 1:
                    warm = json.loads(_wait_for(exchange / "warm"))
                returned = time.monotonic()
            while manager.gpus()[0]:
                time.sleep(_POLL_SECONDS)
            released.append(time.monotonic() - returned)
    heading(f"Ray Train, {WORKERS} workers in pods, seconds")
    row("a gloo all-reduce, warm", warm)
    row("pods requested to first line", cold)
    row("pods deleted to GPUs free", released)
    return {"warm": warm, "cold": cold, "released": released}


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.ray_train", *arguments]


@contextlib.contextmanager
def _pod(
    api: Any,
    namespace: str,
    name: str,
    command: Sequence[str],
    properties: Mapping[str, str],
    gpus: int = 0,
) -> Iterator[None]:
    """Run a pod while inside; at the end it has a second to end, as hopsgpu's executors have."""
    template = yaml.safe_load(Path(properties[TEMPLATE]).read_text())
    (container,) = template["spec"]["containers"]
    resources = {"requests": {"cpu": "100m", "memory": "1Gi"}}
    if gpus:
        resources["limits"] = {"nvidia.com/gpu": str(gpus)}
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container |= {
        "name": "ray",
        "image": properties[IMAGE],
        "command": list(command),
        "workingDir": str(Path.cwd()),
        "resources": resources,
        "env": [*container["env"], address, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
    }
    template["metadata"] = {"name": name}
    template["spec"]["restartPolicy"] = "Never"
    api.create_namespaced_pod(namespace, template)
    try:
        yield
    finally:
        api.delete_namespaced_pod(name, namespace, grace_period_seconds=1)


def _wait_for(file: Path) -> str:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray did not write {file.name} within {_WAIT_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    return file.read_text()


def _write(file: Path, text: str) -> None:
    """Write a file that exists only when it is complete."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)


def run_node(*arguments: str) -> None:
    """Start a node of Ray in this pod."""
    ray = str(Path(sys.executable).with_name("ray"))
    own = [f"--node-ip-address={os.environ['POD_IP']}", f"--object-store-memory={_STORE_BYTES}"]
    subprocess.run([ray, "start", *own, *arguments], check=True)


def run_head(exchange: Path) -> None:
    """Run trainings on the workers as they come; write what they took."""
    import ray

    # Pods share /tmp here, where the nodes would take each other's files for their own.
    own_files = "--temp-dir=/var/ray"
    run_node("--head", f"--port={_PORT}", "--num-cpus=0", "--include-dashboard=false", own_files)
    ray.init(address=f"{os.environ['POD_IP']}:{_PORT}", log_to_driver=False)
    _write(exchange / "address", f"{os.environ['POD_IP']}:{_PORT}")
    seen: set[str] = set()
    for number in range(COLD):
        seen |= _wait_for_workers(seen)
        _write(exchange / f"cold-{number}", json.dumps({"first_line": _fit(exchange)}))
        if number == COLD - 1:
            seconds = []
            for _ in range(WARM):
                began = time.monotonic()
                _fit(exchange)
                seconds.append(time.monotonic() - began)
            _write(exchange / "warm", json.dumps(seconds))


def _wait_for_workers(seen: set[str]) -> set[str]:
    """Return the IDs of new nodes, once all workers of a round have joined."""
    import ray

    while True:
        alive = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
        new = {node["NodeID"] for node in alive} - seen
        if len(new) == WORKERS:
            return new
        # Ray offers no subscription to its nodes.
        time.sleep(_POLL_SECONDS)


def _fit(exchange: Path) -> float:
    """Train once; return the time of the last first line, in seconds since the epoch."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        _train,
        train_loop_config={"exchange": str(exchange)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(exchange)),
    )
    trainer.fit()
    files = [exchange / f"first-{rank}" for rank in range(WORKERS)]
    return max(float(file.read_text()) for file in files)


def _train(config: Mapping[str, str]) -> None:
    began = time.time()
    import torch
    import torch.distributed as dist

    _write(Path(config["exchange"]) / f"first-{dist.get_rank()}", str(began))
    total = torch.ones(1)
    dist.all_reduce(total)


if __name__ == "__main__":
    role, argument = sys.argv[1:]
    # A pod's name is not in any DNS here; Ray needs only the address.
    print(socket.gethostname(), role, flush=True)
    if role == "head":
        run_head(Path(argument))
    else:
        run_node(f"--address={argument}", "--num-cpus=1", "--block")
