"""Kubernetes as a cluster manager: an API server that lists nodes, pods, quotas and Leases."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hopsgpu.cluster_managers.kubernetes.amounts import ExactAmount, sum_exact
from hopsgpu.cluster_managers.kubernetes.api_client import SECONDS, ApiClient, ApiError, Forbidden
from hopsgpu.cluster_managers.kubernetes.application_leases import (
    APPLICATION_ID,
    KEPT_SECONDS,
    LABEL,
    ApplicationLease,
    lease_body,
    lease_name,
    lease_of,
    leases_of,
)
from hopsgpu.cluster_managers.kubernetes.credentials import ApiAccess
from hopsgpu.cluster_managers.kubernetes.kueue_queue import (
    KueueQueue,
    find_kueue_version,
    find_queue,
)
from hopsgpu.cluster_managers.kubernetes.lease_directory import LeaseQueueRoot
from hopsgpu.cluster_managers.kubernetes.limits import (
    largest_executor,
    namespace_limit,
    quota_limits,
)
from hopsgpu.cluster_managers.kubernetes.lost_pods import PodEvent, why_lost
from hopsgpu.cluster_managers.kubernetes.nodes import PRODUCT, NodeRules, devices_of, node_of
from hopsgpu.cluster_managers.kubernetes.permissions import Permission
from hopsgpu.cluster_managers.kubernetes.pod_problems import (
    find_problem,
    problem_of_events,
    refusal_of,
)
from hopsgpu.cluster_managers.kubernetes.pods import (
    APPLICATION,
    APPLICATION_NAME,
    EXECUTOR,
    PROFILE,
    ROLE,
    Pod,
    mapping_of,
    pod_of,
    seconds_of,
    text_of,
)
from hopsgpu.cluster_managers.kubernetes.submitted_drivers import PodDrivers, driver_end
from hopsgpu.cluster_managers.manager import ClusterManager, HeldExecutors, StartProblem
from hopsgpu.cluster_managers.node_gpu_list import NodeAnswers
from hopsgpu.cluster_managers.resources import NOTHING
from hopsgpu.cluster_managers.snapshot import App, Container, Node, Overview, Snapshot, User
from hopsgpu.core.run_record import ApplicationReport
from hopsgpu.errors import CapacityError, HopsGpuError

log = logging.getLogger(__name__)

_NODES, _PODS = "/api/v1/nodes", "/api/v1/pods"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
# A service account's name follows, as NAMESPACE:NAME.
_SERVICE_ACCOUNT = "system:serviceaccount:"
_LIVE = "status.phase!=Succeeded,status.phase!=Failed"
# Events that are older say nothing of an executor that was lost now.
_EVENT_SECONDS = 120.0
# Events that are older say nothing of an executor that does not start now.
_START_SECONDS = 60.0
# Number of pods whose application and node are remembered: events name only the pod.
_MAX_SEEN = 4096
# The time of one request that watches pods, and until the next one after an error.
_WATCH_SECONDS, _REWATCH_SECONDS = 60.0, 2.0
_FAILED_SCHEDULING = "FailedScheduling"
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _INVALID = 403, 404, 409, 422
# The kubelet ends a container this long after the signal; ranks have ended before.
_GRACE_SECONDS = 1


class KubernetesManager(ClusterManager):
    """A client of an API server, for the executors in one namespace; threads may share it.

    Args:
        rules: by which rules the scheduler chooses nodes for executors with GPUs.
        seconds: limits to connect, and to be answered.
    """

    def __init__(
        self,
        access: ApiAccess,
        *,
        gpu_resource: str,
        rules: NodeRules | None = None,
        seconds: tuple[float, float] = SECONDS,
    ) -> None:
        self._client = ApiClient(access, seconds)
        self._gpu_resource = gpu_resource
        self._rules = rules or NodeRules()
        self._lock = threading.Lock()
        # Whether the caller may list pods of all namespaces; None before it was tried.
        self._may_list_all: bool | None = None
        # Application and node of pods of executors, by their names.
        self._seen_pods: dict[str, tuple[str, str]] = {}
        # Why pods of executors end, by their names.
        self._ends: dict[str, PodEvent] = {}
        # Why and when Kueue has taken executors back, by application and node.
        self._evictions: dict[tuple[str, str], tuple[str, float]] = {}

    @property
    def title(self) -> str:
        return "Kubernetes"

    @property
    def cluster(self) -> str:
        return self._client.cluster

    @property
    def namespace(self) -> str:
        return self._client.namespace

    @property
    def gpu_resource(self) -> str:
        return self._gpu_resource

    @property
    def rules(self) -> NodeRules:
        return self._rules

    @property
    def pages(self) -> str:
        """Return "": the API server has no pages for people."""
        return ""

    def application_page(self, application_id: str) -> str:
        return ""

    def nodes(self) -> tuple[Node, ...]:
        pods, _ = self._pods()
        return self._nodes_with(pods)

    def devices(self, nodes: Sequence[Node]) -> NodeAnswers:
        """Return what the nodes' labels tell of their GPUs."""
        by_name = {
            text_of(mapping_of(n, "metadata"), "name"): n for n in self._client.items(_NODES)
        }
        devices = {
            node.id: devices_of(by_name[node.id], node.total.gpus)
            for node in nodes
            if node.id in by_name
        }
        return NodeAnswers(devices, {})

    def snapshot(self, application_id: str, user: str) -> Snapshot:
        """Return a snapshot of what determines the resources of an application.

        Raises:
            HopsGpuError: there is no answer, or no running application has this ID.
        """
        snapshot = self._snapshot(application_id, user)
        is_shown = any(app.id == application_id for app in snapshot.applications)
        if application_id and not is_shown:
            report = self._require(application_id).report(time.time())
            raise HopsGpuError(f"{application_id} has ended: {report.state}")
        return snapshot

    def _snapshot(self, application_id: str, user: str) -> Snapshot:
        pods, problems = self._pods()
        nodes = self._nodes_with(pods)
        running = [node.total for node in nodes if node.state == "RUNNING"]
        largest = NOTHING
        for size in running:
            largest = largest.max_with(size)
        ranges = list(self._client.items(self._path("limitranges")))
        largest = largest_executor(ranges, largest, self._gpu_resource)
        quotas = list(self._client.items(self._path("resourcequotas")))
        limits = quota_limits(quotas, self._gpu_resource, largest)
        return Snapshot(
            application_id=application_id,
            partition="",
            nodes=nodes,
            queues=limits or (namespace_limit(self.namespace, largest),),
            user=User(user),
            applications=self._applications(pods),
            problems=problems,
        )

    def overview(self, user: str) -> Overview:
        snapshot = self._snapshot("", user)
        pods, _ = self._pods()
        containers: dict[str, list[Container]] = {}
        for pod in pods:
            if pod.is_granted and pod.requests.gpus:
                container = Container(pod.node, pod.id, pod.requests.round_up(), pod.created)
                containers.setdefault(_group_of(pod), []).append(container)
        return Overview(
            nodes=snapshot.nodes,
            queues={},
            user_snapshots={"": (snapshot,)},
            applications=snapshot.applications,
            containers={app: tuple(listed) for app, listed in containers.items()},
            acls=False,
            problems=snapshot.problems,
        )

    def caller(self) -> str:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self._client.create(_SELF_REVIEWS, body)
        user = mapping_of(mapping_of(answer, "status"), "userInfo")
        return text_of(user, "username").removeprefix(_SERVICE_ACCOUNT)

    def queue_root(self, partitions: Collection[str]) -> LeaseQueueRoot:
        """Return the queues of gangs in Leases of the namespace."""
        path = _LEASES.format(quote(self.namespace))
        return LeaseQueueRoot(self._client, path, partitions, self.caller)

    def check_submission(self) -> None:
        """Check that the API server answers, and lets the caller create pods in the namespace."""
        if not self.is_allowed(Permission("create", "pods")):
            raise CapacityError(
                f"{self.caller()} may not create pods in the namespace {self.namespace}:"
                " spark.kubernetes.namespace names another one, or an administrator gives the role"
                " of docs/kubernetes.md. For a driver in cluster mode,"
                " spark.kubernetes.authenticate.driver.serviceAccountName names the service account"
            )

    def is_allowed(self, permission: Permission) -> bool:
        """Return whether the caller has a permission."""
        attributes = {
            "verb": permission.verb,
            "group": permission.group,
            "resource": permission.resource,
            "subresource": permission.subresource,
            "namespace": "" if permission.is_of_cluster else self.namespace,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self._client.create(_ACCESS_REVIEWS, body)
        return mapping_of(answer, "status").get("allowed") is True

    def submitted_drivers(self) -> PodDrivers:
        return PodDrivers(self._client, self._gpu_resource)

    def held_executors(self, application_id: str, profile_id: int) -> HeldExecutors:
        pods = [pod for pod in self._executors_of(application_id, profile_id) if not pod.has_ended]
        if not pods:
            self._require(application_id)
        return HeldExecutors(
            {pod.id: pod.node for pod in pods if pod.is_granted},
            pending=sum(not pod.is_granted for pod in pods),
        )

    def watch_executors(self, application_id: str, ended: threading.Event) -> None:
        """Remember why executors' pods end, until an event is set.

        A pod that is evicted names the reason only while it ends, which takes a second.
        """
        selector = f"{APPLICATION}={application_id},{ROLE}=executor"
        while not ended.is_set():
            try:
                changes = self._client.watch(
                    self._path("pods"), _WATCH_SECONDS, labelSelector=selector
                )
                for _, answer in changes:
                    self._remember(application_id, pod_of(answer, self._gpu_resource))
                    if ended.is_set():
                        return
            except HopsGpuError as error:
                log.info("the pods of %s are not watched: %s", application_id, error)
                ended.wait(_REWATCH_SECONDS)

    def _remember(self, application_id: str, pod: Pod) -> None:
        with self._lock:
            self._seen_pods[pod.name] = (application_id, pod.node)
            if pod.end[0]:
                self._ends[pod.name] = PodEvent(pod.name, *pod.end, time.time())
            for name in list(self._seen_pods)[:-_MAX_SEEN]:
                del self._seen_pods[name]
                self._ends.pop(name, None)

    def find_start_problem(self, application_id: str, profile_id: int) -> StartProblem | None:
        pods = self._executors_of(application_id, profile_id)
        problem = find_problem(pods)
        if problem is not None or (pods and all(pod.phase == "Running" for pod in pods)):
            return problem
        # Spark deletes pods that have failed, so only events about them remain. A pod that is there
        # says itself whether the scheduler finds no node.
        present = {pod.name for pod in pods}
        events = [
            event
            for event in self._events()
            if self._seen_pods.get(event.pod, ("", ""))[0] == application_id
            and event.pod not in present
            and event.reason != _FAILED_SCHEDULING
        ]
        return problem_of_events(events, time.time() - _START_SECONDS)

    def has_executors(self, application_id: str, profile_id: int) -> bool:
        """Return whether any pod of a resource profile exists, whatever its state."""
        return bool(self._executors_of(application_id, profile_id))

    def find_refusal(self, pod: Mapping[str, Any]) -> StartProblem | None:
        """Return why the API server would refuse to create a pod; None if it would create it.

        No pod is created. Spark creates pods again and again, and logs only that it cannot.
        """
        try:
            self._client.create(self._path("pods"), pod, dryRun="All")
        except ApiError as error:
            if error.status in (_FORBIDDEN, _INVALID):
                return refusal_of(str(error))
            # An admission webhook may accept no such requests.
            log.info("whether pods can be created is unknown: %s", error)
        return None

    def delete_executors(self, application_id: str, executors: Collection[str]) -> None:
        """Delete the pods of executors, whose containers have a second to end.

        Args:
            executors: Spark's IDs of the executors.
        """
        self._delete_pods(_executor_selector(application_id, executors))

    def delete_profile(self, application_id: str, profile_id: int) -> None:
        """Delete all pods of a resource profile, also those that have not started or have ended."""
        selector = f"{APPLICATION}={application_id},{ROLE}=executor,{PROFILE}={profile_id}"
        self._delete_pods(selector)

    def _delete_pods(self, selector: str) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions"}
        self._client.delete(
            self._path("pods"),
            {**options, "gracePeriodSeconds": _GRACE_SECONDS},
            labelSelector=selector,
        )

    def record_eviction(self, application_id: str, executors: Collection[str], why: str) -> None:
        """Remember why executors are lost that hopsgpu ends for Kueue."""
        pods = self._pods_of(_executor_selector(application_id, executors))
        with self._lock:
            self._evictions |= {(application_id, pod.node): (why, time.time()) for pod in pods}

    def remove_pod(self, name: str) -> None:
        """Remove a pod from the API server without its kubelet's confirmation."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        try:
            self._client.delete(f"{self._path('pods')}/{quote(name)}", options)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise

    def are_gpus_ending(self) -> bool:
        """Return False: a pod is listed until the kubelet has ended its containers."""
        return False

    def why_lost(self, application_id: str, reason: str, host: str, container_id: str = "") -> str:
        lost = container_id.rpartition("/")[2]
        try:
            if end := self.end_of(application_id):
                return f"the application has ended, and its executors with it: {end}"
            pods = [
                pod
                for pod in self._pods_of(f"{APPLICATION}={application_id}")
                if pod.node == host and lost in ("", pod.name)
            ]
            events = self._events()
            with self._lock:
                events = [
                    event
                    for event in (*self._ends.values(), *events)
                    if event.pod == lost
                    or (not lost and self._seen_pods.get(event.pod) == (application_id, host))
                ]
                eviction, evicted_at = self._evictions.get((application_id, host), ("", 0.0))
            since = time.time() - _EVENT_SECONDS
            if evicted_at >= since:
                return eviction
            cause = why_lost(host, pods, events, self._nodes_with(()), since)
        except HopsGpuError as error:
            cause = f"Kubernetes could not be asked about {host} ({error})"
        return "; Spark says: ".join(filter(None, (cause, reason)))

    def end_of(self, application_id: str) -> str:
        report = self.report(application_id)
        if report is None or not report.has_ended:
            return ""
        return f"{report.state}: {report.diagnostics or '(no reason is known)'}"

    def report(self, application_id: str) -> ApplicationReport | None:
        """Return the state of an application by its Lease, which its driver renews."""
        if not APPLICATION_ID.fullmatch(application_id):
            return None
        lease = self._require(application_id)
        return self._end_of_pod(lease) or lease.report(time.time())

    def _end_of_pod(self, lease: ApplicationLease) -> ApplicationReport | None:
        """Return the end of a driver's pod that reported none; None if there was no such end."""
        if lease.has_ended or not lease.pod:
            return None
        try:
            answer = self._client.get(f"{self._path('pods')}/{quote(lease.pod)}")
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            return ApplicationReport("LOST", f"its driver's pod {lease.pod} was deleted", True)
        pod = pod_of(answer, self._gpu_resource)
        if not pod.has_ended:
            return None
        reason = driver_end(pod) or "no reason given"
        return ApplicationReport("LOST", f"its driver's pod {lease.pod} has ended: {reason}", True)

    def _require(self, application_id: str) -> ApplicationLease:
        """Return the Lease of an application.

        Raises:
            HopsGpuError: it has none.
        """
        lease = self._lease(application_id)
        if lease is None:
            raise HopsGpuError(
                f"the namespace {self.namespace} has no Lease of {application_id}: the application"
                " is of another namespace, or ended more than a day ago"
            )
        return lease

    def ended_since(self, time_: float) -> Mapping[str, ApplicationReport]:
        now = time.time()
        return {
            lease.id: lease.report(now)
            for lease in self._leases().values()
            if not lease.is_running(now) and lease.renewed >= time_
        }

    def keep_lease(self, application: ApplicationLease) -> None:
        """Create or renew the Lease of an application."""
        path = _LEASES.format(quote(self.namespace))
        try:
            self._client.create(path, lease_body(application))
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            present = self._client.get(f"{path}/{lease_name(application.id)}")
            version = text_of(mapping_of(present, "metadata"), "resourceVersion")
            body = lease_body(application, version)
            self._client.replace(f"{path}/{lease_name(application.id)}", body)

    def remove_old_leases(self) -> None:
        """Remove the Leases of applications that ended a day ago."""
        now = time.time()
        for lease in self._leases().values():
            if not lease.is_running(now) and abs(now - lease.renewed) > KEPT_SECONDS:
                path = f"{_LEASES.format(quote(self.namespace))}/{lease_name(lease.id)}"
                try:
                    self._client.delete(path)
                except ApiError as error:
                    # Another driver may have removed it.
                    if error.status != _NOT_FOUND:
                        raise

    def has_kueue(self) -> bool:
        """Return whether Kueue is installed."""
        return find_kueue_version(self._client) is not None

    def kueue_queue(self, chosen: str) -> KueueQueue | None:
        """Return the LocalQueue of Kueue that admits gangs; None if gangs need none.

        Raises:
            ConfigError: the chosen one does not exist, or there are several and none is chosen.
        """
        return find_queue(self._client, chosen)

    def remove_old_workloads(self, queue: KueueQueue) -> None:
        """Remove the Workloads of applications that have ended or are lost."""
        # List Leases last: an application has its Lease before it creates a Workload.
        workloads, now = list(queue.workloads()), time.time()
        leases = self._leases() if workloads else {}
        for workload in workloads:
            lease = leases.get(workload.application)
            is_running = lease is not None and lease.is_running(now)
            # Where the API server was away, no driver could renew its Lease, and executors go on.
            if not is_running and not self._has_granted_executors(workload.application):
                log.info("removes the Workload %s, whose application has ended", workload.name)
                queue.delete(workload)

    def _has_granted_executors(self, application_id: str) -> bool:
        pods = self._pods_of(f"{APPLICATION}={application_id},{ROLE}=executor")
        return any(pod.is_granted for pod in pods)

    def products_of(self, hosts: Collection[str]) -> tuple[str, ...]:
        """Return the types of GPUs of nodes, by their labels."""
        names = set()
        for node in self._client.items(_NODES):
            metadata = mapping_of(node, "metadata")
            if text_of(metadata, "name") in hosts:
                names.add(text_of(mapping_of(metadata, "labels"), PRODUCT))
        return tuple(sorted(names - {""}))

    def pod_reference(self, name: str) -> dict[str, Any]:
        """Return a reference to a pod of the namespace, for objects that go with the pod."""
        answer = self._client.get(f"{self._path('pods')}/{quote(name)}")
        uid = text_of(mapping_of(answer, "metadata"), "uid")
        return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}

    def quotas(self) -> list[Mapping[str, Any]]:
        """Return the quotas of the namespace, as the API server lists them."""
        return list(self._client.items(self._path("resourcequotas")))

    def version(self) -> str:
        """Return the version of the API server, such as "v1.34.4"."""
        return text_of(self._client.get("/version"), "gitVersion")

    def _path(self, resource: str) -> str:
        return f"/api/v1/namespaces/{quote(self.namespace)}/{resource}"

    def _nodes_with(self, pods: Iterable[Pod]) -> tuple[Node, ...]:
        requests: dict[str, list[ExactAmount]] = {}
        for pod in pods:
            if pod.is_granted:
                requests.setdefault(pod.node, []).append(pod.requests)
        nodes = []
        for answer in self._client.items(_NODES):
            name = text_of(mapping_of(answer, "metadata"), "name")
            used = sum_exact(requests.get(name, ()))
            nodes.append(node_of(answer, self._gpu_resource, used, self._rules))
        return tuple(nodes)

    def _pods(self) -> tuple[tuple[Pod, ...], tuple[str, ...]]:
        """Return the pods that have not ended, of all namespaces if the caller may list them."""
        if self._may_list_all is not False:
            try:
                pods = tuple(
                    pod_of(answer, self._gpu_resource)
                    for answer in self._client.items(_PODS, fieldSelector=_LIVE)
                )
            except Forbidden as error:
                if error.status != _FORBIDDEN:
                    raise
                log.info("pods of other namespaces are not visible: %s", error)
            else:
                self._may_list_all = True
                return pods, ()
        self._may_list_all = False
        path = self._path("pods")
        pods_here = tuple(
            pod_of(answer, self._gpu_resource)
            for answer in self._client.items(path, fieldSelector=_LIVE)
        )
        problem = (
            f"hopsgpu sees only the pods of the namespace {self.namespace}, so nodes may have less"
            " free than it takes for free: docs/kubernetes.md has the ClusterRole"
        )
        return pods_here, (problem,)

    def _executors_of(self, application_id: str, profile_id: int) -> list[Pod]:
        selector = f"{APPLICATION}={application_id},{ROLE}=executor,{PROFILE}={profile_id}"
        pods = self._pods_of(selector)
        for pod in pods:
            self._remember(application_id, pod)
        return pods

    def _pods_of(self, selector: str) -> list[Pod]:
        answers = self._client.items(self._path("pods"), labelSelector=selector)
        return [pod_of(answer, self._gpu_resource) for answer in answers]

    def _events(self) -> list[PodEvent]:
        """Return the events about pods of the namespace, which do not name their applications."""
        events = []
        for answer in self._client.items(
            self._path("events"), fieldSelector="involvedObject.kind=Pod"
        ):
            series = mapping_of(answer, "series")
            times = [answer.get("lastTimestamp"), answer.get("eventTime")]
            times.append(series.get("lastObservedTime"))
            about = mapping_of(answer, "involvedObject")
            events.append(
                PodEvent(
                    text_of(about, "name"),
                    text_of(answer, "reason"),
                    text_of(answer, "message"),
                    max(map(seconds_of, times)),
                )
            )
        return events

    def _lease(self, application_id: str) -> ApplicationLease | None:
        path = f"{_LEASES.format(quote(self.namespace))}/{lease_name(application_id)}"
        try:
            return lease_of(self._client.get(path))
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def _leases(self) -> dict[str, ApplicationLease]:
        path = _LEASES.format(quote(self.namespace))
        return leases_of(self._client.items(path, labelSelector=LABEL))

    def _applications(self, pods: Sequence[Pod]) -> tuple[App, ...]:
        """Return what has pods, and Spark applications that have none yet."""
        now, leases = time.time(), self._leases()
        by_group: dict[str, list[Pod]] = {
            lease.id: [] for lease in leases.values() if lease.is_running(now)
        }
        for pod in pods:
            if pod.is_granted:
                by_group.setdefault(_group_of(pod), []).append(pod)
        return tuple(_app(group, listed, leases.get(group)) for group, listed in by_group.items())


def _executor_selector(application_id: str, executors: Collection[str]) -> str:
    names = ",".join(sorted(executors))
    return f"{APPLICATION}={application_id},{ROLE}=executor,{EXECUTOR} in ({names})"


def _group_of(pod: Pod) -> str:
    """Return what a pod belongs to: its Spark application, else its owner, else itself."""
    return pod.application or f"{pod.namespace}/{pod.owner or pod.name}"


def _app(group: str, pods: Sequence[Pod], lease: ApplicationLease | None) -> App:
    used = sum_exact(pod.requests for pod in pods).round_up()
    started = min((pod.created for pod in pods), default=0.0)
    if lease is not None:
        return App(group, lease.name, lease.user, "", used, lease.started, len(pods))
    first = pods[0]
    name = first.labels.get(APPLICATION_NAME) or first.owner or first.name
    return App(group, name, f"namespace {first.namespace}", "", used, started, len(pods))
