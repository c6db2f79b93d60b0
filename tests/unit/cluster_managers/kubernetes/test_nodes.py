"""Nodes of an API server as values: free resources, and whether executors may run there."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes.nodes import (
    NodeRules,
    Toleration,
    devices_of,
    node_of,
    toleration_of,
)
from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeGpu
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.snapshot import Node
from tests.unit.cluster_managers.kubernetes import api_server
from tests.unit.cluster_managers.kubernetes.cluster_objects import GPU, exact, node_answer

NO_RULES = NodeRules()
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


def state_of(answer: dict[str, Any], rules: NodeRules = NO_RULES) -> tuple[str, str]:
    node = node_of(answer, GPU, exact(), rules)
    return node.state, node.health


def test_a_recorded_node() -> None:
    answer = api_server.recorded_list("nodes")["items"][0]
    assert node_of(answer, GPU, exact(1, "0.5", 384), NO_RULES) == Node(
        "node1", "node1", "RUNNING", Amount(2, 7, 16334), Amount(1, 1, 384)
    )
    assert devices_of(answer, 2).gpus == (NodeGpu("Simulated A100", None, ""),) * 2


@pytest.mark.parametrize(
    ("size", "used", "total", "free"),
    [
        ("3920m", "0.2", 3, 3),
        ("3920m", "0.93", 3, 2),
        ("3920m", "0", 3, 3),
        ("4", "0.1", 4, 3),
        ("4", "4", 4, 0),
    ],
)
def test_whole_cores_are_what_others_leave(size: str, used: str, total: int, free: int) -> None:
    answer = node_answer(status={"allocatable": {GPU: "2", "cpu": size, "memory": "8Gi"}})
    node = node_of(answer, GPU, exact(1, used, "0.5"), NO_RULES)
    assert node.total.cores == total
    assert node.total - node.used == Amount(1, free, 8191)


def test_a_node_says_that_its_gpus_cannot_be_allocated() -> None:
    status = {"capacity": {GPU: "2"}, "allocatable": {GPU: "0", "cpu": "4", "memory": "8Gi"}}
    state, health = state_of(node_answer(status=status))
    assert state == "RUNNING" and health.startswith(
        "2 GPUs cannot be allocated, because its device"
    )
    assert state_of(node_answer(status={"capacity": {GPU: "2"}})) == ("RUNNING", "")


def test_allocatable_counts_and_not_capacity() -> None:
    answer = node_answer(status={"capacity": {GPU: "8", "cpu": "64", "memory": "1Ti"}})
    assert node_of(answer, GPU, exact(), NO_RULES).total == Amount(2, 4, 8192)


def test_a_node_without_the_resource_has_no_gpus() -> None:
    assert node_of(node_answer(), "amd.com/gpu", exact(), NO_RULES).total.gpus == 0


@pytest.mark.parametrize(
    ("conditions", "health"),
    [
        ([{"type": "Ready", "status": "False", "message": "PLEG is  not healthy"}], "PLEG is not"),
        ([{"type": "Ready", "status": "Unknown"}], "its kubelet does not report"),
        ([{"type": "MemoryPressure", "status": "True"}], "its kubelet does not report"),
        ([], "its kubelet does not report"),
    ],
)
def test_a_node_that_is_not_ready(conditions: list[dict[str, str]], health: str) -> None:
    state, why = state_of(node_answer(status={"conditions": conditions}))
    assert state == "NOT READY" and why.startswith(health)


def test_a_cordoned_node() -> None:
    state, why = state_of(node_answer({"unschedulable": True}))
    assert state == "CORDONED" and "kubectl uncordon" in why


def test_a_taint_repels_executors_that_do_not_tolerate_it() -> None:
    state, why = state_of(node_answer({"taints": [GPU_TAINT]}))
    assert (state, why) == (
        "TAINTED",
        "executors do not tolerate its taint nvidia.com/gpu=present:NoSchedule",
    )
    rules = NodeRules(tolerations=(Toleration(GPU, "Exists"),))
    assert state_of(node_answer({"taints": [GPU_TAINT]}), rules) == ("RUNNING", "")


def test_each_taint_needs_a_toleration() -> None:
    rules = NodeRules(tolerations=(Toleration(GPU, "Exists"),))
    other = {"key": "team", "value": "a", "effect": "NoExecute"}
    state, why = state_of(node_answer({"taints": [GPU_TAINT, other]}), rules)
    assert state == "TAINTED" and why.endswith("team=a:NoExecute")


@pytest.mark.parametrize(
    ("toleration", "state"),
    [
        (Toleration(operator="Exists"), "RUNNING"),
        (Toleration("node.kubernetes.io/unschedulable", "Exists"), "RUNNING"),
        (Toleration(GPU, "Exists"), "CORDONED"),
        (Toleration(operator="Exists", effect="NoExecute"), "CORDONED"),
    ],
)
def test_a_cordoned_node_takes_pods_that_tolerate_that(toleration: Toleration, state: str) -> None:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    node = node_answer({"unschedulable": True, "taints": [taint]})
    assert state_of(node, NodeRules(tolerations=(toleration,)))[0] == state


def test_a_taint_that_only_prefers_does_not_repel() -> None:
    taint = {**GPU_TAINT, "effect": "PreferNoSchedule"}
    assert state_of(node_answer({"taints": [taint]})) == ("RUNNING", "")


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"key": GPU, "operator": "Exists"}, True),
        ({"key": GPU, "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": GPU, "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": GPU, "value": "present"}, True),
        ({"key": GPU, "operator": "Equal", "value": "present", "effect": ""}, True),
        ({"key": GPU, "operator": "Equal", "value": "absent"}, False),
        ({"key": GPU}, False),
        ({"value": "present"}, False),
    ],
)
def test_tolerations(toleration: dict[str, str], is_tolerated: bool) -> None:
    assert toleration_of(toleration).is_covering(GPU_TAINT) is is_tolerated


def test_a_taint_without_a_value_equals_the_empty_one() -> None:
    taint = {"key": "a", "effect": "NoSchedule"}
    assert toleration_of({"key": "a"}).is_covering(taint)
    assert toleration_of({"key": "a", "value": ""}).is_covering({**taint, "value": None})


def test_a_node_needs_each_label_of_the_selector() -> None:
    rules = NodeRules({"pool": "gpu", "zone": "a"})
    assert state_of(node_answer(labels={"pool": "gpu", "zone": "a", "x": "y"}), rules)[0] == (
        "RUNNING"
    )
    assert state_of(node_answer(labels={"pool": "gpu"}), rules) == (
        "NOT SELECTED",
        "it has not the label zone=a",
    )
    assert state_of(node_answer(labels={"pool": "cpu", "zone": "a"}), rules)[0] == "NOT SELECTED"


def test_labels_name_the_gpus() -> None:
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/cuda.driver-version.full": "550.54.15",
    }
    gpu = NodeGpu("NVIDIA A100 SXM4 80GB", 81920, "")
    assert devices_of(node_answer(labels=labels), 2) == Devices((gpu, gpu), "550.54.15")
    labels["nvidia.com/gpu.memory"] = "²"
    assert devices_of(node_answer(labels=labels), 1).gpus[0].memory_mib is None


def test_without_labels_the_gpus_are_unknown() -> None:
    assert devices_of(node_answer(), 2) == Devices((), "")
