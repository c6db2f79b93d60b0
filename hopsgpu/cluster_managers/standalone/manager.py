"""Spark standalone masters as a cluster manager.

A master's JSON lists workers and applications, and its page of an application lists the executors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from hopsgpu.cluster_managers.manager import ClusterManager, HeldExecutors
from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeAnswers
from hopsgpu.cluster_managers.resources import NOTHING, Amount, total
from hopsgpu.cluster_managers.snapshot import App, Container, Node, Overview, Queue, Snapshot, User
from hopsgpu.cluster_managers.standalone.application_page import ApplicationPage, ListedExecutor
from hopsgpu.cluster_managers.standalone.lost_workers import lost_worker
from hopsgpu.cluster_managers.standalone.master_answers import ListedApplication, MasterState
from hopsgpu.cluster_managers.standalone.master_client import SECONDS, MasterClient
from hopsgpu.cluster_managers.standalone.master_url import (
    GPU_RESOURCE,
    cluster_of,
    master_web_addresses,
)
from hopsgpu.cluster_managers.standalone.token_file import token_file_of
from hopsgpu.core.container_ids import standalone_container
from hopsgpu.core.run_record import ApplicationReport
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.identity import own_name
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# A master numbers its applications: app-TIME-NUMBER by default (spark.deploy.appIdPattern).
APPLICATION = re.compile(r"app-[\w-]{1,200}")
MAX_CORES = "spark.cores.max"
# Largest number of applications whose pages are requested.
_MAX_PAGES = 64
_MAX_THREADS = 8
# More than all workers have, so that it never binds.
_UNLIMITED = 2**53


class StandaloneManager(ClusterManager):
    """A client of standalone masters.

    Args:
        master: the value of `spark.master`, such as "spark://h1:7077,h2:7077".
        addresses: base URLs of the masters' web interfaces.
        gpu_resource: Spark's name of the resource that counts GPUs.
        max_cores: `spark.cores.max` of the application; None for no limit.
        token_file: file of a bearer token for the masters' pages; None for no token.
        seconds: limits to connect to an address, and to be answered.

    Raises:
        ConfigError: `master` is no URL of standalone masters.
    """

    def __init__(
        self,
        master: str,
        addresses: tuple[str, ...],
        *,
        gpu_resource: str = GPU_RESOURCE,
        max_cores: int | None = None,
        token_file: Path | None = None,
        seconds: tuple[float, float] = SECONDS,
    ) -> None:
        self._cluster = cluster_of(master)
        self._gpu_resource = gpu_resource
        self._max_cores = max_cores
        self._client = MasterClient(addresses, gpu_resource, token_file, seconds)
        # Hosts by ID of the worker, which no other worker ever has.
        self._hosts: dict[str, str] = {}

    @property
    def title(self) -> str:
        return "the Spark master"

    @property
    def cluster(self) -> str:
        return self._cluster

    @property
    def gpu_resource(self) -> str:
        return self._gpu_resource

    @property
    def pages(self) -> str:
        return self._client.address

    def standby_statuses(self) -> dict[str, str]:
        """Return the status of each master besides the active one, or its error, by address."""
        return self._client.standby_statuses()

    def spark_version(self) -> str:
        """Return the version of the active master's Spark; "" if its page does not show it.

        Raises:
            HopsGpuError: the master does not answer.
        """
        return self._client.spark_version()

    def application_page(self, application_id: str) -> str:
        return f"{self.pages}/app/?appId={quote(application_id, safe='')}" if self.pages else ""

    def nodes(self) -> tuple[Node, ...]:
        return self._client.state().nodes

    def devices(self, nodes: Sequence[Node]) -> NodeAnswers:
        """Return no products: a worker knows only the addresses of its GPUs."""
        return NodeAnswers({node.id: Devices((), "") for node in nodes}, {})

    def snapshot(self, application_id: str, user: str) -> Snapshot:
        """Return a snapshot of what determines the resources of an application.

        The master gets one request for its state and one for the page of the application. While a
        GPU is used, it also gets one for each other application that may have GPUs.

        Raises:
            HopsGpuError: there is no answer, or the application is not active.
        """
        state = self._client.state()
        ours = _find(state.active, application_id)
        if ours is None:
            raise HopsGpuError(self._explain_absence(state, application_id))
        problems: list[str] = []
        pages = self._pages_of(state, application_id, problems)
        return self._snapshot(state, user, pages, ours, tuple(problems))

    def overview(self, user: str) -> Overview:
        """Return the nodes and applications; there are no queues, but a snapshot without one."""
        state = self._client.state()
        problems: list[str] = []
        pages = self._pages_of(state, "", problems)
        snapshot = self._snapshot(state, user, pages, None, tuple(problems))
        return Overview(
            nodes=state.nodes,
            queues={},
            user_snapshots={"": (snapshot,)},
            applications=snapshot.applications,
            containers={
                application_id: tuple(
                    Container(e.worker, _container(application_id, e), e.size, granted=0.0)
                    for e in page.live
                    if e.size.gpus
                )
                for application_id, page in pages.items()
            },
            acls=False,
            problems=snapshot.problems,
        )

    def caller(self) -> str:
        """Return the user of this process.

        A driver reports the property `user.name` of its JVM, so masters never see SPARK_USER and
        HADOOP_USER_NAME.
        """
        return own_name()

    def check_submission(self) -> None:
        """Check that a master is active; it accepts every application."""
        self._client.state()

    def held_executors(self, application_id: str, profile_id: int) -> HeldExecutors:
        """Return what an application has and requests for a resource profile.

        The master shows the open requests of all profiles as one number. They count for the profile
        as long as all executors of the application belong to it; otherwise 0 counts, since requests
        of others, such as ETL, may stay open for hours. So a proof that nothing is requested needs
        Spark's target of the profile too.

        Raises:
            HopsGpuError: there is no answer, or the master does not know the application.
        """
        page = self._client.page(application_id)
        if page is None:
            raise HopsGpuError(self._explain_absence(self._client.state(), application_id))
        hosts = self._hosts_of({executor.worker for executor in page.live})
        held = [executor for executor in page.live if executor.profile == profile_id]
        return HeldExecutors(
            {_container(application_id, e): hosts[e.worker] for e in held},
            pending=page.open_requests if len(held) == len(page.live) else 0,
        )

    def are_gpus_ending(self) -> bool:
        """Return False: a master counts GPUs as free once it tells a worker to kill an executor.

        The executor's process ends up to two seconds later, which no answer shows.
        """
        return False

    def why_lost(self, application_id: str, reason: str, host: str, container_id: str = "") -> str:
        try:
            state = self._client.state()
            if _find(state.active, application_id) is None:
                cause = self._explain_absence(state, application_id)
            else:
                cause = lost_worker(host, state.nodes)
        except HopsGpuError as error:
            cause = f"the Spark master could not be asked about {host} ({error})"
        return "; Spark says: ".join(filter(None, (cause, reason)))

    def end_of(self, application_id: str) -> str:
        """Return the final state; "" while the application is active.

        A master knows no reason of an end. If the driver was killed, the state is FINISHED too.
        """
        state = self._client.state()
        if _find(state.active, application_id) is not None:
            return ""
        return f"{self._find_ended(state, application_id).state}: (the master knows no reason)"

    def report(self, application_id: str) -> ApplicationReport | None:
        if not APPLICATION.fullmatch(application_id):
            return None
        state = self._client.state()
        application = _find(state.active, application_id)
        if application is not None:
            return _report_of(application, has_ended=False)
        return _report_of(self._find_ended(state, application_id), has_ended=True)

    def ended_since(self, time: float) -> Mapping[str, ApplicationReport]:
        return {
            application.id: _report_of(application, has_ended=True)
            for application in self._client.state().completed
            if application.ended >= time
        }

    def _hosts_of(self, workers: Set[str]) -> dict[str, str]:
        """Return the host of each worker, by ID; the ID for one that the master forgot."""
        if not workers <= self._hosts.keys():
            self._hosts = {node.id: node.host for node in self.nodes()}
        return {worker: self._hosts.get(worker, worker) for worker in workers}

    def _find_ended(self, state: MasterState, application_id: str) -> ListedApplication:
        ended = _find(state.completed, application_id)
        if ended is None:
            raise HopsGpuError(self._explain_absence(state, application_id))
        return ended

    def _explain_absence(self, state: MasterState, application_id: str) -> str:
        """Return why an application is not among the active ones."""
        if (ended := _find(state.completed, application_id)) is not None:
            return f"{application_id} has ended: {ended.state}"
        return (
            f"the Spark master at {self.pages} does not know {application_id}: it may be an"
            " application of another master; a master forgets applications when it restarts without"
            " spark.deploy.recoveryMode, and ended ones after spark.deploy.retainedApplications"
        )

    def _snapshot(
        self,
        state: MasterState,
        user: str,
        pages: Mapping[str, ApplicationPage],
        ours: ListedApplication | None,
        problems: tuple[str, ...],
    ) -> Snapshot:
        applications = tuple(_app(listed, pages.get(listed.id)) for listed in state.active)
        running = [node.total for node in state.nodes if node.state == "RUNNING"]
        largest = NOTHING
        for size in running:
            largest = largest.max_with(size)
        limit = _UNLIMITED if self._max_cores is None or ours is None else self._max_cores
        bound = Queue(
            path=MAX_CORES,
            state="RUNNING",
            is_leaf=True,
            maximum=Amount(_UNLIMITED, limit, _UNLIMITED),
            guaranteed=NOTHING,
            used=Amount(0, ours.cores if ours is not None else 0, 0),
            largest=largest,
            is_setting=True,
        )
        return Snapshot(
            application_id=ours.id if ours is not None else "",
            partition="",
            nodes=state.nodes,
            queues=(bound,),
            user=User(user, total(app.used for app in applications if app.user == user)),
            applications=applications,
            problems=problems,
        )

    def _pages_of(
        self, state: MasterState, our_id: str, problems: list[str]
    ) -> dict[str, ApplicationPage]:
        """Return the pages of applications by ID: of the one's own, and of those that have GPUs."""
        has_gpus_in_use = any(node.used.gpus for node in state.nodes)
        able = [
            application
            for application in state.active
            if application.cores and (has_gpus_in_use or application.id == our_id)
        ]
        able.sort(key=lambda a: (a.id != our_id, not a.has_gpu_request, -a.cores, a.id))
        pages: dict[str, ApplicationPage] = {}
        unread: list[str] = []

        def ask(application: ListedApplication) -> None:
            try:
                page = self._client.page(application.id)
            except HopsGpuError as error:
                log.info("the executors of %s are unknown: %s", application.id, error)
                unread.append(str(error))
            else:
                # An application that has just ended has no page.
                if page is not None:
                    pages[application.id] = page

        asked = able[:_MAX_PAGES]
        if asked:
            threads = min(_MAX_THREADS, len(asked))
            with ThreadPoolExecutor(threads, "hopsgpu-pages") as pool:
                list(pool.map(ask, asked))
        if unread:
            problems.append(
                f"hopsgpu does not know the GPUs of {count_of(len(unread), 'application')}:"
                f" {unread[0]}"
            )
        if len(able) > len(asked):
            problems.append(
                f"hopsgpu does not know the GPUs of {len(able) - len(asked)} more applications: it"
                f" asks the Spark master for at most {_MAX_PAGES} pages"
            )
        return pages


