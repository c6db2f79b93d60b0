"""The client of Kubernetes over recorded answers: nodes, executors, limits, Leases and losses."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.cluster_managers.kubernetes import manager as manager_module
from hopsgpu.cluster_managers.kubernetes.api_client import ApiError, Forbidden
from hopsgpu.cluster_managers.kubernetes.application_leases import ApplicationLease, lease_body
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager, Permission
from hopsgpu.cluster_managers.kubernetes.nodes import NodeRules
from hopsgpu.cluster_managers.manager import HeldExecutors
from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeGpu
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.snapshot import App, Container, Node
from hopsgpu.core.run_record import ApplicationReport
from hopsgpu.errors import CapacityError, HopsGpuError
from tests.unit.cluster_managers.kubernetes.api_server import (
    ACCESS,
    APPLICATION,
    GPU,
    LEASE,
    LEASES,
    OTHER_APPLICATION,
    OWN,
    SELF,
    Reply,
    access_of,
    api_server,
    list_of,
    manager_of,
    recorded_list,
    recorded_pods,
    select,
    single,
)

RENEWED = 1796062200.5
CREATED = 1796065810.0
NODES = (
    Node("node1", "node1", "RUNNING", Amount(2, 7, 16334), Amount(0, 3, 480)),
    Node("node2", "node2", "RUNNING", Amount(2, 7, 16334), Amount(2, 1, 768)),
)
NOBODY = {"GET /api/v1/pods": single("forbidden")}
DRIVER = ApplicationLease(APPLICATION, "train", "alice", RENEWED - 600.5, RENEWED)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of managers, whose attribute `seconds` tests set."""
    clock = SimpleNamespace(seconds=RENEWED + 1)
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(time=lambda: clock.seconds))
    return clock


def with_other_pod(**metadata: Any) -> dict[str, Any]:
    """Return a recorded running executor with another name and other labels."""
    pod: dict[str, Any] = copy.deepcopy(recorded_pods()["train-1a2b3c-exec-1"])
    pod["metadata"].update(metadata)
    return pod


def test_names_of_a_manager() -> None:
    manager = KubernetesManager(access_of("https://h:6443", "team"), gpu_resource=GPU)
    assert (manager.title, manager.gpu_resource, manager.namespace) == ("Kubernetes", GPU, "team")
    assert manager.cluster == access_of("https://h:6443", "team").cluster
    assert manager.pages == manager.application_page(APPLICATION) == ""
    assert not manager.are_gpus_ending()


def test_nodes_have_what_their_pods_leave() -> None:
    # On node1 are a pod that waits for its image, and one with a sidecar; pods that have ended
    # hold nothing. On node2, an executor that is being evicted still holds its GPU.
    with api_server() as server:
        assert manager_of(server).nodes() == NODES


def test_rules_decide_which_nodes_run() -> None:
    rules = NodeRules({"kubernetes.io/hostname": "node2"})
    with api_server() as server:
        states = [node.state for node in manager_of(server, rules=rules).nodes()]
    assert states == ["NOT SELECTED", "RUNNING"]


def test_pods_of_all_namespaces_count() -> None:
    other = with_other_pod(name="x", namespace="other", labels={})
    pods = select([*recorded_pods().values(), other])
    with api_server({"GET /api/v1/pods": pods}) as server:
        assert manager_of(server).nodes()[1].used == Amount(3, 2, 1152)


def test_who_may_not_list_all_pods_is_warned_and_asks_for_its_own() -> None:
    with api_server(NOBODY) as server:
        manager = manager_of(server)
        snapshot = manager.snapshot(APPLICATION, "alice")
        assert snapshot.nodes == NODES
        (problem,) = snapshot.problems
        assert "only the pods of the namespace recorded" in problem
        assert manager.snapshot(APPLICATION, "alice").problems == (problem,)
    assert server.lines.count("GET /api/v1/pods") == 1


