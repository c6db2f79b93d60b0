"""Callers do not wait for calls that hang."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable

import pytest

from hopsgpu.storage.bounded_calls import BoundedCall, WorkerThreadPool
from tests.bounds import HANG_SECONDS
from tests.conftest import until


def run_in_pool(work: Callable[[], None]) -> None:
    with WorkerThreadPool("t").borrow() as worker:
        worker.run(work, 30)


def test_bounded_call_returns_its_result_or_raises_its_error() -> None:
    assert BoundedCall("t", lambda: 7).result(HANG_SECONDS) == 7
    with pytest.raises(ZeroDivisionError):
        BoundedCall("t", lambda: 1 // 0).result(HANG_SECONDS)


def test_bounded_call_that_hangs_can_be_waited_for_again() -> None:
    go = threading.Event()
    work = BoundedCall("t", go.wait)
    with pytest.raises(TimeoutError):
        work.result(0.01)
    go.set()
    assert work.result(HANG_SECONDS) is True


def test_threads_are_reused_by_one_borrower_at_a_time() -> None:
    pool = WorkerThreadPool("t")
    with pool.borrow() as first, pool.borrow() as second:
        threads = {
            first.run(threading.current_thread, 30),
            second.run(threading.current_thread, 30),
        }
        with pytest.raises(ZeroDivisionError):
            second.run(lambda: 1 // 0, 30)
    assert len(threads) == 2
    with pool.borrow() as third, pool.borrow() as fourth:
        again = {third.run(threading.current_thread, 30), fourth.run(threading.current_thread, 30)}
    assert again == threads


def test_thread_that_hangs_is_not_reused() -> None:
    go, pool = threading.Event(), WorkerThreadPool("t")
    with pytest.raises(TimeoutError), pool.borrow() as worker:
        thread = worker.run(threading.current_thread, 30)
        worker.run(go.wait, 0.01)
    with pool.borrow() as other:
        assert other.run(threading.current_thread, 30) is not thread
    go.set()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_started_work_continues_until_its_result_is_fetched() -> None:
    go = threading.Event()
    with WorkerThreadPool("t").borrow() as worker:
        worker.start(go.wait)
        assert not worker.is_idle
        go.set()
        assert worker.next_result(HANG_SECONDS) is True
        assert worker.is_idle


def test_threads_end_with_their_pool() -> None:
    pool = WorkerThreadPool("t")
    with pool.borrow() as worker:
        thread = worker.run(threading.current_thread, 30)
    assert thread.is_alive()
    del pool, worker
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "call", [lambda work: BoundedCall("t", work).result(HANG_SECONDS), run_in_pool]
)
def test_objects_of_failed_work_are_freed(
    call: Callable[[Callable[[], None]], None],
) -> None:
    class Connection:
        def fail(self) -> None:
            raise FileNotFoundError

    connection = Connection()
    seen = weakref.ref(connection)
    gc.disable()
    try:
        with contextlib.suppress(FileNotFoundError):
            call(connection.fail)
        del connection
        # The thread of the work may not have ended yet.
        assert until(lambda: seen() is None)
    finally:
        gc.enable()


def test_idle_thread_ends_unless_it_is_borrowed() -> None:
    pool = WorkerThreadPool("idle", idle_seconds=0.02)

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "idle"]

    with pool.borrow() as worker:
        (thread,) = threads()
        thread.join(0.2)
        assert thread.is_alive()
        assert worker.run(lambda: 1, 30) == 1
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    with pool.borrow() as other:
        assert other is not worker
        assert other.run(lambda: 2, 30) == 2


ENDING = """
    import atexit, sys, threading
    from hopsgpu.storage.bounded_calls import WorkerThreadPool

    begun = threading.Event()
    pool = WorkerThreadPool("t", exit_seconds=float(sys.argv[1]))
    atexit._clear()
    atexit.register(lambda: print("main", ask("main"), flush=True))
    import weakref
    atexit.register(weakref.finalize._exitfunc)

    def ask(what):
        with pool.borrow() as worker:
            return worker.run(lambda: what, 30)

    def call():
        begun.set()
        threading.Event().wait(float(sys.argv[2]))
        print("came back", flush=True)

    def daemon():
        with pool.borrow() as worker:
            worker.run(call, 30)
        print("and asked", ask("again"), flush=True)

    threading.Thread(target=daemon, daemon=True).start()
    begun.wait(900)
"""


@pytest.mark.parametrize(
    ("bound", "duration", "printed"),
    [("30", "0.5", ["came back", "main main"]), ("0.1", "60", ["main main"])],
)
def test_exiting_process_waits_for_calls_within_bounds_and_starts_none_of_daemons(
    bound: str, duration: str, printed: list[str]
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ENDING), bound, duration]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, printed), ran.stderr