def configured_manager(
    master: str,
    properties: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    seconds: tuple[float, float] = SECONDS,
) -> StandaloneManager:
    """Return a client of the masters of a `spark.master`, as Spark's properties configure it.

    Raises:
        ConfigError: a setting has no valid value.
    """
    return StandaloneManager(
        master,
        master_web_addresses(master, properties, environ),
        max_cores=_max_cores_of(properties),
        token_file=token_file_of(properties, environ),
        seconds=seconds,
    )


def _max_cores_of(properties: Mapping[str, str]) -> int | None:
    value = properties.get(MAX_CORES, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and 0 < int(value) < 2**31):
        raise ConfigError(f"{MAX_CORES}={value[:20]!r}: must be a whole number of at least 1")
    return int(value)


def _container(application_id: str, executor: ListedExecutor) -> str:
    return standalone_container(application_id, int(executor.id))


def _find(
    applications: Sequence[ListedApplication], application_id: str
) -> ListedApplication | None:
    return next((a for a in applications if a.id == application_id), None)


def _app(listed: ListedApplication, page: ApplicationPage | None) -> App:
    live = page.live if page is not None else ()
    used = total(executor.size for executor in live) if page else Amount(0, listed.cores, 0)
    return App(listed.id, listed.name, listed.user, "", used, listed.started, len(live))


def _report_of(application: ListedApplication, *, has_ended: bool) -> ApplicationReport:
    return ApplicationReport(application.state, "", has_ended)
