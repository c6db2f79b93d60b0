"""Gangs on Kubernetes: pods, quotas, placement, losses, secrets, and a driver in a pod."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.devcluster.kubernetes import SPARK_IMAGE
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.kubernetes.kubectl import Kubectl, evict

QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "gpus", "namespace": "default"},
    "spec": {"hard": {"requests.nvidia.com/gpu": "2"}},
}


def where() -> tuple[str, str]:
    return os.environ["NM_HOST"], os.environ["CONTAINER_ID"]


def executors(kubectl: Kubectl, spark: SparkSession) -> list[dict[str, Any]]:
    """Return the pods of an application's executors with GPUs."""
    selector = f"spark-app-selector={spark.sparkContext.applicationId},spark-role=executor"
    pods = kubectl("get", "pods", "--selector", selector, is_json=True)["items"]
    return [p for p in pods if p["metadata"]["labels"]["spark-exec-resourceprofile-id"] != "0"]


@contextlib.contextmanager
def running(workers: int, **options: Any) -> Iterator[hopsgpu.Run]:
    """Run a gang that sleeps until the end of the context."""
    run = hopsgpu.submit(time.sleep, args=(600,), workers=workers, progress="off", **options)
    try:
        assert until(lambda: run.status().state == "running"), run.status()
        yield run
    finally:
        run.cancel()
        with contextlib.suppress(hopsgpu.HopsGpuError):
            run.result()


def run_script(script: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_spread_and_pack_are_rules_of_the_scheduler(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    spread = hopsgpu.launch(where, workers=2, placement="spread", progress="off")
    assert {host for host, _ in spread.values} == {"node1", "node2"}
    packed = hopsgpu.launch(where, workers=2, placement="pack", progress="off")
    assert len({host for host, _ in packed.values}) == 1


def test_nodes_of_a_type_of_gpu_are_chosen_by_their_labels(
    spark: SparkSession, kubectl: Kubectl, gpus_back: Callable[[], int]
) -> None:
    kubectl("label", "node", "node2", "--overwrite", "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3")
    try:
        result = hopsgpu.launch(where, workers=2, gpu_type="A100", progress="off")
        assert {host for host, _ in result.values} == {"node1"}
        with pytest.raises(hopsgpu.ConfigError, match="L40S"):
            hopsgpu.launch(where, workers=1, gpu_type="L40S", progress="off")
    finally:
        kubectl("label", "node", "node2", "--overwrite", "nvidia.com/gpu.product=Simulated-A100")


def test_a_quota_is_named_and_what_it_never_allows_is_refused(
    spark: SparkSession,
    manager: ClusterManager,
    applied: Callable[[dict[str, Any]], None],
    gpus_back: Callable[[], int],
) -> None:
    applied(QUOTA)
    assert until(lambda: "gpus" in str(manager.snapshot("", "").queues))
    with pytest.raises(hopsgpu.CapacityError, match="ResourceQuota default/gpus"):
        hopsgpu.launch(where, workers=3, progress="off")
    with running(2):
        waiting = hopsgpu.submit(where, workers=1, progress="off")
        try:
            assert until(lambda: "ResourceQuota default/gpus" in str(waiting.status().waiting_for))
        finally:
            waiting.cancel()
    with contextlib.suppress(hopsgpu.HopsGpuError):
        waiting.result()
    assert gpus_become(manager, 0)


def test_nodes_that_take_no_pods_are_not_counted(
    spark: SparkSession, manager: ClusterManager, kubectl: Kubectl, gpus_back: Callable[[], int]
) -> None:
    kubectl("cordon", "node2")
    try:
        assert until(lambda: manager.gpus()[1] == 2)
        (node,) = [node for node in manager.nodes() if node.host == "node2"]
        assert node.state == "CORDONED" and "uncordon" in node.health
        with pytest.raises(hopsgpu.CapacityError):
            hopsgpu.launch(where, workers=3, progress="off")
    finally:
        kubectl("uncordon", "node2")
    assert until(lambda: manager.gpus()[1] == 4)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (("delete", "pod", "--wait=false", "--grace-period=1"), "deleted|exit"),
        (("evict",), "its pod was evicted"),
    ],
)
def test_a_pod_that_is_taken_away_is_a_loss_with_its_reason(
    spark: SparkSession,
    manager: ClusterManager,
    kubectl: Kubectl,
    gpus_back: Callable[[], int],
    action: tuple[str, ...],
    words: str,
) -> None:
    with running(2) as run:
        pod = executors(kubectl, spark)[0]["metadata"]["name"]
        if action[0] == "evict":
            evict(kubectl, pod)
        else:
            kubectl(*action[:2], pod, *action[2:])
        with pytest.raises(hopsgpu.RankFailed) as lost:
            run.result()
    assert re.search(words, str(lost.value)), str(lost.value)
    assert gpus_become(manager, 0)


