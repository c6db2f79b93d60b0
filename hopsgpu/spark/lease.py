"""The lease: executors and their GPUs, held by one gang, all of them or none.

The order of each step, and why, is in docs/how-it-works.md. This is the only place that
turns dynamic allocation's flag, and only for the submission of a barrier job.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.resource import ResourceProfile

from hopsgpu.errors import Cancelled, ConfigError, GangTimeout, HopsGpuError
from hopsgpu.gang import Container, GangState, Verdict, decide_acquire
from hopsgpu.spark.application import Application
from hopsgpu.spark.jobs import GangJob, hold_in_task, supervise_in_task
from hopsgpu.spark.jvm import FLIP_SECONDS, wait_until
from hopsgpu.spec import ExecutorShape
from hopsgpu.worker.channel import Message, new_secret
from hopsgpu.worker.peer import Driver
from hopsgpu.worker.server import ControlServer, serve
from hopsgpu.yarn.resource_manager import Held

RELEASE_SECONDS = 30.0
# Executors are up and Python is: an agent only has to import and connect.
_AGENTS_SECONDS = 120.0
_EVENT_SECONDS = 0.2
_LOOK_SECONDS = 0.05
_ENDED_SECONDS = 0.5
_ASK_SECONDS = 1.0
# Above the application master's, which our sessions set to 0.5 s.
_HEARTBEAT_SECONDS = 1.0
_ENDING_SECONDS = 5.0
_HANDOVERS = 5


class Watcher(Protocol):
    """Who is told of what happens to a lease."""

    def state(self, state: GangState, hosts: Sequence[str], why: str = "") -> None:
        """A state was reached, with the hosts granted so far; repeated while it waits, and why."""

    def mark(self, point: str) -> None:
        """A point of the timeline was passed now."""

    def arrived(self, times: Sequence[float]) -> None:
        """Executors came, at these seconds since the epoch."""

    def unconfirmed(self, shown: str) -> None:
        """The ResourceManager did not confirm the release in time, and what it showed."""


@dataclass(frozen=True)
class Request:
    """What to acquire, for whom, until when.

    Attributes:
        run_id: of the gang.
        shape: of each executor.
        executors: how many.
        timeout: seconds the gang may wait, or None.
        cancelled: set when the gang is no longer wanted.
        watcher: told of what happens.
    """

    run_id: str
    shape: ExecutorShape
    executors: int
    timeout: float | None
    cancelled: threading.Event
    watcher: Watcher


@dataclass(frozen=True)
class Lease:
    """A gang's executors, all of them, with an agent each.

    Attributes:
        server: the control channel; agents are its peers.
        containers: one per agent.
        job: the barrier job of the agents; it fails when an executor is lost.
    """

    server: ControlServer
    containers: tuple[Container, ...]
    job: GangJob


class GpuLease:
    """Acquires, hands over and releases; use `lease_gpus`, which always releases."""

    def __init__(
        self,
        application: Application,
        request: Request,
        profile: ResourceProfile,
        server: ControlServer,
        driver: Driver,
    ) -> None:
        self._application = application
        self._request = request
        self._profile = profile
        self._server = server
        self._driver = driver
        self._deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self._jobs: list[GangJob] = []
        self._whole = False
        self._seen: set[str] = set()
        self.released = False
        self.unconfirmed = ""

    def acquire(self) -> Lease:
        """Brings all executors, with an agent on each.

        Raises:
            GangTimeout: not all came in time.
            Cancelled: the gang is no longer wanted.
            ConfigError: a container cannot serve (what it lacks is named).
        """
        watcher = self._request.watcher
        with self._turn():
            for _ in range(_HANDOVERS):
                holders = self._bring()
                watcher.mark("granted")
                watcher.state(GangState.GRANTED, _hosts(holders))
                lease = self._hand_over(holders)
                if lease is not None:
                    watcher.state(GangState.READY, [c.host for c in lease.containers])
                    self._whole = True
                    return lease
        raise HopsGpuError(
            f"the gang was granted {_HANDOVERS} times and did not start, the last time because:"
            f" {self._jobs[-1].reason(0)}"
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One gang of an application acquires at a time; two would steal from each other."""
        lock = self._application.acquiring
        while not lock.acquire(timeout=_EVENT_SECONDS):
            turn = "another gang of this application is acquiring its executors"
            self._request.watcher.state(GangState.WAITING, (), turn)
            self._check_patience(0)
        try:
            yield
        finally:
            lock.release()

    def _check_patience(self, granted: int) -> Verdict:
        if self._request.cancelled.is_set():
            raise Cancelled(f"{self._request.run_id} was cancelled while it waited for executors")
        wanted = self._request.executors
        verdict = decide_acquire(
            granted=granted, wanted=wanted, deadline=self._deadline, now=time.monotonic()
        )
        if verdict is Verdict.TIMED_OUT:
            raise GangTimeout(
                f"{granted} of {wanted} executors came within {self._request.timeout:g} s; all"
                f" were let go. {self._gpus_in_use()}. Wait longer (acquire_timeout), ask for fewer"
                " workers, or see who holds the rest",
                granted=granted,
                wanted=wanted,
            )
        return verdict

    def _gpus_in_use(self) -> str:
        try:
            used, total = self._application.manager.gpus()
        except HopsGpuError as error:
            return str(error)
        return f"GPUs in use in the cluster, these included: {used} of {total}"

    def _start(self, role: str) -> GangJob:
        barrier = role == "agent"
        job = GangJob(
            self._application.context,
            tag=f"hopsgpu-{self._request.run_id}-{role}-{uuid.uuid4().hex[:8]}",
            description=f"hopsgpu {self._request.run_id}: {role}s of {self._request.executors}"
            " executors",
            tasks=self._request.executors,
            profile=self._profile,
            barrier=barrier,
            task=(supervise_in_task if barrier else hold_in_task)(self._driver),
        )
        self._jobs.append(job)
        job.start()
        return job

    def _bring(self) -> dict[int, Container]:
        """Runs the plain job that makes Spark ask for executors, until all are connected."""
        job = self._start("holder")
        holders: dict[int, Container] = {}
        arrivals: dict[int, float] = {}
        held: Held | str = "Spark is asking YARN"
        asked = float("-inf")
        while self._check_patience(len(holders)) is not Verdict.GRANTED:
            if time.monotonic() - asked >= _ASK_SECONDS:
                held, asked = self._held(), time.monotonic()
            why = held if isinstance(held, str) else self._missing(held, len(holders))
            self._request.watcher.state(GangState.WAITING, _hosts(holders), why)
            event = self._server.next_event(_EVENT_SECONDS)
            if event is None:
                if job.ended.is_set():
                    raise HopsGpuError(f"Spark's job of holders failed: {job.reason(0)}")
                continue
            if event.message is None:
                holders.pop(event.peer, None)
            elif _is_hello(event.message, "holder"):
                holders[event.peer] = _greeted(event.peer, event.message)
                arrivals[event.peer] = time.time()
                self._request.watcher.arrived(tuple(arrivals.values()))
        return holders

    def _held(self) -> Held | str:
        """What the ResourceManager shows of this gang, or why it does not answer."""
        try:
            return self._application.manager.held(self._application.id, self._profile.id)
        except HopsGpuError as error:
            return str(error)

    def _missing(self, held: Held, connected: int) -> str:
        """Where the executors that are not here yet are."""
        self._seen.update(held.containers)
        parts = []
        if held.pending:
            parts.append(f"YARN has not granted {held.pending}")
        if len(held.containers) > connected:
            parts.append(f"{len(held.containers) - connected} granted and starting")
        if ended := sorted(self._seen.difference(held.containers)):
            parts.append(
                f"{len(ended)} ended again, see the node's log of {ended[-1]} (a GPU that cannot"
                " be discovered, memory, Python?)"
            )
        return ", ".join(parts) or "Spark is asking YARN"

    def _hand_over(self, holders: dict[int, Container]) -> Lease | None:
        """Ends the holders and starts the agents in their place; None if one was lost."""
        holding = self._jobs[-1]
        self._server.hang_up(holders)
        cancelled = self._request.cancelled
        wait_until(holding.ended.is_set, cancelled, _AGENTS_SECONDS)
        jvm = self._application.jvm
        with jvm.barriers_allowed():
            job = self._start("agent")
            wait_until(lambda: jvm.stage_is_active(job.tag), job.ended, FLIP_SECONDS)
        agents: dict[int, Container] = {}
        deadline = time.monotonic() + _AGENTS_SECONDS
        while len(agents) < self._request.executors:
            if cancelled.is_set():
                raise Cancelled(f"{self._request.run_id} was cancelled before its ranks started")
            if job.ended.is_set() or time.monotonic() > deadline:
                jvm.cancel(job.tag)
                wait_until(job.ended.is_set, cancelled, RELEASE_SECONDS)
                return None
            event = self._server.next_event(_EVENT_SECONDS)
            if event is None or event.peer in holders:
                continue
            if event.message is None:
                agents.pop(event.peer, None)
            elif _is_hello(event.message, "agent"):
                agents[event.peer] = _greeted(event.peer, event.message)
        return Lease(self._server, tuple(agents.values()), job)

    def release(self) -> None:
        """Ends the tasks, kills the executors and sees them gone at the ResourceManager.

        Where the ResourceManager does not confirm it within 30 s, `released` stays False and
        `unconfirmed` says what it showed instead.
        """
        self._request.watcher.state(GangState.RELEASING, ())
        self._server.end_all()
        try:
            self._let_go(time.monotonic() + RELEASE_SECONDS)
        except Exception as error:  # noqa: BLE001 - must not hide what ended the run; it is told
            # The context was stopped meanwhile, or its JVM has died: YARN takes all it had.
            self.unconfirmed = f"{type(error).__name__}: {error}"

    def _let_go(self, deadline: float) -> None:
        jvm, profile = self._application.jvm, self._profile.id
        never = threading.Event()
        for job in self._jobs:
            # Repeated: a job that is not submitted yet cannot be cancelled, and one of its tasks
            # that begins late connects late.
            while not job.ended.wait(_ENDED_SECONDS) and time.monotonic() < deadline:
                jvm.cancel(job.tag)
                self._server.end_all()
        # A kill while Spark still wants executors brings new ones.
        wait_until(lambda: jvm.target(profile) == 0, never, deadline - time.monotonic())

        manager = self._application.manager

        def gone() -> bool:
            # Repeated: a container that was granted but had not registered comes later.
            jvm.kill(jvm.executors(profile))
            try:
                held = manager.held(self._application.id, profile)
            except HopsGpuError as error:
                self.unconfirmed = str(error)
                return False
            self.unconfirmed = f"{len(held.containers)} containers, {held.pending} asked for"
            return not held.containers and not held.pending

        def confirmed() -> bool:
            # Of a gang that was not whole Spark may still have a request on its way to YARN.
            return gone() and (self._whole or (not never.wait(_HEARTBEAT_SECONDS) and gone()))

        if wait_until(confirmed, never, deadline - time.monotonic(), _LOOK_SECONDS):
            # Others' containers may be ending too, so this has a bound of its own.
            with contextlib.suppress(HopsGpuError):  # asked a moment ago, and the kill is confirmed
                wait_until(lambda: not manager.gpus_ending(), never, _ENDING_SECONDS, _LOOK_SECONDS)
            self._request.watcher.mark("released")
            self.released = True


