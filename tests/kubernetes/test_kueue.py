"""Gangs on a real Kueue: admitted, waiting, evicted, preempted, and without a trace afterwards."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cluster_managers.kubernetes.amounts import amount_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.devcluster.admin import KUBERNETES
from tests.conftest import gpus_become, until
from tests.kubernetes.conftest import Kubectl
from tests.kubernetes.kueue_process import VERSION, crds, kueue_process
from tests.kubernetes.test_kubernetes import executors, running, where

# Half of the cluster's GPUs.
QUOTA = 2
PRODUCT = {"nvidia.com/gpu.product": "Simulated-A100"}
_SHOWN_SECONDS = 10.0


def example() -> list[dict[str, Any]]:
    """Return the objects of kubernetes-objects/, for the namespace and the GPUs of the tests."""
    text = (KUBERNETES / "kueue.yaml").read_text().replace("namespace: training", "")
    flavor, cluster_queue, local_queue = yaml.safe_load_all(text)
    flavor["spec"]["nodeLabels"] = PRODUCT
    (group,) = cluster_queue["spec"]["resourceGroups"]
    resources = {r["name"]: r for r in group["flavors"][0]["resources"]}
    resources["nvidia.com/gpu"]["nominalQuota"] = QUOTA
    return [flavor, cluster_queue, local_queue]


@pytest.fixture(scope="module")
def kueue(
    cluster_dir: Path,
    kubectl: Kubectl,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Install Kueue with the example's queue; remove both afterwards, as other tests need none."""
    objects = crds()
    try:
        for crd in objects:
            kubectl("create", "--filename", "-", stdin=crd)
        names = [crd["metadata"]["name"] for crd in objects]
        kubectl("wait", "--for=condition=Established", *(f"crd/{name}" for name in names))
        with kueue_process(cluster_dir, tmp_path_factory.mktemp("kueue")):
            for body in example():
                kubectl("apply", "--filename", "-", stdin=body)
            assert until(lambda: is_active(kubectl))
            yield
            for body in reversed(example()):
                kubectl("delete", "--wait=false", "--filename", "-", stdin=body)
            assert until(lambda: not kubectl("get", "clusterqueues,resourceflavors", "-o", "name"))
    finally:
        for crd in objects:
            kubectl("delete", "--ignore-not-found", "crd", crd["metadata"]["name"])


def is_active(kubectl: Kubectl) -> bool:
    queue = kubectl("get", "localqueue", "gangs", is_json=True)
    conditions = queue.get("status", {}).get("conditions", [])
    return any(c["type"] == "Active" and c["status"] == "True" for c in conditions)


@pytest.fixture(autouse=True)
def no_workload(kueue: None, kubectl: Kubectl, gpus_back: Callable[[], int]) -> Iterator[None]:
    assert workloads(kubectl) == []
    yield
    assert until(lambda: workloads(kubectl) == []), workloads(kubectl)


def workloads(kubectl: Kubectl) -> list[dict[str, Any]]:
    return list(kubectl("get", "workloads.kueue.x-k8s.io", is_json=True)["items"])


def names(kubectl: Kubectl) -> list[str]:
    return [workload["metadata"]["name"] for workload in workloads(kubectl)]


@contextlib.contextmanager
def waiting(workers: int, **options: Any) -> Iterator[hopsgpu.Run]:
    """Submit a gang, and cancel it at the end of the context, if it has not ended by then."""
    run = hopsgpu.submit(where, workers=workers, progress="off", **options)
    try:
        yield run
    finally:
        run.cancel()
        with contextlib.suppress(hopsgpu.HopsGpuError):
            run.result()


def says(run: hopsgpu.Run, *words: str, seconds: float = _SHOWN_SECONDS) -> bool:
    """Return whether a run shows Kueue's reason in time, once it waits."""
    assert until(lambda: run.status().state == "waiting"), run.status()

    def is_shown() -> bool:
        text = str(run.status())
        return all(word in text for word in ("Kueue: ", *words))

    return until(is_shown, seconds)


def important(priority: int = 100) -> dict[str, Any]:
    """Return a Workload of another program, which needs the whole quota."""
    requests = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}
    container = {"name": "main", "resources": {"requests": requests}}
    pods = {"name": "main", "count": QUOTA, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": f"kueue.x-k8s.io/{VERSION}",
        "kind": "Workload",
        "metadata": {"name": "important", "namespace": "default"},
        "spec": {"queueName": "gangs", "priority": priority, "podSets": [pods]},
    }


def test_a_gang_that_is_admitted_at_once_is_one_workload(
    spark: SparkSession, manager: ClusterManager, kubectl: Kubectl
) -> None:
    with running(2):
        (workload,) = workloads(kubectl)
        (pods,) = workload["spec"]["podSets"]
        assert (workload["spec"]["queueName"], pods["count"]) == ("gangs", 2)
        requests = pods["template"]["spec"]["containers"][0]["resources"]["requests"]
        gang = executors(kubectl, spark)
        assert len(gang) == 2
        for pod in gang:
            container = next(
                c for c in pod["spec"]["containers"] if c["name"] == "spark-kubernetes-executor"
            )
            # Kueue counts what the pods request.
            counted = amount_of(container["resources"]["requests"], "nvidia.com/gpu")
            assert counted == amount_of(requests, "nvidia.com/gpu")
            assert PRODUCT.items() <= pod["spec"]["nodeSelector"].items()
        labels = workload["metadata"]["labels"]
        assert labels["hopsgpu/application"] == spark.sparkContext.applicationId
    assert workloads(kubectl) == []
    assert gpus_become(manager, 0)
    assert len(hopsgpu.launch(where, workers=2, progress="off").values) == 2


