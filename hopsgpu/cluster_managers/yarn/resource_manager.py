"""The ResourceManager's REST interface.

Source of paths and fields: the Hadoop documentation, "ResourceManager REST API's".
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from hopsgpu.cluster_managers.http_client import (
    NoAccess,
    NoAnswer,
    NotUnderstood,
    is_kerberos_required,
)
from hopsgpu.cluster_managers.manager import HeldExecutors
from hopsgpu.cluster_managers.resources import NOTHING, Amount, total
from hopsgpu.cluster_managers.snapshot import App, Node, Overview, Queue, Rounding, Snapshot, User
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE, amount_of
from hopsgpu.cluster_managers.yarn.answer_lists import FieldTrail
from hopsgpu.cluster_managers.yarn.application_state import (
    ENDED,
    ApplicationState,
    application_state_of,
)
from hopsgpu.cluster_managers.yarn.queues import chain_of, preemptable_amount
from hopsgpu.cluster_managers.yarn.rest_answers import (
    FAIR_PREEMPTION,
    INCREMENTS,
    MINIMUMS,
    Containers,
    app_answer,
    apps_of,
    containers_of,
    gpu_apps,
    master_of,
    nodes_of,
    queues_of,
    rounding_of,
    shared_partitions,
    unreported_apps,
    user_of,
)
from hopsgpu.cluster_managers.yarn.rest_client import (
    RESOURCE_MANAGER,
    get_json,
    put_json,
    scheme_of,
)
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.kerberos import has_keytab

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Timeouts of connection and answer.
_SECONDS = (3.0, 10.0)
_KILL_SECONDS = (3.0, 5.0)
# Largest number of applications whose containers are requested, because only these show GPUs.
_MAX_ASKED = 8
# The same limit for applications with GPUs in the overview.
_MAX_DETAILED = 64
_MAX_THREADS = 8
_APPS = "/ws/v1/cluster/apps?states=RUNNING&deSelects=resourceRequests,timeouts"
_SCHEDULER = "/ws/v1/cluster/scheduler"


def web_addresses(setting: Callable[[str], str | None]) -> tuple[str, ...]:
    """Return the base URLs of the ResourceManagers' web addresses, from Hadoop's configuration."""
    scheme = scheme_of(setting)
    secure = scheme == "https"
    name = "yarn.resourcemanager.webapp" + (".https.address" if secure else ".address")
    ids = []
    if (setting("yarn.resourcemanager.ha.enabled") or "").lower() == "true":
        ids = [i.strip() for i in (setting("yarn.resourcemanager.ha.rm-ids") or "").split(",")]
    suffixes = [f".{i}" for i in ids if i] or [""]
    addresses = [a for suffix in suffixes if (a := _web_address(setting, name, suffix, secure))]
    return tuple(f"{scheme}://{address}" for address in addresses)


def check_driver_credentials(
    manager: ResourceManager, setting: Callable[[str], str | None]
) -> None:
    """Refuse a driver in YARN that cannot use the ResourceManager.

    Raises:
        ConfigError: the ResourceManager requires Kerberos, and the application has no keytab.
    """
    if has_keytab(setting):
        return
    for address in manager.addresses:
        try:
            required = is_kerberos_required(address + RESOURCE_MANAGER.info, _SECONDS)
        except NoAnswer:
            continue
        if required:
            raise ConfigError(
                f"{address} requires Kerberos, and a driver in YARN has no ticket: give --principal"
                " and --keytab (spark.kerberos.principal, spark.kerberos.keytab), or use"
                " --deploy-mode client"
            )


def _web_address(
    setting: Callable[[str], str | None], name: str, suffix: str, secure: bool
) -> str | None:
    # Hadoop's own default is "${yarn.resourcemanager.hostname}:8088", unresolved with HA.
    address = setting(name + suffix)
    if address and "${" not in address:
        return address
    host = setting("yarn.resourcemanager.hostname" + suffix)
    return f"{host}:{8090 if secure else 8088}" if host else None


def _is_fair(scheduler: Any) -> bool:
    return bool(scheduler["scheduler"]["schedulerInfo"]["type"] == "fairScheduler")


def _check_form(
    read: Callable[Concatenate[ResourceManager, P], T],
) -> Callable[Concatenate[ResourceManager, P], T]:
    """Make a method raise `NotUnderstood` for an answer in an unknown form."""

    @functools.wraps(read)
    def wrapper(self: ResourceManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.check_form():
            return read(self, *args, **kwargs)

    return wrapper


class ResourceManager:
    """A client of the ResourceManager, or of the active one of several.

    Args:
        seconds: limits to connect to an address, and to be answered.
        gpu_resource: name of the resource that counts GPUs.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        seconds: tuple[float, float] = _SECONDS,
        gpu_resource: str = DEFAULT_GPU_RESOURCE,
    ) -> None:
        self.addresses = addresses
        self.gpu_resource = gpu_resource
        self._seconds = seconds
        self._rounding_cache: Rounding | None = None
        self._is_fair_preempting: bool | None = None
        # Address of the active one of several. It is asked first, so that requests do not wait for
        # a host that is down.
        self._active_address: str | None = None
        self._trail = FieldTrail()

    @contextlib.contextmanager
    def check_form(self) -> Iterator[None]:
        """Raise an error that names field, address and version if an answer cannot be read.

        Raises:
            NotUnderstood: this Hadoop, a proxy or another service answered in an unknown form.
        """
        try:
            yield
        except HopsGpuError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._not_understood(error) from error

    def _not_understood(self, error: Exception) -> NotUnderstood:
        reason = RESOURCE_MANAGER.misread(error, self._trail, _SECONDS)
        return NotUnderstood(
            f"{reason}. Is yarn.resourcemanager.webapp.address that of a ResourceManager? hopsgpu"
            " supports Hadoop 3.3 to 3.5"
        )

    def _optional(self, problems: list[str], what: str, read: Callable[[], T], default: T) -> T:
        """Return a value of an answer, or a default if the answer is not understood.

        Args:
            problems: gets a warning if the answer is not understood.
            what: what is then missing, in words.
        """
        try:
            with self.check_form():
                return read()
        except NotUnderstood as error:
            problems.append(f"hopsgpu continues without {what}: {error}")
            log.warning("%s", problems[-1])
            return default

    @_check_form
    def nodes(self) -> tuple[Node, ...]:
        return nodes_of(self.ask("/ws/v1/cluster/nodes"), self.gpu_resource)

    @_check_form
    def snapshot(self, application_id: str, user: str, partition: str | None = None) -> Snapshot:
        """Return a snapshot of what determines the resources of an application.

        A CapacityScheduler gets three requests, two more the first time, and one more if nodes have
        labels. Under a FairScheduler, applications do not report their GPUs, so the containers of
        some applications are requested one by one.

        Args:
            application_id: our application's id; it must be running.
            partition: the node label that is asked for; None for the application's own.

        Raises:
            HopsGpuError: there is no answer, or the application does not run.
        """
        apps = self.ask(_APPS)
        app = app_answer(apps, application_id)
        if app is None:
            raise HopsGpuError(
                f"the ResourceManager does not list {application_id} among the running"
                " applications: has it ended, or is HADOOP_CONF_DIR that of another cluster?"
            )
        scheduler = self.ask(_SCHEDULER)
        nodes = self.nodes()
        label = (app.get("appNodeLabelExpression") or "") if partition is None else partition
        problems: list[str] = []
        shared: frozenset[str] = self._optional(
            problems,
            "the idle nodes of shared labels",
            lambda: self._shared_partitions(nodes, label),
            frozenset(),
        )
        queues = queues_of(scheduler, label, nodes, self.gpu_resource)
        chain = chain_of(queues, app["queue"])
        containers: Mapping[str, Containers] = self._optional(
            problems,
            "the containers of applications that do not report their GPUs",
            lambda: self._containers_of(
                unreported_apps(apps, application_id, _MAX_ASKED, self.gpu_resource)
            ),
            {},
        )
        applications: tuple[App, ...] = self._optional(
            problems,
            "what other applications have",
            lambda: apps_of(apps, shared | {label}, containers, self.gpu_resource),
            (),
        )
        master = self._optional(
            problems,
            "the size of its application master",
            lambda: master_of(app, containers.get(application_id, ()), self.gpu_resource),
            None,
        )
        return replace(
            self._user_snapshot(scheduler, nodes, chain, user, label, shared, problems),
            application_id=application_id,
            applications=applications,
            master=master,
            preemptable=self._preemptable(scheduler, queues, chain[0].path),
            problems=tuple(problems),
        )

    def _user_snapshot(
        self,
        scheduler: Any,
        nodes: tuple[Node, ...],
        chain: tuple[Queue, ...],
        user: str,
        label: str,
        shared: frozenset[str],
        problems: list[str],
    ) -> Snapshot:
        """Return a snapshot for a user in a leaf queue, without an application."""
        partition_total = total(
            n.total for n in nodes if n.state == "RUNNING" and n.partition == label
        )
        rounding = self._rounding(scheduler)
        share = self._optional(
            problems,
            f"the limit of user {user} in queue {chain[0].path}",
            lambda: user_of(
                scheduler,
                chain[0],
                user,
                label,
                partition_total,
                rounding.smallest,
                self.gpu_resource,
            ),
            User(user),
        )
        return Snapshot(
            application_id="",
            partition=label,
            nodes=nodes,
            queues=chain,
            user=share,
            shared=shared,
            rounding=rounding,
        )

    @_check_form
    def overview(self, user: str) -> Overview:
        """Return the nodes, queues and applications, with a snapshot for the user in each queue.

        In addition to the requests of a snapshot, there is one for each application with GPUs, up
        to a limit.

        Raises:
            HopsGpuError: there is no answer.
        """
        apps, scheduler, nodes = self.ask(_APPS), self.ask(_SCHEDULER), self.nodes()
        labels = {node.partition for node in nodes if node.total.gpus} or {""}
        shared = self._shared_partitions(nodes, "")
        if shared & labels:
            labels.add("")
        queues = {
            label: queues_of(scheduler, label, nodes, self.gpu_resource) for label in sorted(labels)
        }
        problems: list[str] = []

        def user_snapshot(queue: Queue, label: str) -> Snapshot:
            chain = chain_of(queues[label], queue.path)
            shared_by_label = frozenset() if label else shared
            return self._user_snapshot(
                scheduler, nodes, chain, user, label, shared_by_label, problems
            )

        everywhere = frozenset(node.partition for node in nodes) | {""}
        containers = self._containers_of(
            gpu_apps(apps, everywhere, _MAX_DETAILED, self.gpu_resource)
        )
        return Overview(
            nodes=nodes,
            queues=queues,
            user_snapshots={
                label: tuple(user_snapshot(queue, label) for queue in listed if queue.is_leaf)
                for label, listed in queues.items()
            },
            applications=apps_of(apps, everywhere, containers, self.gpu_resource),
            containers=containers,
            acls=self._acls(),
            problems=tuple(dict.fromkeys(problems)),
        )

    @_check_form
    def user(self) -> str | None:
        """Return the user that the ResourceManager takes the caller for; None if not reported."""
        try:
            answer = self.ask("/ws/v1/cluster/userinfo")
        except HopsGpuError:  # Hadoop before 3.3 has no such path
            return None
        # The documentation wraps the answer in an object of this name; Hadoop 3.5 does not.
        return answer.get("clusterUserInfo", answer).get("requestedUser") or None

    @_check_form
    def queues(self) -> tuple[Queue, ...]:
        """Return all queues, each parent before its children, for nodes without a label."""
        return queues_of(self.ask(_SCHEDULER), "", self.nodes(), self.gpu_resource)

    def _containers_of(self, attempts: Mapping[str, str]) -> dict[str, Containers]:
        """Return the containers of applications, by ID, as far as YARN shows them."""
        containers = {}

        def ask(application_id: str, attempt: str) -> None:
            path = f"/ws/v1/cluster/apps/{application_id}/appattempts/{attempt}/containers"
            try:
                with self.check_form():
                    containers[application_id] = containers_of(self.ask(path), self.gpu_resource)
            except HopsGpuError as error:
                log.info("the containers of %s are unknown: %s", application_id, error)

        if attempts:
            with ThreadPoolExecutor(_MAX_THREADS, "hopsgpu-containers") as pool:
                list(pool.map(ask, *zip(*attempts.items(), strict=True)))
        return containers

    def _shared_partitions(self, nodes: tuple[Node, ...], label: str) -> frozenset[str]:
        # Only requests without a label may use idle nodes of shared labels.
        if label or not any(node.partition for node in nodes):
            return frozenset()
        return shared_partitions(self.ask("/ws/v1/cluster/get-node-labels"))

    def _rounding(self, scheduler: Any) -> Rounding:
        """Return the rounding, which is constant while YARN runs."""
        if self._rounding_cache is None:
            is_fair = _is_fair(scheduler)
            names = MINIMUMS + INCREMENTS if is_fair else MINIMUMS
            self._rounding_cache = rounding_of(
                {name: self._read_number(name) for name in names}, is_fair
            )
        return self._rounding_cache

    def _preemptable(self, scheduler: Any, queues: tuple[Queue, ...], path: str) -> Amount:
        """Return what YARN may take from other queues for the one of a path."""
        if _is_fair(scheduler):
            if self._is_fair_preempting is None:
                self._is_fair_preempting = self._property(FAIR_PREEMPTION) == "true"
            if not self._is_fair_preempting:
                return NOTHING
        return preemptable_amount(queues, path)

    def _acls(self) -> bool | None:
        value = self._property("yarn.acl.enable")
        return None if value is None else value == "true"

    def _read_number(self, name: str) -> int | None:
        value = self._property(name)
        try:
            return None if value is None else int(value)
        except ValueError:
            return None

    def _property(self, name: str) -> str | None:
        try:
            return str(self.ask(f"/conf?name={name}")["property"]["value"])
        except (HopsGpuError, LookupError, TypeError) as error:
            log.info("the ResourceManager does not report %s: %s", name, error)
            return None

    def gpus(self) -> tuple[int, int]:
        """Return the (used, total) GPUs of the running nodes."""
        running = [node for node in self.nodes() if node.state == "RUNNING"]
        return sum(n.used.gpus for n in running), sum(n.total.gpus for n in running)

    @_check_form
    def gpus_ending(self) -> int:
        """Return the number of GPUs that the scheduler has released but their nodes have not.

        YARN can grant these GPUs again once the nodes have reported the end of the containers. The
        number is for the whole cluster and all users. It is 0 under a FairScheduler, which does not
        report it.
        """
        metrics = self.ask("/ws/v1/cluster/metrics")["clusterMetrics"]
        used = metrics.get("totalUsedResourcesAcrossPartition")
        if not used:
            return 0
        scheduled = amount_of(used, self.gpu_resource)
        return max(self.gpus()[0] - scheduled.gpus, 0)

    @_check_form
    def held_containers(self, application_id: str, priority: int) -> HeldExecutors:
        """Return an application's containers of a priority; Spark's is the profile's ID."""
        app = self._app(application_id)
        attempts = self.ask(f"/ws/v1/cluster/apps/{application_id}/appattempts")
        attempt = attempts["appAttempts"]["appAttempt"][-1]["appAttemptId"]
        listed = self.ask(f"/ws/v1/cluster/apps/{application_id}/appattempts/{attempt}/containers")
        # YARN lists a request for its host, its rack and any place ("*"): count it once.
        pending = sum(
            int(request["numContainers"])
            for request in app.get("resourceRequests", [])
            if request["priority"] == priority and request["resourceName"] == "*"
        )
        containers = {
            c["containerId"]: c["assignedNodeId"].partition(":")[0]
            for c in listed.get("container", [])
            if int(c["priority"]) == priority
        }
        return HeldExecutors(containers, pending)

    @_check_form
    def end_of(self, application_id: str) -> str:
        """Return the final state and diagnostics of an application; "" while it runs."""
        app = self._app(application_id)
        if app["state"] not in ENDED:
            return ""
        return " ".join(f"{app['state']}: {app.get('diagnostics') or '(no diagnostics)'}".split())

    @_check_form
    def application_state(self, application_id: str) -> ApplicationState:
        return self._state_of(self._app(application_id))

    @_check_form
    def ended_since(self, time: float) -> tuple[ApplicationState, ...]:
        """Return the applications that have ended since a time, in seconds since the epoch."""
        ended = ",".join(ENDED)
        listed = self.ask(
            f"/ws/v1/cluster/apps?states={ended}&finishedTimeBegin={max(int(time * 1000), 0)}"
            "&deSelects=resourceRequests,timeouts"
        )
        return tuple(map(self._state_of, (listed.get("apps") or {}).get("app") or []))

    @_check_form
    def find_by_tag(self, tag: str) -> ApplicationState | None:
        """Return the application with a tag (`spark.yarn.tags`), or None."""
        listed = self.ask(f"/ws/v1/cluster/apps?applicationTags={quote(tag)}")
        apps = (listed.get("apps") or {}).get("app") or [None]
        return None if apps[0] is None else self._state_of(apps[0])

    def kill(self, application_id: str, user: str) -> None:
        """Make YARN end an application.

        Args:
            user: the application's owner; without Kerberos, YARN trusts this name.

        Raises:
            HopsGpuError: none of the addresses accepts the request; the message says why.
        """
        path = f"/ws/v1/cluster/apps/{application_id}/state?user.name={quote(user)}"
        refused = []
        for address in self.addresses:
            try:
                put_json(address + path, {"state": "KILLED"}, _KILL_SECONDS)
            except HopsGpuError as error:
                log.info("%s does not kill %s: %s", address, application_id, error)
                refused.append(f"{address}: {error}")
            else:
                log.info("%s kills %s", address, application_id)
                return
        raise HopsGpuError("; ".join(refused) or "the ResourceManager has no web address")

    def ask(self, path: str) -> Any:
        """Return the JSON answer to a path, from the active address.

        Raises:
            NotUnderstood: the answer is not an object.
            HopsGpuError: no address answers, or none with JSON.
        """
        answer = self._get(path)
        # The ResourceManager of Hadoop 3.3 answers null for an attempt without containers.
        if answer is None and path.endswith("/containers"):
            return {}
        if not isinstance(answer, Mapping):
            raise self._not_understood(TypeError(f"but {type(answer).__name__}"))
        return answer

    def _get(self, path: str) -> Any:
        problems, no_access = [], None
        addresses = sorted(self.addresses, key=lambda address: address != self._active_address)
        for number, address in enumerate(addresses):
            try:
                # A standby ResourceManager redirects to the active one.
                answer = get_json(address + path, self._seconds, self._trail)
            except NoAnswer as error:
                log.info(
                    "the ResourceManager at %s did not answer %s: %s; next: %s",
                    address,
                    path.partition("?")[0],
                    error,
                    ", ".join(addresses[number + 1 : number + 2]) or "none",
                )
                problems.append(f"{address}: {error}")
                if isinstance(error, NoAccess):
                    no_access = error
            else:
                if address != self._active_address:
                    log.info("the ResourceManager at %s answers", address)
                self._active_address = address
                return answer
        if no_access is not None:
            raise HopsGpuError(str(no_access))
        raise HopsGpuError(
            "the ResourceManager does not answer ("
            + ("; ".join(problems) or "no web address in the Hadoop configuration")
            + "). Is YARN up, and is HADOOP_CONF_DIR that of the cluster?"
        )

    def _state_of(self, app: Mapping[str, Any]) -> ApplicationState:
        return application_state_of(app, self.gpu_resource)

    def _app(self, application_id: str) -> Any:
        return self.ask(f"/ws/v1/cluster/apps/{application_id}")["app"]
