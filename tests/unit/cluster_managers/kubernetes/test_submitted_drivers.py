"""Drivers in pods over recorded answers: how they are found, what they do, and how they end."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes.submitted_drivers import PodDrivers
from hopsgpu.errors import HopsGpuError
from tests.unit.cluster_managers.kubernetes.api_server import (
    APPLICATION,
    NAMESPACE,
    OWN,
    ReceivedRequest,
    Reply,
    api_server,
    manager_of,
    recorded_pods,
    select,
)

TAG = "hopsgpu-submit-0123456789abcdef"
PODS = f"{OWN}/pods"
EVICTED = {"reason": "Evicted", "message": "disk"}


def driver(phase: str, status: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a driver's pod, made of that of a recorded executor."""
    pod: dict[str, Any] = copy.deepcopy(recorded_pods()["train-1a2b3c-exec-1"])
    pod["metadata"]["name"] = "train-driver"
    labels = pod["metadata"]["labels"]
    labels |= {"spark-role": "driver", "hopsgpu/submission": TAG, "spark-app-name": "train"}
    pod["status"] = {"phase": phase, **(status or {})}
    return pod


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"containerStatuses": [{"state": state}]}


def drivers_of(server: Any) -> PodDrivers:
    return manager_of(server).submitted_drivers()


def with_pods(*pods: dict[str, Any]) -> dict[str, Any]:
    return {f"GET {PODS}": select([*recorded_pods().values(), *pods])}


def test_a_submission_is_found_by_its_label() -> None:
    with api_server(with_pods(driver("Running"))) as server:
        drivers = drivers_of(server)
        state = drivers.find(TAG)
        assert state is not None and state == drivers.state(APPLICATION)
        assert (state.id, state.name, state.driver) == (APPLICATION, "train", "train-driver")
        assert state.place == f"namespace {NAMESPACE}, pod train-driver"
        assert state.log == f"kubectl logs --namespace {NAMESPACE} train-driver"
        assert state.situation.startswith("Running, GPUs held: ")
        assert not state.has_ended and state.problem is None
        assert drivers.living_submissions() == {TAG}
        assert drivers.find("another") is None


@pytest.mark.parametrize(
    ("pod", "outcome", "diagnostics", "code"),
    [
        (driver("Succeeded", ended(0, "Completed")), "Succeeded", "the driver exited with", 0),
        (driver("Failed", ended(3)), "Failed", "the driver exited with code 3", 3),
        (driver("Failed", ended(137, "OOMKilled")), "Failed", "code 137: OOMKilled", 137),
        (
            driver("Failed", {"reason": "Evicted", "message": "disk"}),
            "Failed",
            "Evicted: disk",
            None,
        ),
    ],
)
def test_a_driver_that_has_ended_says_how(
    pod: dict[str, Any], outcome: str, diagnostics: str, code: int | None
) -> None:
    with api_server(with_pods(pod)) as server:
        drivers = drivers_of(server)
        state = drivers.state(APPLICATION)
        assert state.has_ended and state.has_succeeded is (outcome == "Succeeded")
        assert (state.outcome, state.exit_code) == (outcome, code)
        assert diagnostics in state.diagnostics
        assert drivers.living_submissions() == frozenset()
        assert drivers.outputs(state) == ("output",)


def test_a_pod_that_waits_says_why_and_what_never_helps() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}
    with api_server(with_pods(driver("Pending", {"conditions": [unschedulable]}))) as server:
        state = drivers_of(server).state(APPLICATION)
        assert state.situation == "Pending: Kubernetes cannot schedule 1 pod: 0/2 nodes"
        assert state.log == "" and state.problem is not None and not state.problem.is_final
    waiting = {"waiting": {"reason": "InvalidImageName", "message": "no such name"}}
    pod = driver("Pending", {"containerStatuses": [{"state": waiting}]})
    with api_server(with_pods(pod)) as server:
        problem = drivers_of(server).state(APPLICATION).problem
        assert problem is not None and problem.is_final
        assert "Kubernetes does not start the driver" in problem.text
    with api_server(with_pods(driver("Pending"))) as server:
        assert drivers_of(server).state(APPLICATION).situation == "Pending"


def test_a_pod_that_was_deleted_has_ended() -> None:
    with api_server() as server:
        drivers = drivers_of(server)
        state = drivers.state(APPLICATION)
        assert state.has_ended and state.is_killed and not state.has_succeeded
        assert state.diagnostics == "the driver's pod was deleted"
        assert drivers.outputs(state) == () and drivers.log_command(state) == ""


def test_the_end_of_a_log_is_read() -> None:
    def log(request: ReceivedRequest) -> Reply:
        return 200, f"{request.query['tailLines']} lines\n" + "x" * 100 + "é"

    answers = {**with_pods(driver("Running")), f"GET {PODS}/train-driver/log": log}
    with api_server(answers) as server:
        drivers = drivers_of(server)
        state = drivers.state(APPLICATION)
        assert drivers.read_end(state, "output", 1000).startswith("400 lines\nxxx")
        # A letter of several bytes may be cut.
        assert drivers.read_end(state, "output", 1) == "\N{REPLACEMENT CHARACTER}"
        server.answers[f"GET {PODS}/train-driver/log"] = (404, {"message": "gone"})
        with pytest.raises(HopsGpuError, match="gone"):
            drivers.read_end(state, "output", 1000)


def test_a_driver_is_ended_by_its_pod() -> None:
    answers = {**with_pods(driver("Running")), f"DELETE {PODS}/train-driver": (200, {})}
    with api_server(answers) as server:
        drivers = drivers_of(server)
        state = drivers.state(APPLICATION)
        drivers.end(state)
        assert server.lines[-1] == f"DELETE {PODS}/train-driver"
        # Somebody else may have deleted it.
        server.answers[f"DELETE {PODS}/train-driver"] = (404, {"message": "gone"})
        drivers.end(state)
        server.answers[f"DELETE {PODS}/train-driver"] = (403, {"message": "not you"})
        with pytest.raises(HopsGpuError, match="not you"):
            drivers.end(state)
        commands = (drivers.list_command(), drivers.end_command(APPLICATION))
        assert all(f"--namespace {NAMESPACE}" in command for command in commands)
        assert commands[1].endswith(
            f"--selector spark-role=driver,spark-app-selector={APPLICATION}"
        )