def test_an_image_that_does_not_exist_is_told_before_gpus_are_requested(
    cluster_env: dict[str, str], manager: ClusterManager, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import hopsgpu\n"
        "if __name__ == '__main__':\n"
        "    image = 'spark.kubernetes.container.image'\n"
        "    conf = {image: 'hopsgpu.local/absent:1', f'{image}.pullPolicy': 'Never'}\n"
        "    hopsgpu.session('absent', conf=conf)\n"
        "    hopsgpu.launch(print, workers=1)\n"
    )
    ran = run_script(script, cluster_env)
    assert ran.returncode != 0
    assert "ErrImageNeverPull" in ran.stderr and "spark.kubernetes.container.image" in ran.stderr
    assert "Traceback" not in ran.stderr or "ConfigError" in ran.stderr
    assert manager.gpus()[0] == 0


def test_pods_that_the_api_server_refuses_are_told_at_once(
    cluster_env: dict[str, str], manager: ClusterManager, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import hopsgpu\n"
        "if __name__ == '__main__':\n"
        "    account = 'spark.kubernetes.authenticate.executor.serviceAccountName'\n"
        "    hopsgpu.session('refused', conf={account: 'absent'})\n"
        "    hopsgpu.launch(print, workers=1)\n"
    )
    began = time.monotonic()
    ran = run_script(script, cluster_env)
    print(f"refused after {time.monotonic() - began:.1f} s")
    assert ran.returncode != 0
    assert "Kubernetes refuses pods of executors" in ran.stderr, ran.stderr[-4000:]
    assert 'serviceaccount "absent" not found' in ran.stderr
    assert manager.gpus()[0] == 0


def test_the_secret_of_the_control_channel_is_not_in_a_pod(
    spark: SparkSession, kubectl: Kubectl, gpus_back: Callable[[], int]
) -> None:
    def secret_of_agent() -> str:
        from hopsgpu.agent import agent

        return agent.__name__

    assert hopsgpu.launch(secret_of_agent, progress="off").value == "hopsgpu.agent.agent"
    with running(1):
        (pod,) = executors(kubectl, spark)
        text = json.dumps(pod)
        # The secret has 32 bytes; no variable or annotation has as many random characters.
        environ = pod["spec"]["containers"][0]["env"]
        values = [str(entry.get("value", "")) for entry in environ]
        assert not [v for v in values if re.fullmatch(r"[0-9a-f]{64}|[A-Za-z0-9_-]{43}=?", v)]
        assert "hopsgpu_secret" not in text.lower()


