"""Admissions of executors by Kueue: a gang is one Workload, and so is each growth."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from py4j.protocol import Py4JError

from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission, ExecutorAdmissions
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.cluster_managers.http_client import NoAnswer
from hopsgpu.cluster_managers.kubernetes.api_client import ApiError, Forbidden
from hopsgpu.cluster_managers.kubernetes.kueue import QUEUE, Workload
from hopsgpu.cluster_managers.kubernetes.kueue_queue import KueueQueue
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason, silent_manager, waiting_for_kueue
from hopsgpu.errors import CapacityError, HopsGpuError

log = logging.getLogger(__name__)

# The time of one request that watches Workloads, and until the next one after an error.
_WATCH_SECONDS, _REWATCH_SECONDS = 60.0, 2.0
# Poll interval of a waiting gang for Workloads of drivers that were killed.
_REMOVE_SECONDS = 60.0
# Answers to an invalid Workload, and to a caller who may not create one.
_REFUSED = (400, 403, 404, 422)

NewWorkload = Callable[[Request, bool], Mapping[str, Any]]


class KueueAdmission(ExecutorAdmission):
    """The Workload of some executors; a later one replaces a Workload that Kueue has evicted.

    One thread calls `poll`, and another one `update`.

    Args:
        new_body: returns a new Workload.
        remove_old: removes the Workloads of drivers that were killed.

    Attributes:
        is_closed: whether the executors have ended.
    """

    def __init__(
        self,
        queue: KueueQueue,
        executors: int,
        new_body: Callable[[], Mapping[str, Any]],
        on_revoked: Callable[[str], None],
        remove_old: Callable[[], None],
    ) -> None:
        self._queue = queue
        self.executors = executors
        self._new_body = new_body
        self._on_revoked = on_revoked
        self._remove_old = remove_old
        self._removes_at = time.monotonic() + _REMOVE_SECONDS
        self.is_closed = False
        self._lock = threading.Lock()
        # Guarded by the lock: the last known state; None before the Workload is created.
        self._workload: Workload | None = None
        self._is_valid = False

    @property
    def is_valid(self) -> bool:
        with self._lock:
            return self._is_valid

    def poll(self) -> WaitReason:
        if self.is_valid:
            return NO_WAIT
        try:
            workload = self._request_or_read()
            if workload.is_admitted and not workload.eviction:
                self.flavors = self._queue.flavors(workload.flavors)
            if time.monotonic() >= self._removes_at:
                self._removes_at = time.monotonic() + _REMOVE_SECONDS
                self._remove_old()
        except Forbidden as error:
            raise CapacityError(
                f"{error}: gangs wait in the LocalQueue {self._queue.name} of Kueue. An"
                f" administrator gives the role of docs/kubernetes.md; or set {QUEUE} to 'off'"
            ) from error
        except NoAnswer as error:
            if isinstance(error, ApiError) and error.status in _REFUSED:
                raise
            return silent_manager(str(error))
        with self._lock:
            self._workload = workload
            self._is_valid = workload.is_admitted and not workload.eviction and not self.is_closed
        if self.is_closed:
            self.close()
        if self.is_valid:
            log.info("Kueue has admitted %s: %s", workload.name, self.flavors)
            return NO_WAIT
        return waiting_for_kueue(self._queue.name, workload.message)

    def _request_or_read(self) -> Workload:
        with self._lock:
            workload = self._workload
        if workload is not None:
            workload = self._queue.read(workload)
            # Kueue does not admit an evicted Workload again. A Workload that somebody deactivated
            # while it waited is not replaced.
            if not workload.eviction or not (workload.is_admitted or workload.is_deleted):
                return workload
            log.info("%s is replaced: %s", workload.name, workload.eviction)
            self._queue.delete(workload)
            with self._lock:
                self._workload = None
        workload = self._queue.create(self._new_body())
        log.info("waits for Kueue to admit %s in %s", workload.name, self._queue.name)
        return workload

    def refresh(self) -> None:
        """Read the Workload of a valid admission, which may have changed while nobody watched."""
        with self._lock:
            workload = self._workload if self._is_valid else None
        if workload is not None:
            self.update(self._queue.read(workload))

    def update(self, workload: Workload) -> None:
        """Handle a change of a Workload: if it is this one, and was evicted, end the executors.

        Raises:
            HopsGpuError, Py4JError: the executors could not be ended.
        """
        with self._lock:
            is_own = self._workload is not None and self._workload.name == workload.name
            if not (self._is_valid and is_own and workload.eviction):
                return
            self._is_valid = False
        log.warning("%s: %s", workload.name, workload.eviction)
        try:
            self._on_revoked(workload.eviction)
        except BaseException:
            # The executors may still run: the next look at the Workload tries again.
            with self._lock:
                self._is_valid = True
            raise
        # The quota counts as used until then. If this fails, the next poll or the end repeats it.
        self._delete(workload)

    def close(self) -> None:
        self.is_closed = True
        with self._lock:
            workload, self._workload = self._workload, None
            self._is_valid = False
        if workload is not None:
            self._delete(workload)

    def _delete(self, workload: Workload) -> None:
        try:
            self._queue.delete(workload)
        except HopsGpuError as error:
            log.warning(
                "the Workload %s counts until another application removes it: %s",
                workload.name,
                error,
            )


class KueueAdmissions(ExecutorAdmissions):
    """Opens the admissions of one allocator, and watches their Workloads in a thread.

    Args:
        new_workload: returns a new Workload for the executors of a request, given whether they are
            a growth.
        remove_old: removes the Workloads of drivers that were killed.
    """

    def __init__(
        self,
        queue: KueueQueue,
        application_id: str,
        new_workload: NewWorkload,
        remove_old: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._application_id = application_id
        self._new_workload = new_workload
        self._remove_old = remove_old
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._admissions: list[KueueAdmission] = []

    def open(
        self, request: Request, on_revoked: Callable[[str], None], *, is_growth: bool = False
    ) -> ExecutorAdmission:
        admission = KueueAdmission(
            self._queue,
            request.plan.executors,
            lambda: self._new_workload(request, is_growth),
            on_revoked,
            self._remove_old,
        )
        with self._lock:
            self._admissions = [*(a for a in self._admissions if not a.is_closed), admission]
        return admission

    def close(self) -> None:
        self._closed.set()
        for admission in self._list_open():
            admission.close()

    def watch(self) -> None:
        """Pass on changes of the Workloads until the end."""
        while not self._closed.is_set():
            try:
                for admission in self._list_open():
                    admission.refresh()
                for workload in self._queue.watch(self._application_id, _WATCH_SECONDS):
                    if self._closed.is_set():
                        return
                    for admission in self._list_open():
                        admission.update(workload)
            except (HopsGpuError, Py4JError) as error:
                log.info("Kueue's Workloads are watched again soon: %s", error)
                self._closed.wait(_REWATCH_SECONDS)

    def _list_open(self) -> list[KueueAdmission]:
        with self._lock:
            return list(self._admissions)


@contextlib.contextmanager
def kueue_admissions(
    queue: KueueQueue,
    application_id: str,
    new_workload: NewWorkload,
    remove_old: Callable[[], None],
) -> Iterator[KueueAdmissions]:
    """Provide the admissions of one allocator; delete their Workloads on every path."""
    admissions = KueueAdmissions(queue, application_id, new_workload, remove_old)
    start_daemon("hopsgpu-kueue", admissions.watch)
    try:
        yield admissions
    finally:
        admissions.close()
