"""Why pods do not start: each reason in words, and whether waiting can help."""

from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.kubernetes.lost_pods import PodEvent
from hopsgpu.cluster_managers.kubernetes.pod_problems import find_problem, problem_of_events
from hopsgpu.cluster_managers.kubernetes.pods import Pod, pod_of
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
        ("unexpected status from HEAD request: 404 Not Found", True),
        ("dial tcp 10.0.0.9:443: i/o timeout", False),
        ("dial tcp: lookup registry.example on 10.0.0.10:53: no such host", False),
        ("mirror: not found; registry: dial tcp 10.0.0.9:443: connection refused", False),
        ('exec: "docker-credential-x": executable file not found in $PATH', False),
        ("429 Too Many Requests", False),
        ("", False),
    ],
)
def test_an_image_that_a_registry_does_not_have_is_final(message: str, is_final: bool) -> None:
    problem = find_problem([pod_value(waiting=("ImagePullBackOff", message))])
    assert problem is not None and problem.is_final is is_final


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "RunContainerError"])
def test_something_else_that_was_not_found_is_not_final(reason: str) -> None:
    problem = find_problem([pod_value(waiting=(reason, 'secret "absent" not found'))])
    assert problem is not None and not problem.is_final


def test_a_recorded_secret_that_does_not_exist_yet_is_not_final() -> None:
    problem = find_problem([pod_of(api_server.recorded_pods()["secretive"], GPU)])
    assert problem is not None and 'secret "absent" not found' in problem.details
    assert not problem.is_final


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


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (("StartError", "exec: no such file"), 128, "(StartError, exit code 128)"),
        (("ContainerCannotRun", ""), None, "(ContainerCannotRun)"),
        (("Error", ""), 1, "(Error, exit code 1)"),
        (("Error", ""), 126, "(Error, exit code 126)"),
        (("Error", ""), 127, "(Error, exit code 127)"),
        (("Error", ""), 137, ""),
        (("Evicted", ""), 1, ""),
        (("OOMKilled", ""), 137, ""),
        (("", ""), 0, ""),
    ],
)
def test_a_container_that_ended_at_its_start(
    end: tuple[str, str], code: int | None, words: str
) -> None:
    pod = pod_value(phase="Failed", end=end, exit_code=code)
    problem = find_problem([pod_value("b"), pod])
    assert (problem is not None) is bool(words)
    if problem is not None:
        assert problem.sentence.endswith(f"the container of a ended {words}")
        assert problem.details == ": ".join(filter(None, ("on node1", end[1])))
        assert problem.remedy.startswith("kubectl logs a ") and "entrypoint" in problem.remedy
        assert not problem.is_final


def test_the_newest_end_counts_and_a_pod_that_waits_counts_before() -> None:
    def ended(name: str, created: float) -> Pod:
        failure = {"phase": "Failed", "end": ("Error", ""), "exit_code": 1}
        return pod_value(name, created=created, **failure)

    pods = [ended("old", 1.0), ended("new", 3.0), ended("older", 0.0)]
    problem = find_problem(pods)
    assert problem is not None and "the container of new ended" in problem.sentence
    problem = find_problem([*pods, pod_value("b", waiting=("ErrImagePull", ""))])
    assert problem is not None and "ErrImagePull" in problem.sentence
    problem = find_problem([*pods, pod_value("c", node="", unschedulable="no room")])
    assert problem is not None and problem.details == "no room"


def event(reason: str, time: float = 200.0, message: str = "a message") -> PodEvent:
    return PodEvent("train-exec-1", reason, message, time)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Failed", "cannot start a container"),
        ("FailedMount", "cannot mount a volume"),
        ("FailedAttachVolume", "cannot be attached"),
        ("FailedCreatePodSandBox", "cannot create a pod's sandbox"),
        ("BackOff", "waits before it tries again"),
        ("FailedScheduling", "finds no node"),
    ],
)
def test_each_event_that_keeps_pods_from_starting(reason: str, words: str) -> None:
    problem = problem_of_events([event(reason)], 100.0)
    assert problem is not None and words in problem.sentence
    assert problem.sentence.endswith(f"({reason})")
    assert problem.details == "train-exec-1: a message"
    assert problem.remedy.endswith("involvedObject.name=train-exec-1")
    assert not problem.is_final


def test_the_newest_event_counts_and_old_or_other_ones_do_not() -> None:
    events = [event("FailedMount", 150.0), event("Failed", 160.0), event("Killing", 170.0)]
    problem = problem_of_events(events, 100.0)
    assert problem is not None and "(Failed)" in problem.sentence
    assert problem_of_events(events, 165.0) is None
    assert problem_of_events([], 0.0) is None


def test_an_event_that_names_only_a_state_counts_last() -> None:
    bare = event("Failed", 300.0, "Error: ImagePullBackOff")
    problem = problem_of_events([event("Failed", 200.0, "no such image"), bare], 100.0)
    assert problem is not None and problem.details.endswith("no such image")
    problem = problem_of_events([bare], 100.0)
    assert problem is not None and problem.details.endswith("ImagePullBackOff")
