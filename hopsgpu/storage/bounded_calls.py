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
# How long a process that ends waits for calls that are under way.
_LAST_SECONDS = 5.0


class BoundedCall(Generic[T]):
    """Work that is done in a thread of its own, and begins at once.

    The thread is a daemon: if the work hangs, the process ends without it.
    """

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in whoever asks
            self._error = error
        finally:
            self._done.set()
            # The error's traceback has this frame: what the frame holds, connections too, would
            # stay until the garbage collection.
            del self

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the work, at most `seconds`; return whether it has ended."""
        return self._done.wait(seconds)

    def result(self, seconds: float) -> T:
        """Return the result of the work, or raise what it raised.

        Raises:
            TimeoutError: the work takes longer; the caller may ask again.
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
    """The steps of some work: each may take a limited time, and any time may pass between them.

    One thread does the work, and another waits for it. Once the work is given up, no further step
    begins; a step that is under way goes on to its end.

    Args:
        seconds: how long a step may take.
        calling: held while a step is under way.
    """

    def __init__(self, seconds: float, calling: threading.Lock) -> None:
        self._seconds = seconds
        self._calling = calling
        self._lock = threading.Lock()
        self._began: float | None = None
        self._given_up = False

    def do(self, step: Callable[[], T]) -> T:
        """Do a step, in the thread of the work.

        Raises:
            TimeoutError: the work was given up.
        """
        self._note(time.monotonic())
        try:
            with self._calling:
                return step()
        finally:
            self._note(None)

    def _note(self, began: float | None) -> None:
        with self._lock:
            if self._given_up:
                raise TimeoutError
            self._began = began

    @property
    def left(self) -> float:
        """Return the seconds that the step under way has left; all of them if there is no step."""
        began = self._began
        return self._seconds - (0.0 if began is None else time.monotonic() - began)

    def give_up_late(self) -> bool:
        """Give up the work if a step takes too long; return whether one does."""
        with self._lock:
            late = self._began is not None and self.left <= 0
            self._given_up |= late
            return late

    def give_up(self) -> None:
        """Let no other step begin."""
        with self._lock:
            self._given_up = True


class WorkerThread:
    """A thread that does one piece of work after another; callers wait a limited time for each.

    It is a daemon, as in `BoundedCall`; once some work took too long, the hand is of no more use.

    Args:
        name: name of the thread.
        may_end: called when the hand had nothing to do for a while; returns whether nobody will
            give it more work.
    """

    def __init__(self, name: str, may_end: Callable[[WorkerThread], bool]) -> None:
        self._under_way = 0
        self._calling = threading.Lock()
        self._may_end = may_end
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def free(self) -> bool:
        """Return whether no work that the hand was given is still under way."""
        return self._under_way == 0

    def end(self) -> None:
        """End the thread, after the work that it was given."""
        self._asked.put(None)

    def do(self, work: Callable[[], T], seconds: float) -> T:
        """Return the result of some work, or raise what it raised.

        Raises:
            TimeoutError: the work takes longer, and goes on.
        """
        self.begin(work)
        return self.end_of(seconds)  # type: ignore[no-any-return]

    def begin(self, work: Callable[[], Any]) -> None:
        """Begin some work after what was begun before; `end_of` returns results in that order."""
        self._begin(functools.partial(self._call, work))

    def _begin(self, work: Callable[[], Any]) -> None:
        self._under_way += 1
        self._asked.put(work)

    def _call(self, work: Callable[[], T]) -> T:
        with self._calling:
            return work()

    def rest(self, seconds: float) -> None:
        """Wait for the call that is under way, at most `seconds`, and let none begin after it."""
        self._calling.acquire(timeout=max(seconds, 0.0))

    def end_of(self, seconds: float) -> Any:
        """Return the result of the work that was begun first, or raise what it raised.

        Raises:
            TimeoutError: the work takes longer, and goes on.
        """
        try:
            result, error = self._done.get(timeout=seconds)
        except queue.Empty as late:
            raise TimeoutError from late
        self._under_way -= 1
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result

    def do_steps(self, work: Callable[[Steps], T], seconds: float) -> T:
        """Do work in steps, each of which may take `seconds`; return its result or raise its error.

        When this has raised, nothing is under way any more, except a step that takes longer than
        that.

        Raises:
            TimeoutError: a step takes longer, and goes on; the work does not.
        """
        steps = Steps(seconds, self._calling)
        try:
            self._begin(functools.partial(work, steps))
            while True:
                try:
                    return self.end_of(max(steps.left, 0.0))  # type: ignore[no-any-return]
                except TimeoutError:
                    if self.free or steps.give_up_late():
                        raise
        except BaseException:
            # If the work has not ended by itself and no step is late, this is an interrupt.
            if not self.free and not steps.give_up_late():
                steps.give_up()
                with contextlib.suppress(Exception):
                    self.end_of(max(steps.left, 0.0))
            raise

    def _run(self) -> None:
        while True:
            try:
                work = self._asked.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                if self._may_end(self):
                    return
                continue
            if work is None:
                # An error that nobody waited for keeps this frame alive, and what the work used.
                while not self._done.empty():
                    self._done.get()
                return
            try:
                self._done.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in whoever asks
                self._done.put((None, error))
            del work  # the objects that it holds are large


class WorkerThreadPool:
    """A pool of threads: each is lent, and then kept for the next borrower.

    A thread costs more than a small file: to start, and because its memory is new to the system.
    A thread ends when it had nothing to do for some seconds, or when nobody has the
    `WorkerThreadPool` any more.

    A process that ends waits for their calls, some seconds at most: Python ends daemon threads by
    unwinding their stacks as they return to it, and code that is not written in C, such as
    hdfs-native, then aborts the process. Daemon threads that want a thread of the pool after that
    wait for the end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._free: collections.deque[WorkerThread] = collections.deque()
        self._lent: set[WorkerThread] = set()
        self._over = threading.Event()
        weakref.finalize(self, _end, self._free).atexit = False
        weakref.finalize(self, _rest, self._lent, self._over, os.getpid())

    @contextlib.contextmanager
    def one(self) -> Iterator[WorkerThread]:
        """Yield a hand that nobody else has meanwhile."""
        if self._over.is_set() and threading.current_thread().daemon:
            threading.Event().wait()
        try:
            hand = self._free.pop()
        except IndexError:
            hand = WorkerThread(self._name, functools.partial(_withdrawn, self._free))
        self._lent.add(hand)
        try:
            yield hand
        finally:
            self._lent.discard(hand)
            if hand.free and not self._over.is_set():
                self._free.append(hand)
            else:
                hand.end()


def _withdrawn(hands: collections.deque[WorkerThread], hand: WorkerThread) -> bool:
    """Take a hand out of those that can be lent; return False if somebody was quicker."""
    try:
        hands.remove(hand)
    except ValueError:
        return False
    return True


def _end(hands: collections.deque[WorkerThread]) -> None:
    for hand in hands:
        hand.end()


def _rest(lent: set[WorkerThread], over: threading.Event, process: int) -> None:
    if os.getpid() != process:  # a forked child has none of the threads
        return
    over.set()
    until, rested = time.monotonic() + _LAST_SECONDS, set[WorkerThread]()
    while hands := lent.difference(rested):
        for hand in hands:
            hand.rest(until - time.monotonic())
        rested |= hands
