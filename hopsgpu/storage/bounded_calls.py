"""Calls that may hang, for which callers wait only a limited time."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_IDLE_SECONDS = 5.0
_EXIT_SECONDS = 5.0


class BoundedCall(Generic[T]):
    """A call that starts at once, in a daemon thread of its own: if it hangs, the process exits."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work = work
        self._is_done = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            self._is_done.set()
            # The error's traceback refers to this frame. Without `del`, its objects, such as
            # connections, would live until the next garbage collection.
            del self

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the work has ended."""
        return self._is_done.wait(seconds)

    def result(self, seconds: float) -> T:
        """Return the work's result or raise its error.

        Raises:
            TimeoutError: the work takes longer; the caller may try again.
        """
        if not self.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self
        return self._results[0]


class Steps:
    """The steps of some work: each may take `seconds`, and the time between them has no limit.

    One thread works and another one waits. After the work is given up, no step starts; a running
    step continues to its end.

    Args:
        calling: held while a step runs.
    """

    def __init__(self, seconds: float, calling: threading.Lock) -> None:
        self._seconds = seconds
        self._calling = calling
        self._lock = threading.Lock()
        self._start: float | None = None
        self._is_given_up = False

    def run(self, step: Callable[[], T]) -> T:
        """Run a step in the work's thread, which calls this.

        Raises:
            TimeoutError: the work was given up.
        """
        self._set_start(time.monotonic())
        try:
            with self._calling:
                return step()
        finally:
            self._set_start(None)

    def _set_start(self, start: float | None) -> None:
        with self._lock:
            if self._is_given_up:
                raise TimeoutError
            self._start = start

    @property
    def seconds_left(self) -> float:
        """Return the running step's remaining seconds; all of them if no step runs."""
        start = self._start
        return self._seconds - (0.0 if start is None else time.monotonic() - start)

    def give_up_if_late(self) -> bool:
        """Give up the work if a step takes too long; return whether it does."""
        with self._lock:
            is_late = self._start is not None and self.seconds_left <= 0
            self._is_given_up |= is_late
            return is_late

    def give_up(self) -> None:
        """Prevent that another step starts."""
        with self._lock:
            self._is_given_up = True


class WorkerThread:
    """A daemon thread that does one piece of work after another; callers wait a limited time.

    After a timeout the thread may be blocked, so it is not reused.

    Args:
        try_withdraw: called when the thread had no work for a while; returns whether the thread
            ends, because nobody will give it more work.
    """

    def __init__(
        self,
        name: str,
        try_withdraw: Callable[[WorkerThread], bool],
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._pending = 0
        self._calling = threading.Lock()
        self._try_withdraw = try_withdraw
        self._requests: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Return whether the results of all work were fetched."""
        return self._pending == 0

    def stop(self) -> None:
        """End the thread after all work that was started."""
        self._requests.put(None)

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """Return the result of work or raise its error; a TimeoutError as from `next_result`."""
        self.start(work)
        return self.next_result(seconds)  # type: ignore[no-any-return]

    def start(self, work: Callable[[], Any]) -> None:
        """Start work after all earlier work; `next_result` returns the results in that order."""
        self._start(functools.partial(self._call, work))

    def _start(self, work: Callable[[], Any]) -> None:
        self._pending += 1
        self._requests.put(work)

    def _call(self, work: Callable[[], T]) -> T:
        with self._calling:
            return work()

    def block_calls(self, seconds: float) -> None:
        """Prevent that a call starts; wait at most `seconds` for the end of the running call."""
        self._calling.acquire(timeout=max(seconds, 0.0))

    def next_result(self, seconds: float) -> Any:
        """Return the result of the earliest unfetched work, or raise its error.

        Raises:
            TimeoutError: the work takes longer, and continues.
        """
        try:
            result, error = self._results.get(timeout=seconds)
        except queue.Empty as timeout:
            raise TimeoutError from timeout
        self._pending -= 1
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result

    def run_steps(self, work: Callable[[Steps], T], seconds: float) -> T:
        """Run work in steps of at most `seconds`; return its result or raise its error.

        After an exception nothing runs any more, except a step that takes longer.

        Raises:
            TimeoutError: a step takes longer. The step continues; the work does not.
        """
        steps = Steps(seconds, self._calling)
        try:
            self._start(functools.partial(work, steps))
            while True:
                try:
                    return self.next_result(max(steps.seconds_left, 0.0))  # type: ignore[no-any-return]
                except TimeoutError:
                    if self.is_idle or steps.give_up_if_late():
                        raise
        except BaseException:
            # If the work has not ended by itself and no step is late, this is an interrupt.
            if not self.is_idle and not steps.give_up_if_late():
                steps.give_up()
                with contextlib.suppress(Exception):
                    self.next_result(max(steps.seconds_left, 0.0))
            raise

    def _run(self) -> None:
        while True:
            try:
                work = self._requests.get(timeout=self._idle_seconds)
            except queue.Empty:
                if self._try_withdraw(self):
                    return
                continue
            if work is None:
                # An unfetched error would keep this frame, and the objects of the work, alive.
                while not self._results.empty():
                    self._results.get()
                return
            try:
                self._results.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                self._results.put((None, error))
            del work  # its objects are large


class WorkerThreadPool:
    """A pool of reused threads: starting a thread costs more than reading a small file.

    A thread ends when it had no work for `idle_seconds`, or when the pool is garbage-collected.

    An exiting process waits at most `exit_seconds` for running calls. Python ends a daemon thread
    when a call returns to Python, by unwinding its stack. Code in other languages than C, such as
    hdfs-native, then aborts the process. A daemon thread that borrows a thread during the exit
    waits forever.
    """

    def __init__(
        self, name: str, idle_seconds: float = _IDLE_SECONDS, exit_seconds: float = _EXIT_SECONDS
    ) -> None:
        self._name = name
        self._idle_seconds = idle_seconds
        self._idle: collections.deque[WorkerThread] = collections.deque()
        self._borrowed: set[WorkerThread] = set()
        self._is_exiting = threading.Event()
        weakref.finalize(self, _stop_all, self._idle).atexit = False
        arguments = (self._borrowed, self._is_exiting, os.getpid(), exit_seconds)
        weakref.finalize(self, _await_calls, *arguments)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[WorkerThread]:
        if self._is_exiting.is_set() and threading.current_thread().daemon:
            threading.Event().wait()
        try:
            thread = self._idle.pop()
        except IndexError:
            try_withdraw = functools.partial(_try_remove, self._idle)
            thread = WorkerThread(self._name, try_withdraw, self._idle_seconds)
        self._borrowed.add(thread)
        try:
            yield thread
        finally:
            self._borrowed.discard(thread)
            if thread.is_idle and not self._is_exiting.is_set():
                self._idle.append(thread)
            else:
                thread.stop()


def _try_remove(idle: collections.deque[WorkerThread], thread: WorkerThread) -> bool:
    """Remove an idle thread; return False if the thread was just borrowed."""
    try:
        idle.remove(thread)
    except ValueError:
        return False
    return True


def _stop_all(threads: collections.deque[WorkerThread]) -> None:
    for thread in threads:
        thread.stop()


def _await_calls(
    borrowed: set[WorkerThread], is_exiting: threading.Event, process: int, seconds: float
) -> None:
    if os.getpid() != process:  # a forked child has none of the threads
        return
    is_exiting.set()
    deadline, blocked = time.monotonic() + seconds, set[WorkerThread]()
    while threads := borrowed.difference(blocked):
        for thread in threads:
            thread.block_calls(deadline - time.monotonic())
        blocked |= threads
