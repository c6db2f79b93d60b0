"""A search's executors on YARN: a Spark job of one task for each, asked for in turn."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.gang import PART_SECONDS, Container, GangState
from hopsgpu.spark.application import Application
from hopsgpu.spark.elastic import ElasticLease
from hopsgpu.spark.granted import Job
from hopsgpu.spark.jobs import GangJob, refuse_hopeless, supervise_in_task
from hopsgpu.spark.queueing import Queueing, queueing
from hopsgpu.spark.release import heartbeat_seconds, let_go
from hopsgpu.spark.request import Patience, Request
from hopsgpu.spark.threads import start_daemon
from hopsgpu.spark.tokens import read_tokens
from hopsgpu.spark.waiting import Coming, WhyAlone
from hopsgpu.worker.channel import Message
from hopsgpu.worker.peer import Driver
from hopsgpu.worker.server import ControlServer

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

_LOOK_SECONDS = 0.2
_GONE_SECONDS = 0.1
# Nobody announces that a job has ended.
_JOBS_SECONDS = 1.0
_END_SECONDS = 10.0
# An executor on which the agent ends again and again fails its job; so many in a row are no chance.
_MOST_FAILED = 3


class YarnElasticLease(ElasticLease):
    """To be released on every way out.

    Two threads: one asks for executors, in the line of all that wait; one sees those go that were
    let go.

    Attributes:
        why: why it waits.
    """

    def __init__(
        self,
        application: Application,
        request: Request,
        profile: ResourceProfile,
        server: ControlServer,
        driver: Driver,
    ) -> None:
        super().__init__(request, server)
        self.why = ""
        self._application = application
        self._profile = profile
        self._driver = driver
        # Asked once: each trial asks for tokens.
        self._is_kerberized = application.jvm.is_kerberized()
        self._changed = threading.Condition()
        # All that follows under its lock.
        self._live: dict[str, GangJob] = {}
        # Those too that were let go: at the end all must have ended.
        self._begun: list[GangJob] = []
        # By the tag of its job the container of an agent that is connected.
        self._ready: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._coming = Coming()
        self._looks_at = float("-inf")
        self._wanted = 0
        self._at_once = 1
        self._failed = 0
        self._closed = False
        # When an executor was asked for, or given up, last.
        self._asked = float("-inf")
        # After so long YARN knows of it.
        self._settling = 2 * heartbeat_seconds(application.jvm)
        # Set while no more are wanted than there are, or are asked for.
        self._enough = threading.Event()
        self._over = (threading.Event(), threading.Event())

    def start(self) -> None:
        """Starts its threads."""
        for over, body in zip(self._over, (self._grow, self._shrink), strict=True):
            start_daemon(
                f"hopsgpu-{self.request.run_id}-executors", functools.partial(_do, body, over)
            )

    @property
    def held(self) -> int:
        with self._changed:
            return len(self._ready) + len(self._leaving)

    @property
    def waiting_for(self) -> str:
        with self._changed:
            return self.why if self._wanted > len(self._ready) else ""

    def want(self, executors: int, at_once: int) -> None:
        with self._changed:
            if (executors, at_once) != (self._wanted, self._at_once):
                self._wanted, self._at_once = executors, at_once
                self._note()

    def _note(self) -> None:
        """Under the lock: has the threads look again."""
        if self._closed or self._wanted < self._count():
            self._enough.set()
        else:
            self._enough.clear()
        self._changed.notify_all()

    def _count(self) -> int:
        """Under the lock: executors that are here or are asked for, but for those put aside."""
        return len(self._live) - self.aside

    def _job_of(self, hello: Message) -> Job | None:
        with self._changed:
            job = self._live.get(str(hello["job"]))
            if job is not None:
                self._ready[job.tag] = str(hello["container"])
                # It was let go, and a task that waited has come to it.
                self._leaving.discard(self._ready[job.tag])
                self._coming.came(self._ready[job.tag])
                self._failed = 0
                self._changed.notify_all()
            return job

    def _let_go(self, leaving: Mapping[int, Container]) -> None:
        with self._changed:
            for key, container in leaving.items():
                self._drop(self._jobs[key])
                self._leaving.add(container.container_id)
            self._note()

    def _lost(self, job: Job) -> None:
        with self._changed:
            self._ready = {t: c for t, c in self._ready.items() if self._live.get(t) is not job}

    def _drop(self, job: Job) -> None:
        """Under the lock."""
        tag = next((tag for tag, one in self._live.items() if one is job), None)
        if tag is not None:
            del self._live[tag]
            self._ready.pop(tag, None)

    def _why_lost(self, reason: str, host: str) -> str:
        return self._application.why_lost(reason, host)

    def _tokens(self) -> bytes:
        return read_tokens(self._application.jvm) if self._is_kerberized else b""

    def _grow(self) -> None:
        try:
            while self._is_missing():
                self._ask()
        except HopsGpuError as error:
            self._fail(error)
        except Py4JError as error:
            self._fail(HopsGpuError(f"Spark could not be asked for executors: {error}"))

    def _is_missing(self) -> bool:
        """Waits until executors are missing; False once it is closed.

        Raises:
            HopsGpuError: their jobs end again and again, or none comes in time.
        """
        while True:
            self._forget_ended()
            with self._changed:
                if self._closed:
                    return False
                self._coming.check()
                if self._wanted > self._count() and self._coming.may_ask(time.monotonic()):
                    self._note()
                    return True
                surplus, waiting = self._surplus(), self._waiting()
                if not surplus:
                    self._changed.wait(_JOBS_SECONDS)
            self._cancel(surplus)
            # Those that were granted may end again and again.
            if waiting and time.monotonic() >= self._looks_at:
                with contextlib.suppress(HopsGpuError):  # asked again
                    self._tell(self._look()[1])
                self._give_back(waiting)

    def _tell(self, why: str) -> None:
        with self._changed:
            self.why = why
            self._coming.tell(why)

    def _give_back(self, waiting: Collection[GangJob]) -> None:
        """Has others go first where the executors of jobs end again and again."""
        with self._changed:
            now, chance = time.monotonic(), random.random()  # noqa: S311
            why = self._coming.give_back(len(waiting), now, chance)
        if why:
            self._tell(why)
            self._cancel(waiting)

    def _look(self) -> tuple[int, str]:
        """How many executors YARN has not granted, and where those are that have not come.

        Raises:
            HopsGpuError: the ResourceManager does not say.
        """
        self._looks_at = time.monotonic() + _JOBS_SECONDS
        held = self._application.manager.held(self._application.id, self._profile.id).containers
        with self._changed:
            return self._coming.look(held, self._leaving, len(self._live))

    def _surplus(self) -> list[GangJob]:
        """Under the lock: jobs that wait for executors which nobody wants."""
        return self._waiting()[: max(self._count() - self._wanted, 0)]

    def _waiting(self) -> list[GangJob]:
        """Under the lock: jobs whose task has no executor yet, the latest first."""
        return [job for tag, job in reversed(self._live.items()) if tag not in self._ready]

    def _cancel(self, jobs: Collection[GangJob]) -> None:
        for job in jobs:
            self._coming.excuse()
            # One that has come meanwhile is ended with it.
            while not job.ended.wait(_LOOK_SECONDS):
                if self._is_closed():
                    return
                self._application.jvm.cancel(job.tag)
            with self._changed:
                self._drop(job)
                self._asked = time.monotonic()

    def _is_closed(self) -> bool:
        with self._changed:
            return self._closed

    def _forget_ended(self) -> None:
        """Drops jobs that have ended by themselves.

        Raises:
            ConfigError: their executors cannot reach the driver, or have another Python.
            HopsGpuError: several have failed, and none has come between.
        """
        with self._changed:
            over = [job for job in self._live.values() if job.ended.is_set()]
            for job in over:
                self._drop(job)
            self._failed += sum(job.error is not None for job in over)
            failed = self._failed
        for job in over:
            refuse_hopeless(str(job.error))
        if failed >= _MOST_FAILED:
            raise HopsGpuError(f"executors came and failed, the last one: {over[-1].reason(0)}")

    def _ask(self) -> None:
        with self._changed:
            missing = self._wanted - self._count()
            first = not self._ready
            at_once = max(min(self._at_once, missing), 1)
        request = replace(
            self.request,
            executors=at_once,
            cancelled=self._enough,
            # Of the first executor alone.
            timeout=self.request.timeout if first else None,
            watcher=WhyAlone(self.request.watcher, self),
        )
        with self._changed:
            patience = self._coming.patience(request)
        # Cancelled: nobody wants more any longer.
        with (
            contextlib.suppress(Cancelled),
            queueing(self._application, request, patience, grows=not first) as place,
            place.turn(0),
        ):
            self._in_turn(place, patience, place.room(at_once, missing))

    def _in_turn(self, place: Queueing, patience: Patience, count: int) -> None:
        """Asks for so many, until YARN has granted them or does not for half a minute."""
        started = [self._start(place) for _ in range(count)]
        until, least = time.monotonic() + PART_SECONDS, float("inf")
        while not self._enough.wait(_LOOK_SECONDS):
            self._forget_ended()
            with self._changed:
                self._coming.check()
            self._refuse_failing(started)
            try:
                missing, where = self._look()
            except HopsGpuError as error:
                patience.tell((), str(error))
                continue
            if not missing:
                place.granted()
                patience.tell((), where)
                return
            if missing < least:
                until, least = time.monotonic() + PART_SECONDS, missing
            if not place.keep() or time.monotonic() > until:
                break
            patience.tell((), f"{where}; {place.facts()}")
        # Others go first; those that were granted meanwhile find another job, or are let go.
        with self._changed:
            waiting = [job for job in self._waiting() if job in started]
            given_up = self._surplus() if self._enough.is_set() else waiting
        self._cancel(given_up)

    def _start(self, place: Queueing) -> GangJob:
        tag = f"hopsgpu-{self.request.run_id}-trials-{uuid.uuid4().hex[:8]}"
        job = GangJob(
            self._application,
            tag=tag,
            description=f"hopsgpu {self.request.run_id}: an executor of trials",
            tasks=1,
            hosts=place.hosts(1),
            profile=self._profile,
            barrier=False,
            task=supervise_in_task(replace(self._driver, job=tag)),
        )
        with self._changed:
            self._live[tag] = job
            self._asked = time.monotonic()
            self._begun = [*(one for one in self._begun if not one.ended.is_set()), job]
        job.start()
        return job

    def _refuse_failing(self, jobs: Collection[GangJob]) -> None:
        for job in jobs:
            for error in self._application.jvm.task_failures(job.tag):
                refuse_hopeless(error)

    def _shrink(self) -> None:
        while self._is_leaving():
            try:
                self._see_gone()
            except (HopsGpuError, Py4JError):  # asked again; at the end all of them are
                with self._changed:
                    self._changed.wait(_JOBS_SECONDS)

    def _is_leaving(self) -> bool:
        """Waits until executors are to go; False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._leaving)
            return not self._closed

    def _see_gone(self) -> None:
        """Kills executors that have nothing to do, and notes which are gone."""
        jvm, profile = self._application.jvm, self._profile.id
        with self._changed:
            live, waits = len(self._live), bool(self._waiting())
        busy = jvm.busy(profile)
        # A kill while Spark still wants as many brings new ones, and one that has just come is
        # not busy yet.
        if not waits and len(busy) <= live and jvm.target(profile) <= live:
            jvm.kill(e for e in jvm.executors(profile) if e not in busy)
        held = self._application.manager.held(self._application.id, profile).containers
        with self._changed:
            self._leaving.intersection_update(held)
            self._changed.wait(_GONE_SECONDS)

    def release(self) -> bool:
        """Lets everything go; whether the ResourceManager confirmed it within 30 s."""
        with self._changed:
            self._closed = True
            self._note()
        for over in self._over:
            over.wait(_END_SECONDS)
        watcher = self.request.watcher
        watcher.state(GangState.RELEASING, ())
        with self._changed:
            jobs = [job for job in self._begun if not job.ended.is_set()]
            settled = time.monotonic() - self._asked > self._settling and not self._waiting()
        release = let_go(self._application, self._profile.id, jobs, self.server, whole=settled)
        with self._changed:
            self._ready.clear()
            self._leaving.clear()
        if release.confirmed:
            watcher.mark("released")
        if release.problem is not None:
            watcher.warn(release.problem)
        return release.confirmed


def _do(body: Callable[[], None], over: threading.Event) -> None:
    try:
        body()
    finally:
        over.set()