def test_a_gang_waits_with_kueues_reason_and_then_trains(
    spark: SparkSession, kubectl: Kubectl
) -> None:
    with contextlib.ExitStack() as stack:
        with running(2):
            run = stack.enter_context(waiting(1))
            assert says(run, "insufficient unused quota", "gpu-nodes"), run.status()
            assert run.status().state == "waiting"
        assert len(run.result().values) == 1


def test_a_gang_that_is_larger_than_the_quota_is_told_so_and_leaves_nothing(
    spark: SparkSession, kubectl: Kubectl
) -> None:
    with waiting(QUOTA + 1) as run:
        assert says(run, "insufficient quota", "maximum capacity"), run.status()
        assert len(workloads(kubectl)) == 1
    assert workloads(kubectl) == []
    with pytest.raises(hopsgpu.GangTimeout, match="Kueue: insufficient quota"):
        hopsgpu.launch(where, workers=QUOTA + 1, acquire_timeout="5s", progress="off")
    assert workloads(kubectl) == []


def test_a_gang_that_kueue_evicts_ends_with_its_reason(
    spark: SparkSession, manager: ClusterManager, kubectl: Kubectl
) -> None:
    with running(2) as run:
        (name,) = names(kubectl)
        patch = '{"spec": {"active": false}}'
        kubectl("patch", "workload.kueue.x-k8s.io", name, "--type=merge", "--patch", patch)
        with pytest.raises(hopsgpu.RankFailed) as lost:
            run.result()
    assert "Kueue evicted the gang: The workload is deactivated" in str(lost.value)
    assert gpus_become(manager, 0)


def test_a_gang_that_kueue_preempts_ends_with_its_reason(
    spark: SparkSession,
    manager: ClusterManager,
    kubectl: Kubectl,
    applied: Callable[[dict[str, Any]], None],
) -> None:
    with running(2) as run:
        applied(important())
        with pytest.raises(hopsgpu.RankFailed) as lost:
            run.result()
        assert "Kueue preempted the gang: Preempted to accommodate" in str(lost.value)
        assert names(kubectl) == ["important"]
        kubectl("delete", "workload.kueue.x-k8s.io", "important")
    assert gpus_become(manager, 0)


def test_an_elastic_gang_continues_without_a_growth_that_kueue_preempts(
    spark: SparkSession,
    kubectl: Kubectl,
    applied: Callable[[dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOPSGPU_ELASTIC_INTERVAL", "1s")
    stop = tmp_path / "stop"

    def trains(stop: str) -> int:
        context, step = hopsgpu.context(), 0
        while not Path(stop).exists():
            time.sleep(0.1)
            step += 1
            if context.should_checkpoint(step) and context.rank == 0:
                Path("state").write_text(str(step))
                context.save_checkpoint(Path("state"), step)
        return context.world_size

    run = hopsgpu.submit(trains, args=(str(stop),), workers=(1, 2), progress="off")
    try:
        assert until(lambda: [world.ranks for world in run.status().worlds][-1:] == [2])
        sizes = {
            w["spec"]["priority"]: w["spec"]["podSets"][0]["count"] for w in workloads(kubectl)
        }
        assert sizes == {0: 1, -1: 1}
        body = important(priority=0)
        body["spec"]["podSets"][0]["count"] = 1
        applied(body)
        assert until(lambda: [world.ranks for world in run.status().worlds][-1:] == [1])
        kubectl("delete", "workload.kueue.x-k8s.io", "important")
        assert until(lambda: [world.ranks for world in run.status().worlds][-1:] == [2])
    finally:
        stop.touch()
    result = run.result()
    assert result.values == (2, 2)
    assert "Kueue preempted the gang" in str([world.why for world in result.worlds])


def test_a_workload_of_a_driver_that_was_killed_is_removed(
    spark: SparkSession, kubectl: Kubectl, applied: Callable[[dict[str, Any]], None]
) -> None:
    body = important()
    body["metadata"]["labels"] = {"hopsgpu/application": "spark-killed"}
    applied(body)
    assert len(hopsgpu.launch(where, workers=2, progress="off").values) == 2


def test_several_queues_need_a_choice(
    spark: SparkSession,
    kubectl: Kubectl,
    applied: Callable[[dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = example()[-1]
    other["metadata"] = {"name": "other", "namespace": "default"}
    applied(other)
    with pytest.raises(hopsgpu.ConfigError, match=r"gangs, other\).*spark.hopsgpu.kueue.queue"):
        hopsgpu.launch(os.getpid, workers=1, progress="off")
    monkeypatch.setenv("HOPSGPU_KUEUE_QUEUE", "absent")
    with pytest.raises(hopsgpu.ConfigError, match="it has gangs, other"):
        hopsgpu.launch(os.getpid, workers=1, progress="off")
    monkeypatch.setenv("HOPSGPU_KUEUE_QUEUE", "other")
    assert len(hopsgpu.launch(os.getpid, workers=1, progress="off").values) == 1
    monkeypatch.setenv("HOPSGPU_KUEUE_QUEUE", "off")
    assert len(hopsgpu.launch(os.getpid, workers=QUOTA + 1, progress="off").values) == QUOTA + 1
