"""Pods of an API server as values: their requests, their node, and why they wait or ended."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes.pods import Pod, pod_of, seconds_of, text_of
from tests.unit.cluster_managers.kubernetes import api_server
from tests.unit.cluster_managers.kubernetes.cluster_objects import (
    GPU,
    container,
    exact,
    pod_answer,
)


def requests_of(**spec: Any) -> Any:
    return pod_of(pod_answer(spec), GPU).requests


def recorded_pod(name: str) -> Pod:
    return pod_of(api_server.recorded_pods()[name], GPU)


def test_a_running_executor() -> None:
    pod = recorded_pod("train-1a2b3c-exec-1")
    assert (pod.id, pod.node, pod.phase) == (
        "recorded/train-1a2b3c-exec-1",
        "node2",
        "Running",
    )
    assert pod.requests == exact(1, "0.5", 384)
    assert pod.application == api_server.APPLICATION
    assert pod.created == seconds_of("2026-11-30T19:10:10Z") == 1796065810.0
    assert pod.is_granted and not pod.is_ending and not pod.has_ended
    assert (pod.waiting, pod.unschedulable, pod.end, pod.exit_code) == (
        ("", ""),
        "",
        ("", ""),
        None,
    )


def test_a_pod_whose_image_is_absent_waits_and_holds_its_resources() -> None:
    pod = recorded_pod("train-1a2b3c-exec-2")
    assert pod.waiting[0] == "ImagePullBackOff"
    assert "registry.example/absent:1" in pod.waiting[1]
    assert pod.is_granted and pod.phase == "Pending"


def test_a_pod_without_a_node_is_not_granted() -> None:
    pod = recorded_pod("train-1a2b3c-exec-3")
    assert pod.node == "" and not pod.is_granted and not pod.has_ended
    assert pod.requests.gpus == 9
    assert pod.unschedulable.startswith("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")


def test_a_pod_that_is_being_evicted_still_holds_its_gpu() -> None:
    pod = recorded_pod("train-1a2b3c-exec-4")
    assert pod.is_ending and pod.is_granted
    assert pod.requests.gpus == 1
    assert pod.end == ("EvictionByEvictionAPI", "Eviction API: evicting")


def test_pods_that_have_ended_hold_nothing() -> None:
    succeeded, failed = recorded_pod("once"), recorded_pod("broken")
    assert (succeeded.exit_code, succeeded.end) == (0, ("", ""))
    assert (failed.exit_code, failed.end) == (3, ("Error", ""))
    for pod in (succeeded, failed):
        assert pod.node and pod.has_ended and not pod.is_granted


def test_a_sidecar_adds_to_init_containers_and_to_containers() -> None:
    # The init container with its sidecar requests more cores, the containers more memory.
    assert recorded_pod("stages").requests == exact(0, "1.7", 96)


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
def test_a_pod_with_a_node_is_granted_in_each_phase_before_its_end(phase: str) -> None:
    assert pod_of(pod_answer(status={"phase": phase}), GPU).is_granted


def test_containers_add_up() -> None:
    both = [container({"cpu": "1", GPU: "1"}), container({"cpu": "250m", "memory": "1Gi"})]
    assert requests_of(containers=both) == exact(1, "1.25", 1024)


def test_limits_without_requests_are_requests() -> None:
    only = container(None, {GPU: "2", "cpu": "3", "memory": "1Gi"})
    assert requests_of(containers=[only]) == exact(2, 3, 1024)
    both = container({"cpu": "1"}, {"cpu": "3", "memory": "1Gi"})
    assert requests_of(containers=[both]) == exact(0, 1, 1024)


def test_the_largest_init_container_counts_where_it_is_larger() -> None:
    init = [container({"cpu": "2"}), container({"cpu": "500m", "memory": "2Gi"})]
    main = container({"cpu": "1", "memory": "1Gi", GPU: "1"})
    assert requests_of(initContainers=init, containers=[main]) == exact(1, 2, 2048)


def test_a_sidecar_counts_only_for_the_init_containers_after_it() -> None:
    sidecar = container({"cpu": "1"}, restartPolicy="Always")
    init = container({"cpu": "2"})
    main = container({"cpu": "500m"})
    before = requests_of(initContainers=[sidecar, init], containers=[main])
    after = requests_of(initContainers=[init, sidecar], containers=[main])
    assert (before.cores, after.cores) == (3, 2)


def test_two_sidecars_run_beside_the_containers() -> None:
    sidecars = [container({"cpu": "1"}, restartPolicy="Always")] * 2
    main = container({"cpu": "1", GPU: "1"})
    assert requests_of(initContainers=sidecars, containers=[main]) == exact(1, 3)


def test_the_overhead_of_a_pod_comes_on_top() -> None:
    spec = {"containers": [container({"cpu": "1"})], "overhead": {"cpu": "250m", "memory": "64Mi"}}
    assert requests_of(**spec) == exact(0, "1.25", 64)


def test_a_pod_without_requests_requests_nothing() -> None:
    assert requests_of(containers=[{"name": "c"}]) == requests_of() == exact()


def test_the_first_waiting_container_counts() -> None:
    statuses = [
        {"state": {"running": {}}},
        {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}},
    ]
    pod = pod_of(pod_answer(status={"containerStatuses": statuses}), GPU)
    assert pod.waiting == ("CrashLoopBackOff", "back-off 10s")


def waiting(reason: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason}}}


@pytest.mark.parametrize(
    ("init", "containers", "reason"),
    [
        (["ImagePullBackOff"], ["PodInitializing"], "ImagePullBackOff"),
        (["PodInitializing"], ["CreateContainerError"], "CreateContainerError"),
        ([], ["ContainerCreating", "ErrImagePull"], "ErrImagePull"),
        ([], ["ContainerCreating"], "ContainerCreating"),
    ],
)
def test_a_container_that_is_starting_does_not_hide_anothers_problem(
    init: list[str], containers: list[str], reason: str
) -> None:
    status = {
        "initContainerStatuses": [waiting(name) for name in init],
        "containerStatuses": [waiting(name) for name in containers],
    }
    assert pod_of(pod_answer(status=status), GPU).waiting == (reason, "")


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ({"reason": "Evicted", "message": "low on memory"}, ("Evicted", "low on memory")),
        (
            {
                "reason": "Evicted",
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "preempting",
                    }
                ],
            },
            ("PreemptionByScheduler", "preempting"),
        ),
        (
            {
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "False",
                        "reason": "PreemptionByScheduler",
                    }
                ]
            },
            ("", ""),
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}},
                    {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}},
                ]
            },
            ("OOMKilled", ""),
        ),
    ],
)
def test_the_reason_of_an_end(status: dict[str, Any], end: tuple[str, str]) -> None:
    assert pod_of(pod_answer(status=status), GPU).end == end


def test_the_exit_code_is_that_of_a_container_that_ended() -> None:
    terminated = {"reason": "OOMKilled", "exitCode": 137}
    succeeded = {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    status = {"containerStatuses": [succeeded, {"state": {"terminated": terminated}}]}
    assert pod_of(pod_answer(status=status), GPU).exit_code == 137


def test_an_init_container_counts_if_it_failed() -> None:
    succeeded = {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    failed = {"state": {"terminated": {"reason": "Error", "exitCode": 2}}}
    pod = pod_of(pod_answer(status={"initContainerStatuses": [succeeded]}), GPU)
    assert (pod.end, pod.exit_code) == (("", ""), None)
    pod = pod_of(pod_answer(status={"initContainerStatuses": [succeeded, failed]}), GPU)
    assert (pod.end, pod.exit_code) == (("Error", ""), 2)


def test_the_owner_of_a_pod() -> None:
    owners = [{"kind": "Job", "name": "nightly"}, {"kind": "X", "name": "x"}]
    assert pod_of(pod_answer(ownerReferences=owners), GPU).owner == "nightly"
    assert pod_of(pod_answer(), GPU).owner == ""


def test_fields_of_another_form_are_none() -> None:
    answer: dict[str, Any] = {
        "metadata": None,
        "spec": [],
        "status": {"containerStatuses": {}, "conditions": [1]},
    }
    pod = pod_of(answer, GPU)
    assert (pod.name, pod.node, pod.requests, pod.created) == ("", "", exact(), 0.0)


def test_texts_have_one_line_and_a_bound() -> None:
    assert text_of({"message": " a\n\tb  c "}, "message") == "a b c"
    assert len(text_of({"message": "x" * 10**6}, "message")) == 500
    assert text_of({"message": None}, "message") == text_of({}, "message") == ""


def test_times_of_an_api_server() -> None:
    assert seconds_of("1970-01-01T00:01:00Z") == 60.0
    assert seconds_of("1970-01-01T00:01:00.500000Z") == 60.5
    assert seconds_of("1970-01-01T01:01:00+01:00") == 60.0
    assert seconds_of("1970-01-01T00:01:00") == 60.0
    assert seconds_of(None) == seconds_of("soon") == 0.0
