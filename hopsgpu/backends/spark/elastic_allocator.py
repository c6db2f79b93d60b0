"""Executors that arrive and leave, each with a Spark job of one task."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from py4j.protocol import Py4JError

from hopsgpu.backends.gang_queue import StandingOffer
from hopsgpu.backends.gang_request import AcquisitionClock, Request
from hopsgpu.backends.spark.barrier_job import GangJob, agent_task, refuse_hopeless
from hopsgpu.backends.spark.elastic_jobs import ElasticJobAllocator
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.backends.spark.pending_executors import WaitWatcher
from hopsgpu.backends.spark.queued_gang import QueuedGang, queued_gang
from hopsgpu.backends.spark.release import (
    UNREACHABLE_SECONDS,
    release_executors,
    report,
)
from hopsgpu.backends.spark.token_renewal import read_tokens
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.core.gang import PART_SECONDS, GangExecutor, GangState
from hopsgpu.core.queue_policy import RENEW_SECONDS, queue_tag
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason, granted_part, silent_manager
from hopsgpu.errors import Cancelled, HopsGpuError, StoreError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_GONE_POLL_SECONDS = 0.05
# Poll interval in the first second after an executor was disconnected: its task ends within
# milliseconds, and Spark has no notification. The cluster manager is polled later.
_TASK_POLL_SECONDS = 0.01
_ENDING_SECONDS = 1.0
# Poll interval: the threads get no notification when a job ends.
_JOBS_SECONDS = 1.0
_END_SECONDS = 10.0
# Time after which Spark has learned from the cluster manager why an executor was lost.
_KNOWN_SECONDS = 2.0
# Time after which Spark's target has followed the running tasks.
_TARGET_SECONDS = 0.5
# An executor that has had no task for this time will not get one.
_SURPLUS_SECONDS = 2.0
# Time after the last request in which a surplus executor may arrive.
_SURPLUS_WATCH_SECONDS = 60.0
# An executor whose agent fails repeatedly fails its job. This many in a row have one cause.
_MAX_FAILED = 3


class SparkElasticAllocator(ElasticJobAllocator):
    """Acquires and releases executors one by one; `spark_allocator` provides it.

    Three threads work for it. The first requests executors, in the queue of gangs. The second
    confirms releases, and kills idle executors. The third renews the offer to waiting gangs.
    """

    def __init__(self, request: Request, executors: Executors) -> None:
        super().__init__(request, executors.server, executors.application.failing)
        self._executors = executors
        self._application = executors.application
        # Read once, because each trial or world needs tokens.
        self._is_kerberized = self._application.jvm.is_kerberized()
        self._next_poll = float("-inf")
        # Guarded by `_changed`: how many executors the cluster manager had not granted at the last
        # poll.
        self._not_granted: int | None = None
        # Time after which the cluster manager has received every request.
        self._settle_seconds = 2 * self._application.settle_seconds
        self._threads_ended = (threading.Event(), threading.Event(), threading.Event())
        # Jobs of lost executors, with the time of their cancellation.
        self._cancelled_at: dict[GangJob, float] = {}
        # By Spark's ID of an idle executor: the time since which each job has had its executor.
        self._idle_since: dict[str, float] = {}
        self._offered = self._giving = self._reclaimed_count = 0
        self._offer_changed = threading.Event()
        # Held while a job is started, and while idle executors are killed: an idle executor must
        # not get a task of a new job before its kill.
        self._start_lock = threading.Lock()

    def start(self) -> None:
        bodies = (self._request_executors, self._confirm_releases, self._maintain_offer)
        for ended, body in zip(self._threads_ended, bodies, strict=True):
            start_daemon(
                f"hopsgpu-{self.request.run_id}-executors", functools.partial(_run, body, ended)
            )

    def _explain_loss(self, reason: str, container: GangExecutor) -> str:
        return self._application.explain_loss(reason, container)

    def _read_tokens(self) -> bytes:
        return read_tokens(self._application.jvm) if self._is_kerberized else b""

    def _request_executors(self) -> None:
        try:
            # Spark repeats its own message until the first executor arrives.
            with self._application.jvm.without_resource_warning():
                while self._wait_until_missing():
                    self._request_in_queue()
        except HopsGpuError as error:
            self._record_problem(error)
        except Exception as error:  # noqa: BLE001 - the caller must learn that requests have ended
            why = f"executors could not be requested from Spark: {type(error).__name__}: {error}"
            self._record_problem(HopsGpuError(why))

    def _wait_until_missing(self) -> bool:
        """Wait until executors are missing; return False once the allocator is closed.

        Raises:
            HopsGpuError: the executors' jobs fail repeatedly, or no executor arrives in time.
        """
        while True:
            self._drop_ended()
            with self._changed:
                if self._is_closed:
                    return False
                self._pending.check()
                if self._wanted > self._executor_count() and self._pending.may_request(
                    time.monotonic()
                ):
                    self._notify()
                    return True
                surplus = self._withdraw(self._surplus_jobs())
                if not surplus:
                    self._changed.wait(_JOBS_SECONDS)
            self._cancel(surplus)
            if where := self._poll_waiting():
                self._pending.report(where)

    def _on_wait(self, why: WaitReason) -> None:
        with self._changed:
            self.why = why
        self._poll_waiting()

    def _poll_waiting(self) -> WaitReason:
        """Poll the cluster manager at most once a second; return what missing executors do.

        If executors fail repeatedly, their requests are withdrawn, so that other gangs go first.
        """
        with self._changed:
            waiting = self._waiting_jobs()
        if not waiting or time.monotonic() < self._next_poll:
            return NO_WAIT
        where = NO_WAIT
        with contextlib.suppress(HopsGpuError):  # the next poll tries again
            where = self._poll_manager()[1]
        with self._changed:
            now, chance = time.monotonic(), random.random()  # noqa: S311
            waiting = self._waiting_jobs()
            given_back = self._pending.give_back(len(waiting), now, chance)
            if not given_back:
                return where
            self._withdraw(waiting)
            self._leave_queue.set()
        log.info("%s: executors fail repeatedly: %s", self.request.run_id, given_back)
        self._pending.report(given_back)
        self._cancel(waiting)
        return NO_WAIT

    def _poll_manager(self) -> tuple[int, WaitReason]:
        """Return how many executors are not granted, and what the missing ones do."""
        self._next_poll = time.monotonic() + _JOBS_SECONDS
        target = self._executors.target()
        held = self._executors.held_containers().containers
        with self._changed:
            missing, where = self._pending.update(
                held, self._leaving, len(self._jobs_by_tag), target
            )
            self._not_granted = missing
            return missing, where

    @property
    def starting_count(self) -> int:
        with self._changed:
            missing = self._not_granted
            return 0 if missing is None else max(len(self._waiting_jobs()) - missing, 0)

    def _cancel_abandoned(self) -> None:
        """Cancel the jobs of lost executors, before Spark has started others for them."""
        with self._changed:
            abandoned, self._abandoned = self._abandoned, []
        deadline = time.monotonic() + _KNOWN_SECONDS
        for job in abandoned:
            # Wait for the reason of the loss first: a cancelled job does not have it.
            while not (self._is_closed or job.loss(0.0) or time.monotonic() >= deadline):
                if job.ended.wait(_POLL_SECONDS):
                    break
            while not (job.ended.wait(0.0) or self._is_closed):
                self._application.jvm.cancel(job.tag)
                job.ended.wait(_POLL_SECONDS)
            log.debug("%s: job %s of a lost executor is cancelled", self.request.run_id, job.tag)
            self._cancelled_at[job] = time.monotonic()

    def _end_unreachable(self) -> None:
        """End the executors that do not report the end of their cancelled task."""
        jvm = self._application.jvm
        for job, since in list(self._cancelled_at.items()):
            running = jvm.running_on(job.tag)
            if running and time.monotonic() - since < UNREACHABLE_SECONDS:
                continue
            if running:
                log.info("%s: ends unreachable executors: %s", self.request.run_id, running)
                jvm.give_up(running)
                # Wait until Spark's target no longer counts these executors; otherwise the cluster
                # manager replaces them.
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _TARGET_SECONDS)
                jvm.end_containers(running)
            del self._cancelled_at[job]

    def _cancel(self, jobs: Collection[GangJob]) -> None:
        """Cancel withdrawn jobs; an executor that has arrived meanwhile ends too."""
        for job in jobs:
            self._pending.expect_exit()
            while not job.ended.wait(_POLL_SECONDS):
                with self._changed:
                    if self._is_closed:
                        return
                self._application.jvm.cancel(job.tag)
            with self._changed:
                self._requested_at = time.monotonic()
        if jobs:
            with contextlib.suppress(HopsGpuError):
                self._pending.expect_exit(self._executors.held_containers().containers)

    def _drop_ended(self) -> None:
        """Drop the jobs that were not cancelled and have ended.

        Raises:
            ConfigError, HopsGpuError: no executor can start, or several in a row failed.
        """
        self._executors.refuse_hopeless_containers()
        with self._changed:
            ended = [job for job in self._jobs_by_tag.values() if job.ended.is_set()]
            for job in ended:
                self._drop(job)
            self._failed += sum(job.error is not None for job in ended)
            failed = self._failed
        for job in ended:
            refuse_hopeless(str(job.error))
        if failed >= _MAX_FAILED:
            raise HopsGpuError(
                f"{failed} executors in a row failed, the last one because: {ended[-1].reason(0)}"
            )

    def _request_in_queue(self) -> None:
        with self._changed:
            missing = self._wanted - self._executor_count()
            if self._is_closed or missing <= 0:
                return
            at_once = max(min(self._at_once, missing), 1)
            self._is_first_request = len(self.ready_executors) < self._least
            self._leave_queue = threading.Event()
            asked = self.request.of_executors(at_once)
            # The time limit holds only while the caller cannot work.
            asked = asked if self._is_first_request else asked.within(None)
            watcher = WaitWatcher(self.request.watcher, self._on_wait)
            request = replace(asked, cancelled=self._leave_queue, watcher=watcher)
            clock = self._pending.new_clock(request, time.monotonic())
            is_growth = not self._is_first_request
            # Executors that were requested before count, although they may not be ready yet.
            is_extra = self._executor_count() >= self._least
            admission = self._free_admission(at_once) or self._open_admission(asked, is_extra)
            self._admission = admission
        if admission.executors is not None:
            missing = at_once
        try:
            # Cancelled means that this request no longer needs to stay in the queue of gangs.
            with (
                contextlib.suppress(Cancelled),
                queued_gang(
                    self._application, request, clock, admission, is_growth=is_growth
                ) as queued,
                queued.hold_turn(0),
            ):
                excluded_hosts = self._hosts_in_use() if self._is_spread else ()
                with self._executors.placing(self.request, admission, excluded_hosts):
                    self._request_in_turn(queued, clock, queued.count_fitting(at_once, missing))
        finally:
            with self._changed:
                self._admission = None

    def _open_admission(self, request: Request, is_growth: bool) -> ExecutorAdmission:
        """Open the admission of the executors of a request; the caller holds the lock."""
        admission = self._executors.admissions.open(
            request, lambda why: self._revoke(admission, why), is_growth=is_growth
        )
        self._admissions.append(admission)
        return admission

    def _request_in_turn(self, queued: QueuedGang, clock: AcquisitionClock, count: int) -> None:
        """Request executors until the cluster manager has granted all, or grants none for 30 s."""
        log.info("%s: requests %d more executors", self.request.run_id, count)
        started = [self._start(queued) for _ in range(count)]
        with self._changed:
            needed = len(self._jobs_by_tag)
        self._executors.request_now(needed, self._has_surplus)
        deadline, least = time.monotonic() + PART_SECONDS, float("inf")
        while not self._has_surplus.wait(_POLL_SECONDS):
            self._drop_ended()
            with self._changed:
                self._pending.check()
            self._executors.refuse_hopeless(started)
            try:
                missing, where = self._poll_manager()
            except HopsGpuError as error:
                clock.report((), silent_manager(str(error)))
                continue
            if not missing:
                log.debug("%s: these executors are granted", self.request.run_id)
                queued.end()
                clock.report((), where)
                return
            if missing < least:
                deadline, least = time.monotonic() + PART_SECONDS, missing
            if not queued.renew() or time.monotonic() > deadline:
                break
            with self._changed:
                requested = len(self._jobs_by_tag)
            granted = requested - missing
            short = queued.shortage_reason(granted)
            clock.report((), granted_part(granted, requested, short))
        # Other gangs go first. An executor that was granted meanwhile runs another job or is
        # released.
        with self._changed:
            waiting = [job for job in self._waiting_jobs() if job in started]
            given_up = self._withdraw(
                self._surplus_jobs() if self._has_surplus.is_set() else waiting
            )
        if given_up:
            log.info("%s: withdraws requests for %d executors", self.request.run_id, len(given_up))
        self._cancel(given_up)

    @property
    def _is_spread(self) -> bool:
        return self.request.plan.spec.placement == "spread"

    def _hosts_in_use(self) -> set[str]:
        return {container.host for container in list(self.ready_executors.values())}

    def _start(self, queued: QueuedGang) -> GangJob:
        hosts = queued.hosts(1, self._hosts_in_use() if self._is_spread else ())
        warm = self.request.warm_up
        job = self._executors.new_job(
            self.request, "agents", 1, hosts, lambda driver: agent_task(driver, warm)
        )
        with self._start_lock:
            with self._changed:
                self._jobs_by_tag[job.tag] = job
                if self._admission is not None:
                    self._admission_by_tag[job.tag] = self._admission
                self._requested_at = time.monotonic()
                self._started_jobs = [
                    *(j for j in self._started_jobs if not j.ended.is_set()),
                    job,
                ]
            job.start()
        return job

    def _confirm_releases(self) -> None:
        while not self._is_closed:
            try:
                if self._are_leaving():
                    self._cancel_abandoned()
                    self._end_unreachable()
                    self._confirm_gone()
                self._kill_surplus()
                self._end_revoked()
                with self._changed:
                    unused = self._take_unused_admissions()
                for admission in unused:
                    admission.close()
            except (HopsGpuError, Py4JError):  # the next round tries again; `release` waits for all
                with self._changed:
                    self._changed.wait(_JOBS_SECONDS)

    def _end_revoked(self) -> None:
        """End the executors whose admission was revoked; withdraw those that have not arrived.

        The call is repeated until the executors are lost, since the cluster manager may not answer.
        """
        with self._changed:
            live = [*self._jobs_by_tag.values()]
            self._revoked = {job: why for job, why in self._revoked.items() if job in live}
            revoked, waiting = dict(self._revoked), self._waiting_jobs()
        for job, why in revoked.items():
            if running := self._application.jvm.running_on(job.tag):
                self._executors.end_revoked(running, why)
            elif job in waiting:
                with self._changed:
                    withdrawn = self._withdraw([job])
                self._cancel(withdrawn)

    def _are_leaving(self) -> bool:
        """Wait up to a second; return whether executors must be released or jobs cancelled."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._leaving or self._abandoned or self._cancelled_at,
                _JOBS_SECONDS,
            )
            return not self._is_closed and bool(
                self._leaving or self._abandoned or self._cancelled_at
            )

    def _confirm_gone(self) -> None:
        if not self._kill_idle():
            with self._changed:
                if time.monotonic() < self._released_at + _ENDING_SECONDS:
                    self._changed.wait(_TASK_POLL_SECONDS)
                    return
        held = self._executors.held_containers().containers
        with self._changed:
            self._leaving.intersection_update(held)
            self._changed.wait(_GONE_POLL_SECONDS)

    def _kill_idle(self) -> bool:
        """Kill idle executors; return False if a kill must wait."""
        with self._start_lock:
            with self._changed:
                live, waits = len(self._jobs_by_tag), bool(self._waiting_jobs())
            busy = self._executors.busy_ids()
            # An executor that has just arrived is not busy yet.
            if waits or len(busy) > live or not self._executors.is_target_at_most(live):
                return False
            self._executors.kill_idle(busy)
            return True

    def _kill_surplus(self) -> None:
        """Kill the executors that no job needs; see `PlaceholderAcquisition._kill_surplus`."""
        with self._start_lock:
            with self._changed:
                live, waits = len(self._jobs_by_tag), bool(self._waiting_jobs())
                last = max(self._requested_at, self._connected_at)
            if self._is_closed or waits or time.monotonic() - last > _SURPLUS_WATCH_SECONDS:
                self._idle_since = {}
                return
            busy = self._executors.busy_ids()
            # While Spark wants more, another executor would replace a killed one.
            if len(busy) != live or self._executors.target() > live:
                self._idle_since = {}
                return
            now, idle = time.monotonic(), {*self._executors.registered_ids()} - {*busy}
            since = {executor: self._idle_since.get(executor, now) for executor in idle}
            surplus = [e for e, began in since.items() if now - began >= _SURPLUS_SECONDS]
            # Forget the killed executors: if the kill fails, it is repeated after the same time.
            self._idle_since = {e: began for e, began in since.items() if e not in surplus}
            self._executors.kill(surplus)
        if surplus:
            log.info(
                "%s: kills %d executors that no job needs: more are granted than Spark wants",
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
                self._offer_changed.set()

    def _maintain_offer(self) -> None:
        offer: StandingOffer | None = None
        while not self._is_closed:
            self._offer_changed.wait(RENEW_SECONDS)
            self._offer_changed.clear()
            with self._changed:
                offered, giving = self._offered, self._giving
            if not (offered or offer):
                continue
            try:
                offer = offer or self._new_offer()
                self._reclaimed_count = self._renew_offer(offer, offered, giving)
            except HopsGpuError as error:  # the next round tries again
                log.info("%s: the offer could not be renewed: %s", self.request.run_id, error)
        if offer is not None:
            with contextlib.suppress(StoreError):  # an offer that stays expires after 20 s
                offer.withdraw()

    def _new_offer(self) -> StandingOffer:
        plan = self.request.plan
        return StandingOffer(
            self._application.gang_queue_dir,
            application=self._application.id,
            gpus=plan.shape.gpus,
            run=plan.spec.name,
        )

    def _renew_offer(self, offer: StandingOffer, offered: int, giving: int) -> int:
        if not offered:
            offer.withdraw()
            return 0
        snapshot = self._application.snapshot(RENEW_SECONDS)
        queues = tuple(queue_tag(queue.path) for queue in snapshot.queues)
        free = sum(max((node.total - node.used).gpus, 0) for node in snapshot.running)
        needed = offer.renew(offered, giving, queues, free, _held_gpus(snapshot))
        if needed != self._reclaimed_count:
            log.info("%s: waiting gangs need %d executors", self.request.run_id, needed)
        return needed

    def release(self) -> bool:
        with self._changed:
            self._is_closed = True
            self._offer_changed.set()
            self._notify()
        for ended in self._threads_ended:
            ended.wait(_END_SECONDS)
        self.request.watcher.state(GangState.RELEASING, ())
        with self._changed:
            jobs = [job for job in self._started_jobs if not job.ended.is_set()]
            settled = (
                time.monotonic() - self._requested_at > self._settle_seconds
                and not self._waiting_jobs()
            )
        release = release_executors(self._executors, jobs, is_whole=settled)
        with self._changed:
            self._container_by_tag.clear()
            self._leaving.clear()
        return report(release, self.request.watcher)


def _held_gpus(snapshot: Snapshot) -> Mapping[tuple[str, str], int]:
    """Return the GPUs of each running application, by its ID and user.

    YARN's access control may hide what an application has: then it may have all GPUs in use.
    """
    used = sum(node.used.gpus for node in snapshot.running)
    return {
        (app.id, app.user): app.used.gpus if app.used.cores else used
        for app in snapshot.applications
    }


def _run(body: Callable[[], None], ended: threading.Event) -> None:
    try:
        body()
    finally:
        ended.set()
