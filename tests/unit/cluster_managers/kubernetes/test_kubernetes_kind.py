"""Kubernetes as a kind of cluster manager: its masters, and settings that prevent gangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.cluster_managers.kubernetes.kind import Kubernetes
from hopsgpu.errors import ConfigError
from tests.unit.cluster_managers.kubernetes.api_server import GPU, TOKEN, api_server
from tests.unit.cluster_managers.kubernetes.kubeconfigs import write_kubeconfig

KIND = Kubernetes()
NO_SETTINGS: dict[str, str] = {}
IMAGE = "spark.kubernetes.container.image"
ALLOCATOR = "spark.kubernetes.allocation.pods.allocator"


@pytest.mark.parametrize(
    ("master", "is_one"),
    [
        ("k8s://https://h:6443", True),
        (" k8s://h:6443", True),
        ("spark://h:7077", False),
        ("yarn", False),
        ("local[2]", False),
        ("k8s", False),
    ],
)
def test_masters(master: str, is_one: bool) -> None:
    assert KIND.has_master(master) is is_one


def test_an_image_is_required() -> None:
    (finding,) = KIND.find_refusals(NO_SETTINGS.get)
    assert finding.startswith(f"{IMAGE} is not set") and "image=" in finding
    executors = "spark.kubernetes.executor.container.image"
    for setting in (IMAGE, executors):
        assert KIND.find_refusals({setting: "spark:4"}.get) == []
    assert KIND.find_problems(NO_SETTINGS.get) == []


def test_another_allocator_of_pods_is_refused() -> None:
    settings = {IMAGE: "spark:4", ALLOCATOR: "statefulset"}
    (finding,) = KIND.find_refusals(settings.get)
    assert finding.startswith(f"{ALLOCATOR}=statefulset") and "direct" in finding
    assert KIND.find_refusals({**settings, ALLOCATOR: "direct"}.get) == []


def test_a_session_creates_the_pods_of_a_gang_at_once() -> None:
    settings = KIND.session_settings
    assert int(settings["spark.kubernetes.allocation.batch.size"]) >= 256
    assert KIND.settle_seconds(NO_SETTINGS.get) > 0.2


def test_it_connects_with_the_credentials_of_a_kubeconfig(tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    template.write_text("kind: Pod\nspec: {nodeSelector: {pool: gpu}}\n")
    with api_server() as server:
        properties = {
            "spark.master": f"k8s://{server.url}",
            "spark.kubernetes.namespace": "recorded",
            "spark.kubernetes.executor.podTemplateFile": str(template),
        }
        environ = {"KUBECONFIG": str(write_kubeconfig(tmp_path, server.url))}
        manager = KIND.connect(properties, environ)
        states = [node.state for node in manager.nodes()]
    assert states == ["NOT SELECTED", "NOT SELECTED"]
    assert (manager.gpu_resource, manager.namespace) == (GPU, "recorded")
    assert {r.headers["authorization"] for r in server.requests} == {f"Bearer {TOKEN}"}


def test_a_wrong_name_of_the_resource_is_refused_first() -> None:
    properties = {"spark.master": "k8s://", "spark.hopsgpu.gpu.resource": "gpu"}
    with pytest.raises(ConfigError, match="spark.hopsgpu.gpu.resource='gpu'"):
        KIND.connect(properties, {})
