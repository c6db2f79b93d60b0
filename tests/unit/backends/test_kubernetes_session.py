"""The settings of a session on Kubernetes, and what the check of its image says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.spark import kubernetes_image_check
from hopsgpu.backends.spark.kubernetes_image_check import check_image
from hopsgpu.backends.spark.kubernetes_session import check_kubernetes
from hopsgpu.backends.spark.resource_profiles import build_kubernetes_profile
from hopsgpu.cluster_managers.manager import StartProblem
from hopsgpu.core.spec import ExecutorShape
from hopsgpu.errors import ConfigError

MASTER = {"spark.master": "k8s://https://10.0.0.1:6443"}
IMAGE = "spark.kubernetes.container.image"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, f"{IMAGE} is not set"),
        ({IMAGE: "a", "spark.hopsgpu.image": "b"}, "leave out one of them"),
        (
            {IMAGE: "a", "spark.kubernetes.allocation.recoveryMode.enabled": "true"},
            "gangs would wait forever",
        ),
        (
            {IMAGE: "a", "spark.kubernetes.allocation.pods.allocator": "statefulset"},
            "set it to direct",
        ),
        ({IMAGE: "a", "spark.dynamicAllocation.enabled": "false"}, "dynamicAllocation.enabled"),
    ],
)
def test_settings_that_prevent_gangs_are_refused(
    settings: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with pytest.raises(ConfigError, match=words):
        check_kubernetes({**MASTER, **settings})


@pytest.mark.parametrize("name", [IMAGE, "spark.hopsgpu.image"])
def test_an_image_by_either_property_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    check_kubernetes({**MASTER, name: "registry/train:1"})


def test_executors_request_gpus_by_the_name_of_their_resource() -> None:
    profile = build_kubernetes_profile("nvidia.com/mig-1g.10gb", ExecutorShape(1, 2, 512, 1024))
    request = profile.executorResources["mig-1g.10gb"]
    assert (request.amount, request.vendor) == (2, "nvidia.com")
    assert request.discoveryScript == "/opt/hopsgpu/discover-gpus"
    assert profile.taskResources["mig-1g.10gb"].amount == 2


class ImageOnSpark:
    """An application whose task in the image ends as `error` says; "" for a success."""

    def __init__(self, error: str = "", problem: StartProblem | None = None) -> None:
        self.error, self.image, self.id = error, "registry/train:1", "spark-1"
        self.cancelled: list[str] = []
        self.context = self
        self.jvm: Any = SimpleNamespace(cancel=self.cancelled.append)
        self.problem = problem

    def find_start_problem(self, profile: None) -> StartProblem | None:
        return self.problem

    def setJobGroup(self, *_: str) -> None: ...

    def addJobTag(self, _: str) -> None: ...

    def parallelize(self, *_: object) -> ImageOnSpark:
        return self

    def map(self, _: object) -> ImageOnSpark:
        return self

    def collect(self) -> list[str]:
        if self.error:
            raise RuntimeError(self.error)
        return ["3.11"]


def of_spark(error: str = "") -> Any:
    return ImageOnSpark(error)


@pytest.fixture(autouse=True)
def plain_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task runs at once, without Spark's threads."""
    monkeypatch.setattr(kubernetes_image_check, "start_daemon", lambda name, body: body())


def test_an_image_that_runs_a_task_is_accepted() -> None:
    check_image(of_spark())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ('java.io.IOException: Cannot run program "python3": error=2', "has no python3"),
        (
            "Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
            "executors' Python is 3.10",
        ),
    ],
)
def test_an_image_without_the_drivers_python_is_refused(error: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_image(of_spark(error))


def test_other_failures_of_the_task_are_left_to_the_gang() -> None:
    check_image(of_spark("the executor was lost"))


def test_an_image_that_can_never_be_pulled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = StartProblem("the node cannot pull the image", "absent", "check it", is_final=True)
    application: Any = ImageOnSpark(problem=problem)
    monkeypatch.setattr(kubernetes_image_check, "start_daemon", lambda name, body: None)
    monkeypatch.setattr(kubernetes_image_check, "_POLL_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="cannot pull the image; absent; check it"):
        check_image(application)
    assert len(application.cancelled) == 1


def test_the_check_is_given_up_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    application: Any = ImageOnSpark()
    monkeypatch.setattr(kubernetes_image_check, "start_daemon", lambda name, body: None)
    monkeypatch.setattr(kubernetes_image_check, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(kubernetes_image_check, "_SECONDS", 0.05)
    check_image(application)
    assert len(application.cancelled) == 1
