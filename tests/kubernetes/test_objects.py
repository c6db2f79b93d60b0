"""The objects of kubernetes-objects/ in use: a nightly job, a notebook and the exporter, in pods.

Only what an administrator edits is replaced: the image, which shows this machine's files here, and
the addresses of API server and HDFS, because the development cluster has no DNS.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jupyter_client.blocking import BlockingKernelClient

from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.devcluster.kubernetes import SPARK_IMAGE
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.kubernetes.conftest import Kubectl

OBJECTS = Path(__file__).resolve().parents[2] / "kubernetes-objects"
NAMESPACE = "training"
IMAGE = "registry.company:5000/train:1"
MASTER, LAKE = "k8s://https://kubernetes.default.svc:443", "hdfs://namenode:8020"
VARIABLES = ("SPARK_HOME", "PYSPARK_PYTHON")
KERNEL_PORTS = {f"{channel}_port": 9000 + n for n, channel in enumerate(("shell", "iopub"))}
KERNEL_PORTS |= {"stdin_port": 9002, "control_port": 9003, "hb_port": 9004}
CELL = """
import hopsgpu

def where():
    import os
    return os.environ["NM_HOST"]

hopsgpu.session("notebook")
result = hopsgpu.launch(where, workers=2, placement="spread")
print(sorted(result.values))
"""
Apply = Callable[[str], None]


def objects_in(file: str) -> list[dict[str, Any]]:
    return [body for body in yaml.safe_load_all((OBJECTS / file).read_text()) if body]


def pod_specs(body: object) -> Iterator[dict[str, Any]]:
    """Yield the specifications of pods in an object, at whatever depth."""
    if isinstance(body, dict):
        if "containers" in body:
            yield body
        for value in body.values():
            yield from pod_specs(value)


class Site:
    """What an administrator of the development cluster would edit in the files."""

    def __init__(self, cluster_dir: Path, env: Mapping[str, str], hdfs_url: str) -> None:
        template = yaml.safe_load((cluster_dir / "kubernetes" / "driver.yaml").read_text())
        self._template: dict[str, Any] = template["spec"]
        self._env, self._hdfs_url = env, hdfs_url
        conf = Path(env["SPARK_CONF_DIR"], "spark-defaults.conf").read_text().splitlines(True)
        # The cluster's own service account is not in the namespace of the objects.
        self._conf = "".join(line for line in conf if "serviceAccountName" not in line)

    def edited(self, body: dict[str, Any]) -> dict[str, Any]:
        master = dict(line.split(" ", 1) for line in self._conf.splitlines())["spark.master"]
        text = json.dumps(body).replace(IMAGE, SPARK_IMAGE).replace(LAKE, self._hdfs_url)
        edited: dict[str, Any] = json.loads(text.replace(MASTER, master))
        if "spark-defaults.conf" in edited.get("data", {}):
            # The example's lines come last, and override the cluster's.
            lines = edited["data"]["spark-defaults.conf"]
            edited["data"]["spark-defaults.conf"] = self._conf + lines
        for spec in pod_specs(edited):
            spec.pop("securityContext", None)
            spec["volumes"] = [*spec.get("volumes", ()), *self._template["volumes"]]
            for container in spec["containers"]:
                self._show_machine(container)
        return edited

    def _show_machine(self, container: dict[str, Any]) -> None:
        """Give a container this machine's files, programs and size."""
        (shown,) = self._template["containers"]
        mounts = container.get("volumeMounts", [])
        own_paths = [mount["mountPath"] for mount in mounts]
        container["volumeMounts"] = [
            *mounts,
            *(m for m in shown["volumeMounts"] if not is_above(m["mountPath"], own_paths)),
        ]
        variables = [{"name": name, "value": self._env[name]} for name in VARIABLES]
        container["env"] = [*container.get("env", ()), *shown["env"], *variables]
        container["command"] = on_this_machine(container["command"])
        container["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}


@pytest.fixture
def apply(
    cluster_dir: Path, cluster_env: dict[str, str], hdfs_url: str, kubectl: Kubectl
) -> Iterator[Apply]:
    """Apply the objects of a file as an administrator does; delete all at the end."""
    site = Site(cluster_dir, cluster_env, hdfs_url)

    def apply_file(file: str) -> None:
        for body in objects_in(file):
            if body["kind"] == "ServiceMonitor":  # the operator's kind is not installed
                continue
            namespace = ("--namespace", NAMESPACE) if file == "role.yaml" else ()
            kubectl("apply", *namespace, "--filename", "-", stdin=site.edited(body))

    try:
        for file in ("namespace.yaml", "role.yaml", "role-binding.yaml", "quota.yaml"):
            apply_file(file)
        yield apply_file
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
        kubectl("delete", "clusterrolebinding", f"hopsgpu-{NAMESPACE}", "--ignore-not-found")


def is_above(path: str, others: list[str]) -> bool:
    return any(Path(other).is_relative_to(path) for other in others)


def on_this_machine(command: list[str]) -> list[str]:
    """Return a command with the programs of the Python that runs the tests."""
    if command[0] == "python3":
        return [sys.executable, *command[1:]]
    if command[0] == "jupyter":
        return [sys.executable, "-m", "ipykernel_launcher", "-f", "/home/notebook/kernel.json"]
    return [sys.executable, "-m", "hopsgpu.cli.main", *command[1:]]


def pod_of(kubectl: Kubectl, selector: str) -> dict[str, Any]:
    pods = kubectl("get", "pods", "-n", NAMESPACE, "--selector", selector, is_json=True)["items"]
    return dict(pods[0]) if pods else {"status": {}, "metadata": {"name": ""}}


@pytest.mark.parametrize("file", ["device-plugin.yaml", "cluster-role.yaml"])
def test_the_api_server_accepts_what_concerns_the_whole_cluster(
    cluster_env: dict[str, str], kubectl: Kubectl, file: str
) -> None:
    """The development cluster has these objects in another form, so nothing is created."""
    for body in objects_in(file):
        kubectl("apply", "--dry-run=server", "--filename", "-", stdin=body)


def test_a_nightly_job_trains_in_pods(
    apply: Apply, kubectl: Kubectl, manager: ClusterManager
) -> None:
    apply("cron-job.yaml")
    kubectl("create", "job", "now", "--from", "cronjob/nightly", "--namespace", NAMESPACE)
    selector = "job-name=now"

    def phase() -> str:
        return str(pod_of(kubectl, selector)["status"].get("phase"))

    assert until(lambda: phase() in ("Succeeded", "Failed")), phase()
    log = kubectl("logs", "job/now", "--namespace", NAMESPACE)
    assert phase() == "Succeeded", log
    assert "(4.0, 4.0, 4.0, 4.0)" in log
    # The executors' pods go with the driver's context, and the GPUs with them.
    assert gpus_become(manager, 0)


def test_metrics_are_served_from_a_pod(apply: Apply, kubectl: Kubectl) -> None:
    apply("service-monitor.yaml")
    selector = "app=hopsgpu-exporter"

    def is_ready() -> bool:
        conditions = pod_of(kubectl, selector)["status"].get("conditions", ())
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    assert until(is_ready), kubectl("describe", "pods", "-n", NAMESPACE, "-l", selector)
    address = pod_of(kubectl, selector)["status"]["podIP"]

    def metrics() -> str:
        with urllib.request.urlopen(f"http://{address}:9400/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    assert until(lambda: "hopsgpu_gpus" in metrics()), metrics()


def run_cell(client: BlockingKernelClient, code: str) -> str:
    """Return what a cell prints and raises."""
    shown: list[str] = []

    def show(message: Mapping[str, Any]) -> None:
        content = message["content"]
        shown.extend((content.get("text", ""), *content.get("traceback", ())))

    client.execute_interactive(code, timeout=HANG_SECONDS, output_hook=show)
    return "".join(shown)


def test_cells_of_a_notebook_in_a_pod_train(
    apply: Apply, kubectl: Kubectl, manager: ClusterManager, tmp_path: Path
) -> None:
    """The kernel is that of the notebook's pod; Jupyter's pages are not part of the test."""
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "notebook"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(tmp_path)},
            "claimRef": {"namespace": NAMESPACE, "name": "notebook"},
        },
    }
    kernel = {"ip": "0.0.0.0", "transport": "tcp", "key": os.urandom(16).hex()}
    kernel |= {"signature_scheme": "hmac-sha256", **KERNEL_PORTS}
    (tmp_path / "kernel.json").write_text(json.dumps(kernel))
    kubectl("apply", "--filename", "-", stdin=volume)
    try:
        apply("notebook.yaml")
        assert until(lambda: pod_of(kubectl, "app=notebook")["status"].get("phase") == "Running")
        address = pod_of(kubectl, "app=notebook")["status"]["podIP"]
        client = BlockingKernelClient()
        client.load_connection_info({**kernel, "ip": address})
        client.start_channels()
        try:
            client.wait_for_ready(timeout=HANG_SECONDS)
            assert "'node1', 'node2'" in run_cell(client, CELL)
            assert gpus_become(manager, 0)
        finally:
            client.stop_channels()
    finally:
        kubectl("delete", "pod", "notebook", "-n", NAMESPACE, "--ignore-not-found", "--now")
        kubectl("delete", "persistentvolume", "notebook", "--wait=false")
    assert gpus_become(manager, 0)