def test_who_may_list_no_pods_is_refused_in_the_servers_words() -> None:
    answers = {**NOBODY, f"GET {OWN}/pods": single("forbidden")}
    with api_server(answers) as server, pytest.raises(Forbidden, match="cannot list resource"):
        manager_of(server).nodes()


def test_labels_of_nodes_name_their_gpus() -> None:
    with api_server() as server:
        manager = manager_of(server)
        unknown = Node("node9", "node9", "RUNNING", Amount(2, 1, 1), Amount(0, 0, 0))
        answers = manager.devices((*manager.nodes(), unknown))
    gpus = (NodeGpu("Simulated A100", None, ""),) * 2
    assert answers.devices == {"node1": Devices(gpus, ""), "node2": Devices(gpus, "")}


def test_a_snapshot_has_limits_and_applications() -> None:
    with api_server() as server:
        snapshot = manager_of(server).snapshot(APPLICATION, "alice")
    assert (snapshot.application_id, snapshot.nodes) == (APPLICATION, NODES)
    assert (snapshot.problems, snapshot.user.name) == ((), "alice")
    (limit,) = snapshot.queues
    assert limit.path == "ResourceQuota recorded/team" and limit.maximum.gpus == 3
    # The largest executor is that of a node, within the LimitRange.
    assert limit.largest == snapshot.largest == Amount(2, 2, 2048)
    by_id = {app.id: app for app in snapshot.applications}
    assert by_id[APPLICATION] == App(
        APPLICATION, "train", "alice", "", Amount(2, 2, 1152), DRIVER.started, 3
    )
    assert by_id["recorded/stages"] == App(
        "recorded/stages", "stages", "namespace recorded", "", Amount(0, 2, 96), CREATED, 1
    )
    assert by_id.keys() == {APPLICATION, "recorded/stages", "recorded/secretive"}


def test_without_quotas_the_namespace_is_the_limit() -> None:
    none = (200, list_of([]))
    answers = {f"GET {OWN}/resourcequotas": none, f"GET {OWN}/limitranges": none}
    with api_server(answers) as server:
        (limit,) = manager_of(server).snapshot("", "alice").queues
    assert limit.path == "namespace recorded" and limit.largest == Amount(2, 7, 16334)


def test_nodes_that_do_not_run_have_no_part_in_the_largest_executor() -> None:
    nodes = recorded_list("nodes")
    nodes["items"][0]["status"]["allocatable"]["cpu"] = "64"
    nodes["items"][0]["spec"]["unschedulable"] = True
    answers = {"GET /api/v1/nodes": (200, nodes), f"GET {OWN}/limitranges": (200, list_of([]))}
    with api_server(answers) as server:
        assert manager_of(server).snapshot("", "alice").largest == Amount(2, 7, 16334)


def test_an_application_without_pods_is_known_by_its_lease(now: SimpleNamespace) -> None:
    none = {"GET /api/v1/pods": (200, list_of([]))}
    with api_server(none) as server:
        (app,) = manager_of(server).snapshot("", "alice").applications
    assert (app.id, app.name, app.used) == (APPLICATION, "train", Amount(0, 0, 0))


def test_an_application_without_a_lease_is_known_by_its_pods() -> None:
    none = {f"GET {LEASES}": (200, list_of([]))}
    with api_server(none) as server:
        apps = {app.id: app for app in manager_of(server).snapshot("", "alice").applications}
    app = apps[APPLICATION]
    assert (app.name, app.user, app.started) == ("train", "namespace recorded", CREATED)


def test_pods_with_one_owner_are_one_application() -> None:
    owners = [{"kind": "Job", "name": "nightly"}]
    pods = [with_other_pod(name=name, labels={}, ownerReferences=owners) for name in ("a", "b")]
    with api_server({"GET /api/v1/pods": select(pods)}) as server:
        apps = {app.id: app for app in manager_of(server).snapshot("", "alice").applications}
    app = apps["recorded/nightly"]
    assert (app.name, app.containers, app.used.gpus) == ("nightly", 2, 2)