def _hosts(containers: Mapping[int, Container]) -> list[str]:
    return [container.host for container in containers.values()]


def _is_hello(message: Message, role: str) -> bool:
    # A late word of an earlier attempt's task must not count for this one.
    return message.kind == "hello" and message["role"] == role


def _greeted(peer: int, hello: Message) -> Container:
    if hello["missing"]:
        raise ConfigError(
            f"Python {hello['python']} on {hello['host']} lacks"
            f" {', '.join(hello['missing'])}, which ranks need to reach the lake: install"
            " them into the executors' Python (spark.pyspark.python)"
        )
    return Container(
        key=peer,
        container_id=hello["container"],
        host=hello["host"],
        address=hello["address"],
        gpus=tuple(hello["gpus"]),
    )


@contextlib.contextmanager
def lease_gpus(application: Application, request: Request) -> Iterator[Lease]:
    """Executors for a gang, each with an agent; released on every way out.

    Raises:
        GangTimeout, Cancelled, ConfigError, HopsGpuError: as `GpuLease.acquire`.
    """
    secret = new_secret()
    jvm = application.jvm
    address = application.driver_address
    bind = application.setting("spark.driver.bindAddress") or address
    user = None if jvm.is_kerberized() else jvm.user()
    with serve(secret, bind, application.ports) as server:
        profile = application.profiles.check_out(request.shape)
        driver = Driver(address, server.port, secret, user)
        owner = GpuLease(application, request, profile, server, driver)
        try:
            yield owner.acquire()
        finally:
            owner.release()
            if owner.released:
                application.profiles.check_in(request.shape, profile)
            else:
                request.watcher.unconfirmed(owner.unconfirmed)
