"""Why executors were lost, in the words of pods, events and nodes."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes.lost_pods import PodEvent, why_lost
from hopsgpu.cluster_managers.kubernetes.pods import pod_of
from hopsgpu.cluster_managers.resources import NOTHING
from hopsgpu.cluster_managers.snapshot import Node
from tests.unit.cluster_managers.kubernetes import api_server
from tests.unit.cluster_managers.kubernetes.cluster_objects import GPU, pod_value

NODES = (
    Node("node1", "node1", "RUNNING", NOTHING, NOTHING),
    Node("node2", "node2", "RUNNING", NOTHING, NOTHING),
)


def why(**changes: Any) -> str:
    facts = {"pods": (), "events": (), "nodes": NODES, "since": 100.0, **changes}
    return why_lost("node1", **facts)


def event(reason: str, time: float = 200.0, message: str = "") -> PodEvent:
    return PodEvent("a", reason, message, time)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Evicted", "the node ran out of something"),
        ("EvictionByEvictionAPI", "kubectl drain"),
        ("PreemptionByScheduler", "one of higher priority"),
        ("Preempted", "one of higher priority"),
        ("Preempting", "one of higher priority"),
        ("DeletionByTaintManager", "its node has a taint"),
        ("TaintManagerEviction", "its node has a taint"),
        ("DeletionByPodGC", "its node no longer exists"),
        ("TerminationByKubelet", "the kubelet ended its pod"),
        ("Terminated", "its node was shut down"),
        ("NodeShutdown", "its node was shut down"),
        ("NodeLost", "its node does not report"),
        ("OOMKilled", "raise memory_per_worker"),
        ("OOMKilling", "raise memory_per_worker"),
        ("UnexpectedAdmissionError", "could not give it its GPUs"),
        ("DeadlineExceeded", "activeDeadlineSeconds"),
    ],
)
def test_each_reason_of_pods_and_events_has_words(reason: str, words: str) -> None:
    of_pod = why(pods=[pod_value(end=(reason, "a message"))])
    assert words in of_pod and of_pod.endswith(f"({reason}: a message)")
    of_event = why(events=[event(reason)])
    assert words in of_event and of_event.endswith(f"({reason})")


def test_a_deletion_that_was_withdrawn_is_no_reason() -> None:
    message = "Cancelling deletion of Pod default/a"
    assert why(events=[event("TaintManagerEviction", message=message)]) == ""


def test_a_recorded_eviction() -> None:
    pod = pod_of(api_server.recorded_pods()["train-1a2b3c-exec-4"], GPU)
    assert why(pods=[pod]) == (
        "its pod was evicted, as by `kubectl drain` (EvictionByEvictionAPI: Eviction API: evicting)"
    )


def test_a_node_that_is_gone_or_not_ready_counts_first() -> None:
    pods = [pod_value(end=("Evicted", ""))]
    assert why(pods=pods, nodes=NODES[1:]) == "its node node1 no longer exists"
    silent = Node("node1", "node1", "NOT READY", NOTHING, NOTHING, health="no kubelet")
    assert why(pods=pods, nodes=[silent]) == "its node node1 is not ready: no kubelet"


@pytest.mark.parametrize("state", ["CORDONED", "TAINTED", "NOT SELECTED"])
def test_a_node_that_takes_no_more_pods_ends_none(state: str) -> None:
    assert why(nodes=[Node("node1", "node1", state, NOTHING, NOTHING)]) == ""


def test_without_any_nodes_none_is_said_to_be_gone() -> None:
    assert why(nodes=()) == ""


def test_a_pod_counts_before_events_and_the_latest_event_before_others() -> None:
    events = [event("Evicted", 150.0), event("OOMKilling", 160.0), event("Scheduled", 170.0)]
    assert "OOMKilling" in why(events=events)
    assert "Preempted" in why(events=events, pods=[pod_value(end=("Preempted", ""))])


def test_old_events_do_not_count() -> None:
    assert why(events=[event("Evicted", 99.0)]) == ""
    assert "Evicted" in why(events=[event("Evicted", 100.0)])


@pytest.mark.parametrize("reason", ["", "Error", "Completed", "Killing", "Unknown"])
def test_another_reason_is_none(reason: str) -> None:
    assert why(pods=[pod_value(end=(reason, "x"))], events=[event(reason)]) == ""


def test_a_pod_that_is_being_deleted() -> None:
    assert why(pods=[pod_value(is_ending=True)]) == "its pod was deleted"


def test_a_long_message_is_cut() -> None:
    assert len(why(events=[event("Evicted", message="x" * 10**5)])) < 500
