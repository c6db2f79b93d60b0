from __future__ import annotations

import functools
import hashlib
import threading
from pathlib import Path

import pytest

from hopsgpu.attempts.return_values import Value
from hopsgpu.errors import StoreError
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import until


def test_works_of_a_key_are_done_in_order_and_the_latest_replaces_those_that_wait() -> None:
    done: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()
    background = Background("records")

    def first() -> None:
        begun.set()
        assert goes_on.wait(HANG_SECONDS)
        done.append(0)

    background.put("a", first)
    assert begun.wait(HANG_SECONDS)
    for number in range(1, 20):
        background.put("a", functools.partial(done.append, number))
    goes_on.set()
    background.flush(HANG_SECONDS)
    assert done == [0, 19]
    assert background.problems() == ()


def test_works_of_several_keys_are_done_at_once_by_threads_that_end() -> None:
    together = threading.Barrier(8)
    background = Background("records of this test")
    for number in range(8):
        background.put(str(number), lambda: together.wait(HANG_SECONDS) and None)
    background.flush(HANG_SECONDS)
    assert background.problems() == ()
    assert until(lambda: not [t for t in threading.enumerate() if t.name == "records of this test"])
    done = threading.Event()
    background.put("again", done.set)
    background.flush(HANG_SECONDS)
    assert done.is_set()


def test_problems_are_kept_once_and_end_nothing() -> None:
    background = Background("records")
    done = threading.Event()

    def refuse() -> None:
        raise StoreError("no room on the lake")

    background.put("a", refuse)
    background.flush(HANG_SECONDS)
    background.put("b", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    background.put("c", done.set)
    background.flush(HANG_SECONDS)
    assert done.is_set()
    assert background.problems() == ("no room on the lake", "ZeroDivisionError: division by zero")
    assert background.problems() == ()


def test_wait_for_a_hung_lake_is_bounded_and_a_problem() -> None:
    background = Background("records")
    goes_on = threading.Event()
    background.put("the record", goes_on.wait)  # type: ignore[arg-type]
    background.flush(0.05)
    goes_on.set()
    (problem,) = background.problems()
    assert "0.05 s: the record" in problem
    background.flush(HANG_SECONDS)
    assert background.problems() == ()


def test_work_follows_earlier_work_of_its_key_only() -> None:
    done: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()
    background = Background("records")

    def slow() -> None:
        begun.set()
        assert goes_on.wait(HANG_SECONDS)
        done.append("running")

    background.put("a", slow)
    assert begun.wait(HANG_SECONDS)
    background.put("a", lambda: done.append("waiting"))
    background.put_after_all("b", lambda: done.append("behind"))
    background.put_after_all("c", lambda: done.append("behind that"))
    later = threading.Event()
    background.put("d", later.set)
    assert later.wait(HANG_SECONDS) and done == []
    goes_on.set()
    background.flush(HANG_SECONDS)
    assert done == ["running", "waiting", "behind", "behind that"]
    background.put_after_all("b", lambda: done.append("again"))
    background.flush(HANG_SECONDS)
    assert done[-1] == "again" and background.problems() == ()


def test_try_put_never_waits_and_refuses_if_much_is_pending() -> None:
    background = Background("records")
    goes_on, done = threading.Event(), []
    all_busy = threading.Barrier(33)

    def busy() -> None:
        all_busy.wait(HANG_SECONDS)
        goes_on.wait(HANG_SECONDS)

    for number in range(32):
        background.put(f"busy {number}", busy)
    all_busy.wait(HANG_SECONDS)
    taken = [background.try_put(str(n), functools.partial(done.append, n)) for n in range(100)]
    assert taken == [True] * 64 + [False] * 36
    # One that waits already is replaced, and something more important finds room.
    assert background.try_put("0", functools.partial(done.append, -1))
    background.put("record", functools.partial(done.append, 1000))
    goes_on.set()
    background.flush(HANG_SECONDS)
    assert {-1, 1000} <= set(done) and 0 not in done
    assert len(done) == sum(taken) + 1


def test_changed_value_on_the_lake_is_refused(tmp_path: Path) -> None:
    directory = LakePath(f"file://{tmp_path}")
    (tmp_path / "value").write_bytes(b"pickled")
    digest = hashlib.sha256(b"pickled").hexdigest()
    assert Value(file="value", digest=digest).content(directory) == b"pickled"
    (tmp_path / "value").write_bytes(b"another's")
    with pytest.raises(StoreError, match="SHA-256"):
        Value(file="value", digest=digest).content(directory)
    assert Value(b"inline").content(directory) == b"inline"
