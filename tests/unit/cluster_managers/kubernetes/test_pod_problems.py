"""Why pods do not start: each reason in words, and whether waiting can help."""

from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.kubernetes.pod_problems import find_problem
from hopsgpu.cluster_managers.kubernetes.pods import pod_of
from tests.unit.cluster_managers.kubernetes import api_server
from tests.unit.cluster_managers.kubernetes.cluster_objects import GPU, pod_value

IMAGE = "spark.kubernetes.container.image"


@pytest.mark.parametrize(
    ("reason", "words", "remedy", "is_final"),
    [
        ("ErrImagePull", "cannot pull the image", IMAGE, False),
        ("ImagePullBackOff", "cannot pull the image", IMAGE, False),
        ("ErrImageNeverPull", "pullPolicy=Never", IMAGE, True),
        ("InvalidImageName", "the name of the image is invalid", IMAGE, True),
        ("ImageInspectError", "cannot read the image", IMAGE, False),
        ("RegistryUnavailable", "the registry does not answer", IMAGE, False),
        ("CreateContainerConfigError", "a Secret, a ConfigMap", "kubectl describe pod a", False),
        ("CreateContainerError", "cannot create the container", "kubectl describe pod a", False),
        ("RunContainerError", "cannot be started", "kubectl describe pod a", False),
        ("CrashLoopBackOff", "ends again and again", "kubectl describe pod a", False),
    ],
)
def test_each_reason_has_words_and_a_remedy(
    reason: str, words: str, remedy: str, is_final: bool
) -> None:
    problem = find_problem([pod_value(waiting=(reason, "the kubelet says why"))])
    assert problem is not None
    assert words in problem.sentence and problem.sentence.endswith(f"({reason})")
    assert problem.details == "on node1: the kubelet says why"
    assert remedy in problem.remedy
    assert problem.is_final is is_final


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing", ""])
def test_a_pod_that_is_starting_is_no_problem(reason: str) -> None:
    assert find_problem([pod_value(waiting=(reason, ""))]) is None
    assert find_problem([]) is None


@pytest.mark.parametrize(
    ("message", "is_final"),
    [
        ('rpc error: code = NotFound desc = "docker.io/a/b:9": not found', True),
        ("manifest unknown: manifest unknown", True),
        ("pull access denied, repository does not exist or may require authorization", True),
        ("dial tcp 10.0.0.9:443: i/o timeout", False),
        ("429 Too Many Requests", False),
        ("", False),
    ],
)
def test_an_image_that_a_registry_does_not_have_is_final(message: str, is_final: bool) -> None:
    problem = find_problem([pod_value(waiting=("ImagePullBackOff", message))])
    assert problem is not None and problem.is_final is is_final


def test_a_recorded_image_that_cannot_be_pulled() -> None:
    pods = [pod_of(pod, GPU) for pod in api_server.recorded_pods().values()]
    problem = find_problem([pod for pod in pods if pod.application])
    assert problem is not None and not problem.is_final
    assert problem.details.startswith(
        'on node1: Back-off pulling image "registry.example/absent:1"'
    )


def test_pods_that_cannot_be_scheduled_have_the_words_of_the_scheduler() -> None:
    pods = [
        pod_value("a", node="", unschedulable="0/2 nodes are available"),
        pod_value("b", node="", unschedulable="another reason"),
        pod_value("c"),
    ]
    problem = find_problem(pods)
    assert problem is not None and not problem.is_final
    assert problem.sentence == "Kubernetes cannot schedule 2 pods"
    assert problem.details == "0/2 nodes are available"
    single = find_problem(pods[1:])
    assert single is not None and single.sentence == "Kubernetes cannot schedule 1 pod"


def test_an_image_counts_before_the_schedule() -> None:
    waiting = pod_value("b", waiting=("ErrImagePull", ""))
    problem = find_problem([pod_value("a", unschedulable="no room"), waiting])
    assert problem is not None and "ErrImagePull" in problem.sentence
    assert problem.details == "on node1"