def test_the_overview_lists_the_pods_that_hold_gpus() -> None:
    with api_server() as server:
        overview = manager_of(server).overview("alice")
    assert overview.containers == {
        APPLICATION: tuple(
            Container("node2", f"recorded/train-1a2b3c-exec-{number}", Amount(1, 1, 384), CREATED)
            for number in (1, 4)
        )
    }
    assert overview.nodes == NODES and overview.queues == {} and overview.acls is False
    assert overview.user_snapshots[""][0].user.name == "alice"


def test_the_caller_is_whom_the_server_takes_it_for() -> None:
    with api_server() as server:
        assert manager_of(server).caller() == "admin"
        assert server.bodies("POST", SELF) == [
            {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        ]


def test_a_submission_needs_the_permission_to_create_pods() -> None:
    with api_server() as server:
        manager_of(server).check_submission()
        (body,) = server.bodies("POST", ACCESS)
    assert body["spec"]["resourceAttributes"] == {
        "verb": "create",
        "group": "",
        "resource": "pods",
        "subresource": "",
        "namespace": "recorded",
    }
    answers = {f"POST {ACCESS}": single("denied"), f"POST {SELF}": single("self_account")}
    words = "recorded:default may not create pods in the namespace recorded"
    with api_server(answers) as server, pytest.raises(CapacityError, match=words):
        manager_of(server).check_submission()


def test_permissions_in_the_cluster_have_no_namespace() -> None:
    permission = Permission("list", "leases", "coordination.k8s.io", True, "status")
    with api_server() as server:
        assert manager_of(server).is_allowed(permission)
        (body,) = server.bodies("POST", ACCESS)
    attributes = body["spec"]["resourceAttributes"]
    assert (attributes["namespace"], attributes["group"]) == ("", "coordination.k8s.io")
    assert attributes["subresource"] == "status"
    assert str(permission) == "list leases/status.coordination.k8s.io"
    assert str(Permission("create", "pods")) == "create pods"


def test_an_answer_without_a_decision_allows_nothing() -> None:
    with api_server({f"POST {ACCESS}": (201, {"status": {"allowed": "yes"}})}) as server:
        assert not manager_of(server).is_allowed(Permission("create", "pods"))


def test_executors_that_are_held_and_requested() -> None:
    absent = {f"GET {LEASE.replace(APPLICATION, OTHER_APPLICATION)}": single("lease_absent")}
    held = {
        f"recorded/train-1a2b3c-exec-{number}": node
        for number, node in ((1, "node2"), (2, "node1"), (4, "node2"))
    }
    with api_server(absent) as server:
        manager = manager_of(server)
        assert manager.held_executors(APPLICATION, 1) == HeldExecutors(held, pending=1)
        assert manager.held_executors(APPLICATION, 2) == HeldExecutors({}, pending=0)
        with pytest.raises(HopsGpuError, match=f"no Lease of {OTHER_APPLICATION}"):
            manager.held_executors(OTHER_APPLICATION, 1)


def test_executors_that_have_ended_are_not_held() -> None:
    pods = recorded_pods()
    for name in ("train-1a2b3c-exec-1", "train-1a2b3c-exec-3"):
        pods[name]["status"]["phase"] = "Failed"
    with api_server({f"GET {OWN}/pods": select(list(pods.values()))}) as server:
        held = manager_of(server).held_executors(APPLICATION, 1)
    assert [name[-1] for name in held.containers] == ["2", "4"] and held.pending == 0


def test_a_problem_is_that_of_the_profile() -> None:
    with api_server() as server:
        manager = manager_of(server)
        problem = manager.find_start_problem(APPLICATION, 1)
        assert problem is not None and "ImagePullBackOff" in problem.sentence
        assert manager.find_start_problem(APPLICATION, 2) is None


def test_executors_are_deleted_by_their_ids() -> None:
    with api_server({f"DELETE {OWN}/pods": (200, list_of([]))}) as server:
        manager_of(server).delete_executors(APPLICATION, {"10", "2"})
    (request,) = server.requests
    assert request.query["labelSelector"] == (
        f"spark-app-selector={APPLICATION},spark-role=executor,spark-exec-id in (10,2)"
    )
    assert request.body == {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 1}


def test_all_executors_of_a_profile_are_deleted() -> None:
    with api_server({f"DELETE {OWN}/pods": (200, list_of([]))}) as server:
        manager_of(server).delete_profile(APPLICATION, 3)
    (request,) = server.requests
    assert request.query["labelSelector"] == (
        f"spark-app-selector={APPLICATION},spark-role=executor,spark-exec-resourceprofile-id=3"
    )


def test_a_recorded_eviction_is_the_reason_of_a_loss(now: SimpleNamespace) -> None:
    with api_server() as server:
        manager = manager_of(server)
        manager.held_executors(APPLICATION, 1)
        lost = manager.why_lost(APPLICATION, "exit code 143", "node2")
    assert lost.startswith("its pod was evicted, as by `kubectl drain`")
    assert lost.endswith("; Spark says: exit code 143")


def test_without_a_reason_sparks_own_words_remain(now: SimpleNamespace) -> None:
    with api_server() as server:
        manager = manager_of(server)
        assert manager.why_lost(APPLICATION, "exit code 1", "node1") == "exit code 1"
        assert manager.why_lost(APPLICATION, "", "node1") == ""
        assert manager.why_lost(APPLICATION, "", "node9") == "its node node9 no longer exists"


def preemption(created: str) -> dict[str, Any]:
    """Return an event about the pod of an executor of our application that is gone."""
    return {
        "metadata": {"name": "e"},
        "involvedObject": {"kind": "Pod", "name": "train-1a2b3c-exec-2", "namespace": "recorded"},
        "reason": "Preempted",
        "message": "Preempted by pod x on node node1",
        "lastTimestamp": None,
        "eventTime": created,
    }


@pytest.mark.parametrize(("age", "is_found"), [(5, True), (115, True), (125, False)])
def test_only_recent_events_are_reasons(now: SimpleNamespace, age: int, is_found: bool) -> None:
    now.seconds = CREATED + age
    fresh = lease_body(replace(DRIVER, renewed=now.seconds))
    events = select([preemption("2026-11-30T19:10:10.000000Z")])
    with api_server({f"GET {OWN}/events": events, f"GET {LEASE}": (200, fresh)}) as server:
        manager = manager_of(server)
        # An event names only the pod, whose application and node were seen before.
        manager.held_executors(APPLICATION, 1)
        lost = manager.why_lost(APPLICATION, "gone", "node1")
    assert ("Preempted by pod x" in lost) is is_found


@pytest.mark.parametrize(
    ("status", "message", "remedy", "is_final"),
    [
        (403, "error looking up service account a/b", "executor.serviceAccountName", True),
        (403, 'violates PodSecurity "restricted:latest"', "securityContext", True),
        (403, "exceeded quota: gpus, requested: 2", "until other pods", False),
        (422, "spec.containers[0].image: Required value", "", True),
        (400, "admission webhook does not support dry run", None, False),
    ],
)
def test_pods_that_the_server_refuses(
    status: int, message: str, remedy: str | None, is_final: bool
) -> None:
    answer = {"kind": "Status", "reason": "Forbidden", "message": message}
    with api_server({f"POST {OWN}/pods": (status, answer)}) as server:
        problem = manager_of(server).find_refusal({"kind": "Pod"})
        assert server.requests[-1].query == {"dryRun": "All"}
    if remedy is None:
        assert problem is None
        return
    assert problem is not None and problem.is_final is is_final
    assert message in problem.details and remedy in problem.remedy
    with api_server({f"POST {OWN}/pods": (201, {"kind": "Pod"})}) as server:
        assert manager_of(server).find_refusal({"kind": "Pod"}) is None


def test_the_event_of_another_pod_of_the_node_is_no_reason(now: SimpleNamespace) -> None:
    now.seconds = CREATED + 5
    fresh = lease_body(replace(DRIVER, renewed=now.seconds))
    events = select([preemption("2026-11-30T19:10:10.000000Z")])
    with api_server({f"GET {OWN}/events": events, f"GET {LEASE}": (200, fresh)}) as server:
        manager = manager_of(server)
        manager.held_executors(APPLICATION, 1)

        def why_lost(number: int) -> str:
            container = f"recorded/train-1a2b3c-exec-{number}"
            return manager.why_lost(APPLICATION, "gone", "node1", container)

        assert "Preempted by pod x" in why_lost(2)
        assert why_lost(3) == "gone"


def test_a_server_that_does_not_answer_is_part_of_the_reason(now: SimpleNamespace) -> None:
    with api_server({f"GET {OWN}/events": single("forbidden")}) as server:
        lost = manager_of(server).why_lost(APPLICATION, "gone", "node1")
    assert lost.startswith("Kubernetes could not be asked about node1 (Kubernetes refuses: pods is")
    assert lost.endswith("; Spark says: gone")


@pytest.mark.parametrize(
    ("pod", "report"),
    [
        ((404, {"message": "gone"}), "LOST: its driver's pod driver was deleted"),
        (
            (200, {"status": {"phase": "Failed", "reason": "Evicted", "message": "memory"}}),
            "LOST: its driver's pod driver has ended: Evicted: memory",
        ),
        ((200, {"status": {"phase": "Running"}}), ""),
    ],
)
def test_an_application_ends_with_the_pod_of_its_driver(
    now: SimpleNamespace, pod: Reply, report: str
) -> None:
    inside = lease_body(replace(DRIVER, pod="driver"))
    answers = {f"GET {LEASE}": (200, inside), f"GET {OWN}/pods/driver": pod}
    with api_server(answers) as server:
        manager = manager_of(server)
        assert manager.end_of(APPLICATION) == report
        # A driver that reported its end is not looked for.
        ended = lease_body(replace(DRIVER, pod="driver", has_ended=True))
        server.answers[f"GET {LEASE}"] = (200, ended)
        assert manager.end_of(APPLICATION) == "FINISHED: (no reason is known)"


def test_an_application_runs_while_its_lease_is_renewed(now: SimpleNamespace) -> None:
    with api_server() as server:
        manager = manager_of(server)
        assert manager.report(APPLICATION) == ApplicationReport("RUNNING", "", False)
        assert manager.end_of(APPLICATION) == ""
        now.seconds = RENEWED + 90
        text = "its driver has not renewed its Lease for 90 s"
        assert manager.report(APPLICATION) == ApplicationReport("LOST", text, True)
        assert manager.end_of(APPLICATION) == f"LOST: {text}"


def test_an_application_without_a_lease_is_not_known() -> None:
    path = LEASE.replace(APPLICATION, OTHER_APPLICATION)
    with api_server({f"GET {path}": single("lease_absent")}) as server:
        manager = manager_of(server)
        with pytest.raises(HopsGpuError, match="the namespace recorded has no Lease"):
            manager.report(OTHER_APPLICATION)
        assert "could not be asked" in manager.why_lost(OTHER_APPLICATION, "", "node1")


def test_a_driver_that_has_reported_its_end_has_finished() -> None:
    ended = lease_body(replace(DRIVER, has_ended=True))
    with api_server({f"GET {LEASE}": (200, ended)}) as server:
        manager = manager_of(server)
        assert manager.report(APPLICATION) == ApplicationReport("FINISHED", "", True)
        assert "FINISHED" in manager.why_lost(APPLICATION, "exited", "node1")
        nothing = {"GET /api/v1/pods": (200, list_of([])), f"GET {LEASES}": (200, list_of([]))}
        server.answers.update(nothing)
        with pytest.raises(HopsGpuError, match=f"{APPLICATION} has ended: FINISHED"):
            manager.snapshot(APPLICATION, "alice")


def test_who_may_not_read_a_lease_does_not_take_it_for_an_end() -> None:
    with api_server({f"GET {LEASE}": single("forbidden")}) as server, pytest.raises(Forbidden):
        manager_of(server).report(APPLICATION)


@pytest.mark.parametrize("id_", ["app-1", "", "spark-a/../../nodes", "spark-a?b", "application_1"])
def test_another_id_is_not_asked_for(id_: str) -> None:
    with api_server() as server:
        manager = manager_of(server)
        assert manager.report(id_) is None and manager.end_of(id_) == ""
    assert server.requests == []


def test_applications_that_ended_since_a_time(now: SimpleNamespace) -> None:
    with api_server() as server:
        manager = manager_of(server)
        assert manager.ended_since(0.0) == {}
        now.seconds = RENEWED + 75
        (ended,) = manager.ended_since(RENEWED - 1).items()
        assert ended[0] == APPLICATION and ended[1].state == "LOST"
        assert manager.ended_since(RENEWED + 1) == {}
    assert server.requests[0].query["labelSelector"] == "hopsgpu/application"


def test_a_lease_is_created_once_and_then_replaced() -> None:
    answers = {f"POST {LEASES}": single("lease_created"), f"PUT {LEASE}": (200, {})}
    with api_server(answers) as server:
        manager = manager_of(server)
        manager.keep_lease(DRIVER)
        assert server.lines == [f"POST {LEASES}"]
        server.answers[f"POST {LEASES}"] = single("lease_conflict")
        manager.keep_lease(DRIVER)
    assert server.lines[1:] == [f"POST {LEASES}", f"GET {LEASE}", f"PUT {LEASE}"]
    (body,) = server.bodies("PUT", LEASE)
    assert (
        body["metadata"]["resourceVersion"]
        == (single("lease_created")[1]["metadata"]["resourceVersion"])
    )
    assert body["spec"]["renewTime"] == "2026-11-30T18:10:00.500000Z"


def test_a_lease_that_changed_meanwhile_is_an_error() -> None:
    answers = {f"POST {LEASES}": single("lease_conflict"), f"PUT {LEASE}": single("lease_stale")}
    with api_server(answers) as server, pytest.raises(ApiError, match="has been modified"):
        manager_of(server).keep_lease(DRIVER)


def test_who_may_not_create_a_lease_is_refused() -> None:
    with api_server({f"POST {LEASES}": single("forbidden")}) as server, pytest.raises(Forbidden):
        manager_of(server).keep_lease(DRIVER)


def test_leases_of_applications_that_ended_a_day_ago_are_removed(now: SimpleNamespace) -> None:
    with api_server({f"DELETE {LEASE}": single("lease_deleted")}) as server:
        manager = manager_of(server)
        now.seconds = RENEWED + 86000
        manager.remove_old_leases()
        assert f"DELETE {LEASE}" not in server.lines
        now.seconds = RENEWED + 86500
        manager.remove_old_leases()
        server.answers[f"DELETE {LEASE}"] = single("lease_absent")
        manager.remove_old_leases()
    assert server.lines.count(f"DELETE {LEASE}") == 2


def test_the_reason_of_an_end_is_known_after_the_pod_is_gone(
    now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = with_other_pod()
    pod["status"]["conditions"] = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
    ]
    gone = {f"GET {OWN}/pods": (200, list_of([])), f"GET {OWN}/events": (200, list_of([]))}
    ended = threading.Event()

    def changes(*_: object, **__: object) -> Iterator[tuple[str, dict[str, Any]]]:
        ended.set()
        yield "MODIFIED", pod

    with api_server(gone) as server:
        manager = manager_of(server)
        monkeypatch.setattr(manager._client, "watch", changes)
        manager.watch_executors(APPLICATION, ended)
        lost = manager.why_lost(APPLICATION, "exit code 143", pod["spec"]["nodeName"])
    assert lost.startswith("its pod was evicted, as by `kubectl drain`")
