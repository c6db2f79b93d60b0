"""Drivers in pods that spark-submit creates in cluster mode.

Source: Spark's "Running Spark on Kubernetes" (cluster mode, labels of its pods).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from hopsgpu.cluster_managers.kubernetes.amounts import sum_exact
from hopsgpu.cluster_managers.kubernetes.api_client import ApiClient, ApiError
from hopsgpu.cluster_managers.kubernetes.pod_problems import find_problem
from hopsgpu.cluster_managers.kubernetes.pods import (
    APPLICATION,
    APPLICATION_NAME,
    ROLE,
    Pod,
    pod_of,
)
from hopsgpu.cluster_managers.manager import StartProblem
from hopsgpu.cluster_managers.submitted_drivers import DriverState, SubmittedDrivers

# The label of a driver's pod that names its submission.
SUBMISSION = "hopsgpu/submission"
_OUTPUT = "output"
# Lines of a log that are requested: a limit of bytes would cut its end.
_LINES = 400
_NOT_FOUND = 404
_DELETED = "the driver's pod was deleted"


class PodDrivers(SubmittedDrivers):
    """The drivers in pods of one namespace.

    Args:
        gpu_resource: the resource that counts GPUs.
    """

    def __init__(self, client: ApiClient, gpu_resource: str) -> None:
        self._client = client
        self._gpu_resource = gpu_resource
        self._pods_path = f"/api/v1/namespaces/{quote(client.namespace)}/pods"

    def find(self, tag: str) -> DriverState | None:
        pods = self._pods(f"{SUBMISSION}={tag},{ROLE}=driver")
        return self._driver_state(pods[0]) if pods else None

    def state(self, application_id: str) -> DriverState:
        pods = self._pods(f"{APPLICATION}={application_id},{ROLE}=driver")
        return self._driver_state(pods[0]) if pods else _state_after_deletion(application_id)

    def living_submissions(self) -> frozenset[str]:
        """Return the submissions whose driver's pod exists and has not ended."""
        pods = self._pods(f"{SUBMISSION},{ROLE}=driver")
        return frozenset(pod.labels[SUBMISSION] for pod in pods if not pod.has_ended)

    def end(self, state: DriverState) -> None:
        """Delete the driver's pod, which owns those of the executors."""
        try:
            self._client.delete(f"{self._pods_path}/{quote(state.driver)}")
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise

    def outputs(self, state: DriverState) -> Sequence[str]:
        return () if state.is_killed else (_OUTPUT,)

    def read_end(self, state: DriverState, output: str, max_bytes: int) -> str:
        path = f"{self._pods_path}/{quote(state.driver)}/log"
        content = self._client.get_content(path, tailLines=str(_LINES))
        return content[-max_bytes:].decode(errors="replace")

    def log_command(self, state: DriverState) -> str:
        return _log_command(self._client.namespace, state.driver) if state.driver else ""

    def list_command(self) -> str:
        return f"kubectl get pods --namespace {self._client.namespace} --selector {ROLE}=driver"

    def end_command(self, application_id: str) -> str:
        return (
            f"kubectl delete pod --namespace {self._client.namespace}"
            f" --selector {ROLE}=driver,{APPLICATION}={application_id}"
        )

    def _pods(self, selector: str) -> list[Pod]:
        answers = self._client.items(self._pods_path, labelSelector=selector)
        return [pod_of(answer, self._gpu_resource) for answer in answers]

    def _driver_state(self, pod: Pod) -> DriverState:
        problem = find_problem([pod], "the driver") if pod.phase == "Pending" else None
        situation = self._situation(pod, problem)
        return DriverState(
            id=pod.application,
            name=pod.labels.get(APPLICATION_NAME, ""),
            user="",
            place=f"namespace {pod.namespace}, pod {pod.name}",
            situation=situation,
            gist=situation,
            driver=pod.name,
            node="",
            # A pod that waits has no log.
            log="" if pod.phase == "Pending" else _log_command(pod.namespace, pod.name),
            has_ended=pod.has_ended,
            has_succeeded=pod.phase == "Succeeded",
            is_killed=False,
            outcome=pod.phase,
            diagnostics=driver_end(pod),
            exit_code=pod.exit_code,
            problem=problem,
        )

    def _situation(self, pod: Pod, problem: StartProblem | None) -> str:
        if problem is not None:
            parts = (f"{pod.phase}: {problem.sentence}", problem.details)
            return ": ".join(filter(None, parts))
        if pod.phase != "Running":
            return pod.phase
        executors = self._pods(f"{APPLICATION}={pod.application},{ROLE}=executor")
        held = sum_exact(executor.requests for executor in executors if executor.is_granted)
        return f"Running, GPUs held: {held.round_up().gpus}"


def _log_command(namespace: str, pod: str) -> str:
    return f"kubectl logs --namespace {namespace} {pod}"


def driver_end(pod: Pod) -> str:
    """Return how a driver's pod has ended; "" if the API server does not say it."""
    code = "" if pod.exit_code is None else f"the driver exited with code {pod.exit_code}"
    # "Error" says no more than the code does.
    named = (part for part in pod.end if part != "Error")
    return ": ".join(filter(None, (code, *named)))


def _state_after_deletion(application_id: str) -> DriverState:
    return DriverState(
        id=application_id,
        name="",
        user="",
        place="",
        situation=_DELETED,
        gist=_DELETED,
        driver="",
        node="",
        log="",
        has_ended=True,
        has_succeeded=False,
        is_killed=True,
        outcome="deleted",
        diagnostics=_DELETED,
        exit_code=None,
    )
