"""What may hang is not waited for."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from hopsgpu.stores.bounded import Bounded, Hand
from tests.conftest import until


def asked_of_a_hand(work: Callable[[], None]) -> None:
    with Hand("t") as hand:
        hand.do(work, 30)


def test_a_result_and_an_error_come_back() -> None:
    assert Bounded("t", lambda: 7).result(30) == 7
    with pytest.raises(ZeroDivisionError):
        Bounded("t", lambda: 1 // 0).result(30)


def test_what_hangs_is_left_and_can_be_asked_again() -> None:
    go = threading.Event()
    work = Bounded("t", go.wait)
    with pytest.raises(TimeoutError):
        work.result(0.01)
    go.set()
    assert work.result(30) is True


def test_a_hand_does_one_thing_after_another_in_one_thread() -> None:
    with Hand("t") as hand:
        first = hand.do(threading.current_thread, 30)
        with pytest.raises(ZeroDivisionError):
            hand.do(lambda: 1 // 0, 30)
        assert hand.do(threading.current_thread, 30) is first
    first.join(30)
    assert not first.is_alive()


def test_a_hand_that_hangs_is_left() -> None:
    go = threading.Event()
    with Hand("t") as hand:
        thread = hand.do(threading.current_thread, 30)
        with pytest.raises(TimeoutError):
            hand.do(go.wait, 0.01)
    go.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("ask", [lambda work: Bounded("t", work).result(30), asked_of_a_hand])
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
        assert until(lambda: seen() is None, 30)
    finally:
        gc.enable()