def test_memory_that_processes_share_is_the_containers(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    def size() -> int:
        status = os.statvfs("/dev/shm")
        return status.f_blocks * status.f_frsize

    assert hopsgpu.launch(size, progress="off").value > 2**30


def test_a_driver_in_a_pod_trains_and_its_pod_owns_the_executors(
    cluster_dir: Path,
    cluster_env: dict[str, str],
    manager: ClusterManager,
    kubectl: Kubectl,
    tmp_path: Path,
) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(
        "import hopsgpu, os\n"
        "def where():\n"
        "    import os\n"
        "    return os.environ['NM_HOST']\n"
        "if __name__ == '__main__':\n"
        "    hopsgpu.session('in-a-pod')\n"
        "    result = hopsgpu.launch(where, workers=2, placement='spread')\n"
        "    print('values', *sorted(result.values))\n"
    )
    template = yaml.safe_load((cluster_dir / "kubernetes" / "driver.yaml").read_text())
    (container,) = template["spec"]["containers"]
    names = ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "PYSPARK_PYTHON")
    environ = {**{name: cluster_env[name] for name in names}, "HOME": "/root"}
    container.update(name="driver", image=SPARK_IMAGE, command=[sys.executable, str(script)])
    container["env"] += [{"name": name, "value": value} for name, value in environ.items()]
    template["metadata"] = {"name": "notebook", "namespace": "default"}
    template["spec"].update(serviceAccountName="data", restartPolicy="Never")
    kubectl("apply", "--filename", "-", stdin=template)
    try:

        def phase() -> str:
            pod = kubectl("get", "pod", "notebook", is_json=True)
            return str(pod["status"]["phase"])

        assert until(lambda: phase() in ("Succeeded", "Failed"))
        log = kubectl("logs", "notebook")
        assert phase() == "Succeeded", log
        assert "values node1 node2" in log
        leases = kubectl("get", "leases", "--selector", "hopsgpu/application", is_json=True)[
            "items"
        ]
        drivers = [lease["metadata"]["annotations"].get("hopsgpu/driver-pod") for lease in leases]
        assert "notebook" in drivers
    finally:
        kubectl("delete", "pod", "notebook", "--grace-period=1", "--ignore-not-found")
    assert gpus_become(manager, 0)


def test_the_gpus_of_a_driver_that_is_killed_come_back(
    cluster_env: dict[str, str], manager: ClusterManager, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import hopsgpu, time\n"
        "if __name__ == '__main__':\n"
        "    hopsgpu.session('killed')\n"
        "    hopsgpu.launch(time.sleep, args=(600,), workers=2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=cluster_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert until(lambda: manager.gpus()[0] == 2)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert gpus_become(manager, 0)


def test_an_application_reports_that_it_lives(spark: SparkSession, kubectl: Kubectl) -> None:
    application = application_of(spark)
    (lease,) = [
        lease
        for lease in kubectl("get", "leases", is_json=True)["items"]
        if lease["metadata"]["labels"].get("hopsgpu/application") == application.id
    ]
    assert lease["metadata"]["annotations"]["hopsgpu/name"] == spark.sparkContext.appName
    before = lease["spec"]["renewTime"]

    def is_renewed() -> bool:
        name = lease["metadata"]["name"]
        present = kubectl("get", "lease", name, is_json=True)
        return bool(present["spec"]["renewTime"] > before)

    assert until(is_renewed)


def test_without_a_shared_file_system_gangs_wait_in_leases(
    cluster_env: dict[str, str], manager: ClusterManager, kubectl: Kubectl, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import hopsgpu\n"
        "if __name__ == '__main__':\n"
        "    hopsgpu.session('no-lake')\n"
        "    print(hopsgpu.launch(abs, args=(-2,), workers=2).values)\n"
    )
    environ = {**cluster_env, "HOPSGPU_ROOT": (tmp_path / "lake").as_uri()}
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        environ.pop(name)
    ran = run_script(script, environ)
    assert ran.returncode == 0 and "(2, 2)" in ran.stdout, ran.stderr
    leases = kubectl("get", "leases", "--selector", "hopsgpu/queue", is_json=True)["items"]
    assert any(lease["metadata"]["name"].startswith("hopsgpu-queue-turn-") for lease in leases)
    assert gpus_become(manager, 0)
