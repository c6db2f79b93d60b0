"""Held gangs: gangs that keep their GPUs for several launches."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hopsgpu.backends.gang_allocation import GangAllocation, GangAllocator, GangAllocatorFactory
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.core.boundary import public
from hopsgpu.core.gang import Exclusions, GangState
from hopsgpu.core.signatures import check_call, document_arguments, signature_of
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.core.wait_reasons import other_launch
from hopsgpu.errors import Cancelled, ConfigError
from hopsgpu.launcher.arguments import HeldArguments, launch_on
from hopsgpu.launcher.gang_run import GangRun
from hopsgpu.launcher.held_time import HeldTime
from hopsgpu.launcher.interrupts import interruption, interrupts_noted, wait_for
from hopsgpu.launcher.options import HeldRunOptions
from hopsgpu.launcher.planner import new_run_id, plan_on
from hopsgpu.launcher.preflight import python_of
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.run import Run
from hopsgpu.runs.run_end import KEEP_SECONDS, state_of_failure
from hopsgpu.runs.run_start import start_run
from hopsgpu.runs.status_board import KEPT, GangBoard
from hopsgpu.storage.background import Background

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class AllocatorThread:
    """The thread that owns the allocator of a held gang.

    Only this thread calls Spark for the gang, or a launch's thread while this one waits for its
    end.

    Args:
        idle_timeout: seconds without a launch after which the gang is released, or None.
        make_request: returns a request of the gang itself, for acquisitions and releases outside
            launches.
        on_held: receives the number of executors that the gang holds for no launch.
    """

    def __init__(
        self,
        allocate: GangAllocatorFactory,
        idle_timeout: float | None,
        make_request: Callable[[], Request],
        on_held: Callable[[int], None] = lambda executors: None,
    ) -> None:
        self._allocate = allocate
        self._idle_timeout = idle_timeout
        self._make_request = make_request
        self._on_held = on_held
        self._lock = threading.Lock()
        self._is_open = False
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work_queued = threading.Event()
        self._ended = threading.Event()
        self._stack = contextlib.ExitStack()
        self._allocator: GangAllocator | None = None
        self._problem: str | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            ConfigError: it was started before.
        """
        with self._lock:
            if self._is_open or self._ended.is_set():
                raise ConfigError(
                    "a gang can be entered only once: create a new one with hopsgpu.hold()"
                )
            self._is_open = True
        start_daemon("hopsgpu-allocator", self._run)

    def put(self, work: Callable[[], None]) -> None:
        """Queue some work for the thread, which does it in order.

        Raises:
            ConfigError: the gang is not held.
        """
        with self._lock:
            self._check_open()
            self._work_queued.set()
            self._works.put(work)

    def check_held(self) -> None:
        """Check that work can be queued now.

        Raises:
            ConfigError: the gang is not held.
        """
        with self._lock:
            self._check_open()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError(
                "this gang is not held, or was closed: launch within"
                " `with hopsgpu.hold(...) as gang:`"
            )

    def close(self) -> None:
        """Release the gang once all queued work is done; return when it is released."""
        with self._lock:
            self._is_open = False
            self._work_queued.set()
            self._works.put(None)
        self._ended.wait()

    @contextlib.contextmanager
    def provide_gang(self, request: Request) -> Iterator[Callable[[Exclusions], GangAllocation]]:
        """Provide a function that returns the whole gang for an attempt of one launch.

        Only the allocator thread may use it, or a thread for which the allocator thread waits. The
        function takes the nodes and GPUs to exclude.

        Raises:
            Cancelled: the launch was cancelled.
        """
        if request.cancelled.is_set():
            raise Cancelled(f"{request.run_id} was cancelled before its turn on the gang")
        if self._problem is not None:
            request.watcher.warn(self._problem)
            self._problem = None
        self._on_held(0)
        try:
            yield lambda exclusions: self._ensure_whole(replace(request, exclusions=exclusions))
        finally:
            if self._allocator is not None:
                request.watcher.state(GangState.FINISHING, ())
            self._report_held()

    @contextlib.contextmanager
    def provide_gang_in_turn(
        self, request: Request
    ) -> Iterator[Callable[[Exclusions], GangAllocation]]:
        """Do what `provide_gang` does, in a launch's thread for which the allocator thread waits.

        While another launch uses the gang, this launch's watcher is notified that it is still
        preparing, and why.

        Raises:
            Cancelled: the launch was cancelled.
            ConfigError: the gang is no longer held.
        """
        turn, has_ended = threading.Event(), threading.Event()

        def lend() -> None:
            turn.set()
            has_ended.wait()

        self.put(lend)
        try:
            log.debug("%s: waits for its turn on the held gang", request.run_id)
            if not turn.wait(_POLL_SECONDS):
                request.watcher.state(GangState.PREPARING, (), other_launch())
            while not turn.wait(_POLL_SECONDS) and not request.cancelled.is_set():
                pass
            with self.provide_gang(request) as ensure_whole:
                yield ensure_whole
        finally:
            has_ended.set()

    def _report_held(self) -> None:
        """Report how many executors are held while no launch uses them."""
        self._on_held(0 if self._allocator is None else self._allocator.executor_count)

    def _ensure_whole(self, request: Request) -> GangAllocation:
        """Return the whole gang; acquire the executors that are missing.

        Raises:
            GangTimeout, Cancelled, ConfigError, HopsGpuError: as `GangAllocator.acquire`.
        """
        if self._allocator is None:
            self._allocator = self._stack.enter_context(self._allocate(request))
        try:
            return self._allocator.ensure_whole(request)
        except BaseException:
            self._release(request)
            raise

    def _release(self, request: Request) -> None:
        """Release all executors, and notify the request's watcher."""
        if self._allocator is not None:
            self._allocator.request = request
        self._allocator = None
        try:
            self._stack.close()
        finally:
            self._on_held(0)

    def _release_when_idle(self) -> None:
        """Release all executors outside of a launch, and notify the gang's own watcher."""
        if self._allocator is not None:
            request = self._make_request()
            self._release(request)
            request.watcher.state(GangState.RELEASED, ())

    def _run(self) -> None:
        try:
            while (work := self._take_work()) is not None:
                work()
        finally:
            with self._lock:
                self._is_open = False
            try:
                self._release_when_idle()
            finally:
                self._ended.set()

    def _take_work(self) -> Callable[[], None] | None:
        """Return the next work; meanwhile replace lost executors, and release an idle gang."""
        idle_since = time.monotonic()
        while True:
            try:
                work = self._works.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                pass
            else:
                self._work_queued.clear()
                return work
            if self._allocator is None:
                continue
            self._report_held()
            seconds_left = None
            if self._idle_timeout is not None:
                seconds_left = idle_since + self._idle_timeout - time.monotonic()
            if seconds_left is not None and seconds_left <= 0:
                log.info("releases the held gang: no launch for %g s", self._idle_timeout)
                self._release_when_idle()
            elif not self._allocator.is_whole:
                self._replace_lost(self._allocator, seconds_left)

    def _replace_lost(self, allocator: GangAllocator, seconds: float | None) -> None:
        """Acquire replacements for lost executors, while the remaining executors run.

        A launch that starts meanwhile interrupts this, and acquires the replacements with its own
        timeout.
        """
        request = self._make_request()
        run_id, timeout = request.run_id, request.plan.spec.acquire_timeout
        log.info("%s: executors of the held gang were lost; requests replacements", run_id)
        bounds = [bound for bound in (timeout, seconds) if bound is not None]
        request = replace(request.within(min(bounds, default=None)), cancelled=self._work_queued)
        try:
            try:
                allocator.acquire(request)
            except Cancelled:
                # Without a job, the remaining executors end by Spark's idle timeout unless a launch
                # uses them.
                allocator.end_jobs()
        except Exception as error:  # noqa: BLE001 - the next launch reports it, and asks again
            log.info(
                "%s: no replacements (%s): releases all executors", run_id, type(error).__name__
            )
            self._problem = f"the gang could not replace lost executors while it was idle: {error}"
            self._release(request)
            request.watcher.state(GangState.RELEASED, ())
        else:
            request.watcher.state(GangState.FINISHING, ())
            request.watcher.state(GangState.HELD, ())


