"""Requests for Kueue's objects: with Kueue, without it, and without permissions."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.cluster_managers.flavors import NO_FLAVORS
from hopsgpu.cluster_managers.kubernetes import manager as manager_module
from hopsgpu.cluster_managers.kubernetes.api_client import ApiError, Forbidden
from hopsgpu.cluster_managers.kubernetes.kueue import deleted_workload
from hopsgpu.cluster_managers.kubernetes.kueue_queue import KueueQueue
from hopsgpu.errors import ConfigError
from tests.unit.cluster_managers.kubernetes.api_server import (
    APPLICATION,
    LEASES,
    NAMESPACE,
    OWN,
    ApiServer,
    api_server,
    list_of,
    manager_of,
    recorded_pods,
    select,
    single,
)

ROOT = "/apis/kueue.x-k8s.io"
QUEUES = f"{ROOT}/v1beta2/namespaces/{NAMESPACE}/localqueues"
WORKLOADS = f"{ROOT}/v1beta2/namespaces/{NAMESPACE}/workloads"
FLAVORS = f"{ROOT}/v1beta2/resourceflavors"
INSTALLED = {f"GET {ROOT}": (200, {"versions": [{"version": "v1beta2"}]})}
WORKLOAD = deleted_workload("w", APPLICATION)
GONE = (404, {"kind": "Status", "reason": "NotFound", "message": "not found"})


def named(*names: str, application: str = APPLICATION) -> dict[str, Any]:
    labels = {"hopsgpu/application": application}
    return list_of([{"metadata": {"name": name, "labels": labels}} for name in names])


def queue_of(server: ApiServer, chosen: str = "") -> KueueQueue:
    queue = manager_of(server).kueue_queue(chosen)
    assert queue is not None
    return queue


def test_without_kueue_gangs_need_no_queue() -> None:
    with api_server() as server:
        assert manager_of(server).kueue_queue("") is None
        assert not manager_of(server).has_kueue()
        with pytest.raises(ConfigError, match="this Kubernetes has no Kueue"):
            manager_of(server).kueue_queue("gangs")


@pytest.mark.parametrize("answer", [(200, named()), single("forbidden"), GONE])
def test_a_namespace_without_a_queue_that_may_be_listed_needs_none(answer: Any) -> None:
    with api_server({**INSTALLED, f"GET {QUEUES}": answer}) as server:
        assert manager_of(server).has_kueue()
        assert manager_of(server).kueue_queue("") is None


def test_a_version_that_is_not_known_counts_as_no_kueue() -> None:
    with api_server({f"GET {ROOT}": (200, {"versions": [{"version": "v9"}]})}) as server:
        assert manager_of(server).kueue_queue("") is None


def test_the_queue_of_the_namespace() -> None:
    with api_server({**INSTALLED, f"GET {QUEUES}": (200, named("a"))}) as server:
        assert (queue_of(server).name, queue_of(server).version) == ("a", "v1beta2")
        server.answers[f"GET {QUEUES}"] = (200, named("a", "b"))
        assert queue_of(server, "b").name == "b"
        with pytest.raises(ConfigError, match="several LocalQueues"):
            queue_of(server)
        server.answers[f"GET {QUEUES}"] = single("forbidden")
        with pytest.raises(Forbidden):
            queue_of(server, "b")


def test_workloads_are_created_read_and_deleted() -> None:
    answers = {
        **INSTALLED,
        f"GET {QUEUES}": (200, named("a")),
        f"POST {WORKLOADS}": (201, {"metadata": {"name": "w"}}),
        f"GET {WORKLOADS}/w": GONE,
        f"DELETE {WORKLOADS}/w": GONE,
    }
    with api_server(answers) as server:
        queue = queue_of(server)
        assert queue.create({"kind": "Workload"}).name == "w"
        assert queue.read(WORKLOAD) == WORKLOAD
        queue.delete(WORKLOAD)
        for method in ("GET", "DELETE"):
            server.answers[f"{method} {WORKLOADS}/w"] = single("forbidden")
        with pytest.raises(ApiError):
            queue.read(WORKLOAD)
        with pytest.raises(ApiError):
            queue.delete(WORKLOAD)


def test_changes_of_workloads() -> None:
    item = {"metadata": {"name": "w", "labels": {"hopsgpu/application": APPLICATION}}}
    lines = [{"type": type_, "object": item} for type_ in ("ADDED", "DELETED")]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    answers = {
        **INSTALLED,
        f"GET {QUEUES}": (200, named("a")),
        f"GET {WORKLOADS}": lambda request: (200, text),
    }
    with api_server(answers) as server:
        added, deleted = queue_of(server).watch(APPLICATION, 60)
    assert not added.eviction and deleted == WORKLOAD
    assert server.requests[-1].query["labelSelector"] == f"hopsgpu/application={APPLICATION}"


def test_flavors_that_may_not_be_read_allow_all_nodes() -> None:
    flavor = {"spec": {"nodeLabels": {"pool": "a"}}}
    answers = {
        **INSTALLED,
        f"GET {QUEUES}": (200, named("a")),
        f"GET {FLAVORS}/x": (200, flavor),
        f"GET {FLAVORS}/y": single("forbidden"),
    }
    with api_server(answers) as server:
        assert queue_of(server).flavors(["x"]).labels == {"pool": "a"}
        assert queue_of(server).flavors(["x", "y"]) == NO_FLAVORS


def test_workloads_of_applications_that_do_not_run_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = single("lease_created")[1]
    answers = {
        **INSTALLED,
        f"GET {QUEUES}": (200, named("a")),
        f"GET {WORKLOADS}": (
            200,
            list_of([*named("w")["items"], *named("old", application="spark-2")["items"]]),
        ),
        f"GET {LEASES}": (200, list_of([running])),
        f"DELETE {WORKLOADS}/w": (200, {}),
        f"DELETE {WORKLOADS}/old": (200, {}),
    }
    # The recorded Lease was renewed at 18:10:00.5 of that day.
    clock = SimpleNamespace(time=lambda: 1796062200.5 + 5)
    with api_server(answers) as server:
        monkeypatch.setattr(manager_module, "time", clock)
        manager_of(server).remove_old_workloads(queue_of(server))
        deleted = [line for line in server.lines if line.startswith("DELETE")]
        assert deleted == [f"DELETE {WORKLOADS}/old"]
        clock.time = lambda: 1796062200.5 + 61
        manager_of(server).remove_old_workloads(queue_of(server))
        # An application whose executors run is not lost: the API server may have been away.
        assert f"DELETE {WORKLOADS}/w" not in server.lines
        server.answers[f"GET {OWN}/pods"] = (200, list_of([]))
        manager_of(server).remove_old_workloads(queue_of(server))
        deleted = [line for line in server.lines if line.startswith("DELETE")]
        assert deleted[-2:] == [f"DELETE {WORKLOADS}/w", f"DELETE {WORKLOADS}/old"]


def test_an_eviction_is_the_reason_of_a_loss() -> None:
    lease = single("lease_created")[1]
    now = time.time()
    lease["spec"]["renewTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    answers = {
        f"GET {OWN}/pods": select(list(recorded_pods().values())),
        f"GET {LEASES}/hopsgpu-{APPLICATION}": (200, lease),
    }
    with api_server(answers) as server:
        manager = manager_of(server)
        manager._evictions[(APPLICATION, "node2")] = ("Kueue preempted the gang: x", now)
        assert manager.why_lost(APPLICATION, "gone", "node2") == "Kueue preempted the gang: x"
        assert "Kueue" not in manager.why_lost(APPLICATION, "gone", "node1")
        manager._evictions[(APPLICATION, "node2")] = ("Kueue preempted the gang: x", now - 300)
        assert "Kueue" not in manager.why_lost(APPLICATION, "gone", "node2")
        manager.record_eviction(APPLICATION, ["1"], "Kueue evicted the gang: y")
    assert server.requests[-1].query["labelSelector"].endswith("spark-exec-id in (1)")
