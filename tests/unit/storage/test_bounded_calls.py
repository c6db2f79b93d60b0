"""What may hang is not waited for."""

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

from hopsgpu.storage import bounded_calls
from hopsgpu.storage.bounded_calls import BoundedCall, WorkerThreadPool
from tests.bounds import HANG_SECONDS
from tests.conftest import until


def run_in_pool(work: Callable[[], None]) -> None:
    with WorkerThreadPool("t").borrow() as worker:
        worker.run(work, 30)


def test_a_result_and_an_error_come_back() -> None:
    assert BoundedCall("t", lambda: 7).result(HANG_SECONDS) == 7
    with pytest.raises(ZeroDivisionError):
        BoundedCall("t", lambda: 1 // 0).result(HANG_SECONDS)


def test_what_hangs_is_left_and_can_be_asked_again() -> None:
    go = threading.Event()
    work = BoundedCall("t", go.wait)
    with pytest.raises(TimeoutError):
        work.result(0.01)
    go.set()
    assert work.result(HANG_SECONDS) is True


def test_threads_are_lent_again_and_to_one_at_a_time() -> None:
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


def test_a_thread_that_hangs_is_not_lent_again() -> None:
    go, pool = threading.Event(), WorkerThreadPool("t")
    with pytest.raises(TimeoutError), pool.borrow() as worker:
        thread = worker.run(threading.current_thread, 30)
        worker.run(go.wait, 0.01)
    with pool.borrow() as other:
        assert other.run(threading.current_thread, 30) is not thread
    go.set()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_what_was_begun_goes_on_until_it_is_asked_for() -> None:
    go = threading.Event()
    with WorkerThreadPool("t").borrow() as worker:
        worker.start(go.wait)
        assert not worker.is_idle
        go.set()
        assert worker.next_result(30) is True
        assert worker.is_idle


def test_threads_end_when_nobody_has_them() -> None:
    pool = WorkerThreadPool("t")
    with pool.borrow() as worker:
        thread = worker.run(threading.current_thread, 30)
    assert thread.is_alive()
    del pool, worker
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "ask", [lambda work: BoundedCall("t", work).result(HANG_SECONDS), run_in_pool]
)
def test_what_raised_is_let_go_of_at_once(ask: Callable[[Callable[[], None]], None]) -> None:
    class Connection:
        def fail(self) -> None:
            raise FileNotFoundError

    connection = Connection()
    seen = weakref.ref(connection)
    gc.disable()
    try:
        with contextlib.suppress(FileNotFoundError):
            ask(connection.fail)
        del connection
        # The thread that has done it may be at its end still.
        assert until(lambda: seen() is None)
    finally:
        gc.enable()


def test_a_thread_that_nobody_needs_ends_and_one_that_is_lent_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_calls, "_IDLE_SECONDS", 0.02)
    pool = WorkerThreadPool("idle")

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "idle"]

    with pool.borrow() as worker:
        (lent,) = threads()
        lent.join(0.2)
        assert lent.is_alive()
        assert worker.run(lambda: 1, 30) == 1
    lent.join(HANG_SECONDS)
    assert not lent.is_alive()
    with pool.borrow() as other:
        assert other is not worker
        assert other.run(lambda: 2, 30) == 2


ENDING = """
    import atexit, sys, threading
    from hopsgpu.storage import bounded_calls

    bounded_calls._EXIT_SECONDS = float(sys.argv[1])
    begun = threading.Event()
    pool = bounded_calls.WorkerThreadPool("t")
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
    begun.wait(30)
"""


@pytest.mark.parametrize(
    ("bound", "takes", "said"),
    [("30", "0.5", ["came back", "main main"]), ("0.1", "60", ["main main"])],
)
def test_a_process_that_ends_waits_for_calls_for_a_while_and_begins_none_of_daemons(
    bound: str, takes: str, said: list[str]
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ENDING), bound, takes]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, said), ran.stderr