class Gang:
    """Executors and their GPUs, held for several launches; a context manager.

    The gang acquires them on entry and releases them on exit. If some are lost, only those are
    requested again. After `idle_timeout` without a launch all are released, and the next launch
    acquires them again.
    """

    __module__ = "hopsgpu"

    def __init__(self, arguments: HeldArguments, plan: LaunchPlan) -> None:
        self._arguments = arguments
        self._plan = plan
        # Set once it is on the lake; used by all launches.
        self._python_env: PythonEnv | None = None
        self._background = Background(f"hopsgpu-{arguments.spec.name}-records")
        # The latest status board of what the gang did outside launches.
        self._own_board: GangBoard | None = None
        self._time = HeldTime(plan, arguments.application, self._background)
        self._allocator_thread = AllocatorThread(
            arguments.application.allocate,
            arguments.idle_timeout,
            self._make_own_request,
            self._time.record_held,
        )

    @public
    def __enter__(self) -> Gang:
        board, cancelled = self._board(), threading.Event()

        def acquire() -> GangResult:
            self._time.record_request()
            try:
                root = self._plan.paths["root"]
                self._python_env = python_of(self._arguments.python_env, root, board, cancelled)
                with self._allocator_thread.provide_gang(
                    self._request(board, cancelled)
                ) as ensure_whole:
                    ensure_whole(Exclusions())
            except BaseException as error:
                end = state_of_failure(error)
                raise
            else:
                end = GangState.HELD
            finally:
                self._time.record_acquisition(board.seconds_waited, board.seconds_held)
                board.state(end)
            return board.result()

        self._allocator_thread.start()
        try:
            with interrupts_noted() as interrupted:
                wait_for(Run(board, cancelled, acquire, self._allocator_thread.put), interrupted)
            if interrupted.is_set():
                raise interruption(
                    f"{board.run_id} was cancelled when all its executors had been granted"
                )
        except BaseException:
            self._close()
            raise
        return self

    @public
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close()
        if isinstance(error, KeyboardInterrupt):
            # The message of the interrupt says that the gang keeps the executors.
            message = str(error).partition(f", and {KEPT}")[0]
            error.args = ("; ".join(filter(None, (message, self._how_closed))),)

    def _close(self) -> None:
        with interrupts_noted() as interrupted:
            self._allocator_thread.close()
            self._time.write()
            self._background.flush(KEEP_SECONDS)
        for problem in self._background.problems():
            warnings.warn(problem, stacklevel=4)
        if interrupted.is_set():
            raise interruption(self._how_closed)

    @public
    @document_arguments(HeldRunOptions)
    def launch(self, *args: Any, **kwargs: Any) -> GangResult:
        """Train on the held gang, as `hopsgpu.launch` does, and keep the GPUs.

        `timeline.released` is None. Launches of several threads take turns; a launch writes its
        data before its turn, while another launch may use the gang. Logs and record of a launch are
        on the lake soon after it has returned, and at the latest when the gang is closed; a problem
        with them is a warning of the next launch, or a Python warning when the gang is closed.

        Raises:
            ConfigError: an argument cannot work, or the gang was closed.
            GangTimeout: executors that were lost, or released while idle, were not granted again
                in time.
            RankFailed, DiscoveryError, StoreError, KeyboardInterrupt: as `hopsgpu.launch`.
        """
        with interrupts_noted() as interrupted:
            check_call("Gang.launch", signature_of(HeldRunOptions), args, kwargs)
            arguments = launch_on(self._arguments, HeldRunOptions(*args, **kwargs), interrupted)
            arguments = replace(arguments, python_env=self._python_env)
            run_id = new_run_id(arguments.spec.name)
            plan = plan_on(self._plan, arguments, run_id)
            log.info("launch on a held gang: %s of %d workers", run_id, plan.spec.workers)
            board = GangBoard(run_id, plan.executors, plan.shape.gpus, arguments.progress)
            for problem in self._background.problems():
                board.warn(problem)
            provide_gang, start = self._allocator_thread.provide_gang, self._allocator_thread.put
            if arguments.data is not None:
                # Other launches may train while the data is written.
                self._allocator_thread.check_held()
                provide_gang = self._allocator_thread.provide_gang_in_turn
                start = functools.partial(start_daemon, f"hopsgpu-{run_id}")
            handle = start_run(
                Run,
                plan,
                arguments.application,
                board,
                lambda active: GangRun(arguments, active, provide_gang, is_held_gang=True),
                background=self._background,
                start_thread=start,
            )
            result = wait_for(handle, interrupted)
        if interrupted.is_set():
            raise interruption(f"{run_id} had succeeded, and {board.executors_fate}")
        return result

    @property
    def _how_closed(self) -> str:
        held = "it held nothing" if self._own_board is None else self._own_board.executors_fate
        return f"the gang was closed, and {held}"

    def _make_own_request(self) -> Request:
        self._own_board = self._board()
        return self._request(self._own_board, threading.Event())

    def _board(self) -> GangBoard:
        plan, arguments = self._plan, self._arguments
        board = GangBoard(plan.spec.name, plan.executors, plan.shape.gpus, arguments.progress)
        board.set_application(arguments.application.id, plan.queue)
        return board

    def _request(self, board: GangBoard, cancelled: threading.Event) -> Request:
        return Request(
            board.run_id,
            self._plan,
            cancelled,
            board,
            frameworks=self._arguments.frameworks,
            python_env=self._python_env,
        )
