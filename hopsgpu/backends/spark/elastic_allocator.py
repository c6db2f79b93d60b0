"""Executors on YARN that arrive and leave: a Spark job of one task each, in the queue of gangs."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from py4j.protocol import Py4JError

from hopsgpu.backends.gang_request import AcquisitionClock, Request
from hopsgpu.backends.spark.barrier_job import GangJob, agent_task, refuse_hopeless
from hopsgpu.backends.spark.elastic_jobs import ElasticJobAllocator
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.backends.spark.queued_gang import QueuedGang, queued_gang
from hopsgpu.backends.spark.release import (
    UNREACHABLE_SECONDS,
    heartbeat_seconds,
    release_executors,
    report,
)
from hopsgpu.backends.spark.token_renewal import read_tokens
from hopsgpu.backends.spark.wait_reasons import WaitWatcher
from hopsgpu.core.gang import PART_SECONDS, GangState
from hopsgpu.core.queue_policy import RENEW_SECONDS, queue_tag
from hopsgpu.errors import Cancelled, HopsGpuError, StoreError
from hopsgpu.yarn.gang_queue import StandingOffer

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_GONE_SECONDS = 0.05
# The task of an executor that is to go ends in a moment, which Spark does not announce. As long as
# it was told just now, Spark is asked often, and YARN not yet.
_TASK_SECONDS = 0.01
_ENDING_SECONDS = 1.0
# Polled, because nothing notifies the threads that a job has ended.
_JOBS_SECONDS = 1.0
_END_SECONDS = 10.0
# In which Spark learns from YARN why an executor was lost.
_KNOWN_SECONDS = 2.0
# In which Spark's target follows from the tasks that run.
_TARGET_SECONDS = 0.5
# An executor without a task for so long is not about to have one.
_SURPLUS_SECONDS = 2.0
# In which an executor too many arrives, after the last one that was requested.
_SURPLUS_LOOK_SECONDS = 60.0
# An executor whose agent fails repeatedly fails its job; so many failures in a row are no accident.
_MOST_FAILED = 3


class YarnElasticAllocator(ElasticJobAllocator):
    """The allocator on YARN of a search or an elastic gang; `yarn_allocator` provides it.

    It has three threads: one requests executors, in the queue of gangs; one confirms that released
    executors are gone, and kills those that no job needs; one keeps the offer to gangs that wait.
    """

    def __init__(self, request: Request, executors: Executors) -> None:
        super().__init__(request, executors.server, executors.application.failing)
        self._executors = executors
        self._application = executors.application
        # Determined once, because each trial, or world, asks for tokens.
        self._is_kerberized = self._application.jvm.is_kerberized()
        self._looks_at = float("-inf")
        # Guarded by `_changed`: how many executors YARN had not granted at the last look.
        self._not_granted: int | None = None
        # After this time YARN knows of every request.
        self._settling = 2 * heartbeat_seconds(self._application.jvm)
        self._threads_ended = (threading.Event(), threading.Event(), threading.Event())
        # When the jobs of lost executors were cancelled.
        self._cancelled_at: dict[GangJob, float] = {}
        # Since when executors have had no task, while all jobs had theirs; by Spark's IDs.
        self._idle_since: dict[str, float] = {}
        self._offered = self._giving = self._reclaimed_count = 0
        self._offers = threading.Event()
        # Held while a job is started, and while idle executors are killed: an executor that is
        # found idle must not have a new job's task when it is killed.
        self._starts = threading.Lock()

    def start(self) -> None:
        """Start the threads."""
        bodies = (self._grow, self._shrink, self._keep_offer)
        for ended, body in zip(self._threads_ended, bodies, strict=True):
            start_daemon(
                f"hopsgpu-{self.request.run_id}-executors", functools.partial(_run, body, ended)
            )

    def _explain_loss(self, reason: str, host: str) -> str:
        return self._application.explain_loss(reason, host)

    def _read_tokens(self) -> bytes:
        return read_tokens(self._application.jvm) if self._is_kerberized else b""

    def _grow(self) -> None:
        try:
            # Needed until the first executor arrives, which ends Spark's own message for good.
            with self._application.jvm.without_resource_warning():
                while self._is_missing():
                    self._ask()
        except HopsGpuError as error:
            self._record_problem(error)
        except Exception as error:  # noqa: BLE001 - the owner must know that requests have ended
            why = f"executors could not be requested from Spark: {type(error).__name__}: {error}"
            self._record_problem(HopsGpuError(why))

    def _is_missing(self) -> bool:
        """Wait until executors are missing; return False once the allocator is closed.

        Raises:
            HopsGpuError: the executors' jobs fail repeatedly, or no executor arrives in time.
        """
        while True:
            self._forget_ended()
            with self._changed:
                if self._closed:
                    return False
                self._pending.check()
                if self._wanted > self._count() and self._pending.may_ask(time.monotonic()):
                    self._note()
                    return True
                surplus = self._withdrawn(self._surplus())
                if not surplus:
                    self._changed.wait(_JOBS_SECONDS)
            self._cancel(surplus)
            if where := self._see_waiting():
                self._pending.report(where)

    def waits(self, why: str) -> None:
        """Implement `WaitWatcher`: record why executors are waited for."""
        with self._changed:
            self.why = why
        self._see_waiting()

    def _see_waiting(self) -> str:
        """Return where missing executors are; check once a second, and return "" in between.

        Executors that fail repeatedly are given back, so that other gangs go first.
        """
        with self._changed:
            waiting = self._waiting()
        if not waiting or time.monotonic() < self._looks_at:
            return ""
        where = ""
        with contextlib.suppress(HopsGpuError):  # the next check asks again
            where = self._look()[1]
        with self._changed:
            now, chance = time.monotonic(), random.random()  # noqa: S311
            waiting = self._waiting()
            given_back = self._pending.give_back(len(waiting), now, chance)
            if not given_back:
                return where
            self._withdrawn(waiting)
            self._leave.set()
        log.info("%s: executors fail repeatedly: %s", self.request.run_id, given_back)
        self._pending.report(given_back)
        self._cancel(waiting)
        return ""

    def _look(self) -> tuple[int, str]:
        """Return how many executors YARN has not granted, and where the missing ones are.

        Raises:
            HopsGpuError: the ResourceManager does not say.
        """
        self._looks_at = time.monotonic() + _JOBS_SECONDS
        held = self._executors.held().hosts
        with self._changed:
            missing, where = self._pending.look(held, self._leaving, len(self._live))
            self._not_granted = missing
            return missing, where

    @property
    def starting_count(self) -> int:
        with self._changed:
            missing = self._not_granted
            return 0 if missing is None else max(len(self._waiting()) - missing, 0)

    def _cancel_forgotten(self) -> None:
        """Cancel the jobs of lost executors, before Spark has started others for them."""
        with self._changed:
            forgotten, self._forgotten = self._forgotten, []
        until = time.monotonic() + _KNOWN_SECONDS
        for job in forgotten:
            # A cancelled job does not tell why its executor was lost.
            while not (self._closed or job.loss(0.0) or time.monotonic() >= until):
                if job.ended.wait(_LOOK_SECONDS):
                    break
            while not (job.ended.wait(0.0) or self._closed):
                self._application.jvm.cancel(job.tag)
                job.ended.wait(_LOOK_SECONDS)
            log.debug("%s: job %s of a lost executor is cancelled", self.request.run_id, job.tag)
            self._cancelled_at[job] = time.monotonic()

    def _end_unreachable(self) -> None:
        """End the executors that do not say that their cancelled task has ended."""
        jvm = self._application.jvm
        for job, since in list(self._cancelled_at.items()):
            running = jvm.running_on(job.tag)
            if running and time.monotonic() - since < UNREACHABLE_SECONDS:
                continue
            if running:
                log.info("%s: ends unreachable executors: %s", self.request.run_id, running)
                jvm.give_up(running)
                # Until Spark's target is without them: YARN would replace them.
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _TARGET_SECONDS)
                jvm.end_containers(running)
            del self._cancelled_at[job]

    def _cancel(self, jobs: Collection[GangJob]) -> None:
        """Cancel jobs that were withdrawn; an executor that has arrived meanwhile ends too."""
        for job in jobs:
            self._pending.excuse()
            while not job.ended.wait(_LOOK_SECONDS):
                with self._changed:
                    if self._closed:
                        return
                self._application.jvm.cancel(job.tag)
            with self._changed:
                self._asked = time.monotonic()
        if jobs:
            with contextlib.suppress(HopsGpuError):
                self._pending.excuse(self._executors.held().containers)

    def _forget_ended(self) -> None:
        """Drop jobs that have ended by themselves.

        Raises:
            ConfigError: their executors cannot reach the driver, or have another Python version.
            HopsGpuError: several jobs have failed in a row, and no executor arrived in between.
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
            raise HopsGpuError(
                f"{failed} executors in a row failed, the last one because: {over[-1].reason(0)}"
            )

    def _ask(self) -> None:
        with self._changed:
            missing = self._wanted - self._count()
            if self._closed or missing <= 0:
                return
            at_once = max(min(self._at_once, missing), 1)
            self._asks_first = len(self.ready_executors) < self._least
            self._leave = threading.Event()
            asked = self.request.of_executors(at_once)
            # The time limit holds only as long as the owner cannot work.
            asked = asked if self._asks_first else asked.within(None)
            watcher = WaitWatcher(self.request.watcher, self)
            request = replace(asked, cancelled=self._leave, watcher=watcher)
            clock = self._pending.clock(request, time.monotonic())
            is_growth = not self._asks_first
        # Cancelled here means that it need not stay in the queue of gangs any longer.
        with (
            contextlib.suppress(Cancelled),
            queued_gang(self._application, request, clock, is_growth=is_growth) as queued,
            queued.hold_turn(0),
        ):
            self._in_turn(queued, clock, queued.room(at_once, missing))

    def _in_turn(self, queued: QueuedGang, clock: AcquisitionClock, count: int) -> None:
        """Request `count` executors until YARN has granted all, or grants none for 30 s."""
        log.info("%s: requests %d more executors from YARN", self.request.run_id, count)
        started = [self._start(queued) for _ in range(count)]
        with self._changed:
            needed = len(self._live)
        self._executors.ask_at_once(needed, self._enough)
        until, least = time.monotonic() + PART_SECONDS, float("inf")
        while not self._enough.wait(_LOOK_SECONDS):
            self._forget_ended()
            with self._changed:
                self._pending.check()
            self._executors.refuse_hopeless(started)
            try:
                missing, where = self._look()
            except HopsGpuError as error:
                clock.report((), str(error))
                continue
            if not missing:
                log.debug("%s: YARN has granted these executors", self.request.run_id)
                queued.end()
                clock.report((), where)
                return
            if missing < least:
                until, least = time.monotonic() + PART_SECONDS, missing
            if not queued.renew() or time.monotonic() > until:
                break
            with self._changed:
                granted = len(self._live) - missing
            clock.report((), queued.facts(granted).around(where))
        # Other gangs go first. An executor that was granted meanwhile runs another job, or is
        # released.
        with self._changed:
            waiting = [job for job in self._waiting() if job in started]
            given_up = self._withdrawn(self._surplus() if self._enough.is_set() else waiting)
        if given_up:
            log.info("%s: withdraws requests for %d executors", self.request.run_id, len(given_up))
        self._cancel(given_up)

    def _start(self, queued: QueuedGang) -> GangJob:
        taken: Collection[str] = ()
        if self.request.plan.spec.placement == "spread":
            taken = {container.host for container in list(self.ready_executors.values())}
        hosts = queued.hosts(1, taken)
        warm = self.request.warm_up
        job = self._executors.new_job(
            self.request, "agents", 1, hosts, lambda driver: agent_task(driver, warm)
        )
        with self._starts:
            with self._changed:
                self._live[job.tag] = job
                self._asked = time.monotonic()
                self._begun = [*(one for one in self._begun if not one.ended.is_set()), job]
            job.start()
        return job

    def _shrink(self) -> None:
        while not self._closed:
            try:
                if self._are_leaving():
                    self._cancel_forgotten()
                    self._end_unreachable()
                    self._see_gone()
                self._end_surplus()
            except (HopsGpuError, Py4JError):  # tried again; `release` waits for all at the end
                with self._changed:
                    self._changed.wait(_JOBS_SECONDS)

    def _are_leaving(self) -> bool:
        """Wait until executors must go; return False if none has to within a second."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._leaving or self._forgotten or self._cancelled_at,
                _JOBS_SECONDS,
            )
            return not self._closed and bool(self._leaving or self._forgotten or self._cancelled_at)

    def _see_gone(self) -> None:
        """Kill idle executors, and record which are gone."""
        if not self._kill_idle():
            with self._changed:
                if time.monotonic() < self._released_at + _ENDING_SECONDS:
                    self._changed.wait(_TASK_SECONDS)
                    return
        held = self._executors.held().containers
        with self._changed:
            self._leaving.intersection_update(held)
            self._changed.wait(_GONE_SECONDS)

    def _kill_idle(self) -> bool:
        """Kill idle executors; return False if some may not be killed yet."""
        with self._starts:
            with self._changed:
                live, waits = len(self._live), bool(self._waiting())
            busy = self._executors.busy()
            # An executor that has just arrived is not busy yet.
            if waits or len(busy) > live or not self._executors.wants_at_most(live):
                return False
            self._executors.kill_idle(busy)
            return True

    def _end_surplus(self) -> None:
        """Kill the executors that no job needs.

        When Spark changes its request while YARN answers it, as after the loss of an executor, YARN
        grants both, and Spark may start them all. The others would keep their GPUs until Spark's
        idle timeout.
        """
        with self._starts:
            with self._changed:
                live, waits = len(self._live), bool(self._waiting())
                last = max(self._asked, self._connected_at)
            if self._closed or waits or time.monotonic() - last > _SURPLUS_LOOK_SECONDS:
                self._idle_since = {}
                return
            busy = self._executors.busy()
            # As long as Spark wants more, another executor would follow.
            if len(busy) != live or self._executors.target() > live:
                self._idle_since = {}
                return
            now, idle = time.monotonic(), {*self._executors.registered()} - {*busy}
            since = {executor: self._idle_since.get(executor, now) for executor in idle}
            surplus = [one for one, at in since.items() if now - at >= _SURPLUS_SECONDS]
            # One that stays nevertheless is killed again after another such while.
            self._idle_since = {one: at for one, at in since.items() if one not in surplus}
            self._executors.kill(surplus)
        if surplus:
            log.info(
                "%s: kills %d executors that no job needs: YARN has granted more than Spark wants",
                self.request.run_id,
                len(surplus),
            )

    @property
    def reclaimed_count(self) -> int:
        return self._reclaimed_count

    def offer(self, executors: int, giving: int) -> None:
        with self._changed:
            if (executors, giving) != (self._offered, self._giving):
                self._offered, self._giving = executors, giving
                self._offers.set()

    def _keep_offer(self) -> None:
        offer: StandingOffer | None = None
        while not self._closed:
            self._offers.wait(RENEW_SECONDS)
            self._offers.clear()
            with self._changed:
                offered, giving = self._offered, self._giving
            if not (offered or offer):
                continue
            try:
                offer = offer or self._new_offer()
                self._reclaimed_count = self._needed(offer, offered, giving)
            except HopsGpuError as error:  # the next round tries again
                log.info("%s: the offer could not be renewed: %s", self.request.run_id, error)
        if offer is not None:
            with contextlib.suppress(StoreError):  # what is left behind counts for 20 s at most
                offer.withdraw()

    def _new_offer(self) -> StandingOffer:
        plan = self.request.plan
        return StandingOffer(
            self._application.gang_queue_dir,
            application=self._application.id,
            gpus=plan.shape.gpus,
            run=plan.spec.name,
        )

    def _needed(self, offer: StandingOffer, offered: int, giving: int) -> int:
        """Return how many executors waiting gangs need, while something is offered."""
        if not offered:
            offer.withdraw()
            return 0
        snapshot = self._application.snapshot(RENEW_SECONDS)
        queues = tuple(queue_tag(queue.path) for queue in snapshot.queues)
        free = sum(max((node.total - node.used).gpus, 0) for node in snapshot.running)
        needed = offer.renew(offered, giving, queues, free)
        if needed != self._reclaimed_count:
            log.info("%s: gangs that wait need %d executors", self.request.run_id, needed)
        return needed

    def release(self) -> bool:
        """Release all executors; return whether the ResourceManager confirmed it within 30 s."""
        with self._changed:
            self._closed = True
            self._offers.set()
            self._note()
        for ended in self._threads_ended:
            ended.wait(_END_SECONDS)
        self.request.watcher.state(GangState.RELEASING, ())
        with self._changed:
            jobs = [job for job in self._begun if not job.ended.is_set()]
            settled = time.monotonic() - self._asked > self._settling and not self._waiting()
        release = release_executors(self._executors, jobs, whole=settled)
        with self._changed:
            self._ready.clear()
            self._leaving.clear()
        return report(release, self.request.watcher)


def _run(body: Callable[[], None], ended: threading.Event) -> None:
    try:
        body()
    finally:
        ended.set()
