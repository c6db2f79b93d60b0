"""Record batches are written to the disk in a thread, and given up where that cannot be."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hopsgpu.data import cache
from hopsgpu.data.cache import Cache, CacheWriter
from tests.bounds import HANG_SECONDS

BATCHES = [pa.record_batch({"x": [number] * 3}) for number in range(4)]
SCHEMA = BATCHES[0].schema
KEY = "columns/0"


def kept(kept_by: Cache) -> list[Any] | None:
    chunks = kept_by.read(KEY)
    return None if chunks is None else [chunk.batch for chunk in chunks]


def keep_all(keeper: Cache) -> None:
    with CacheWriter() as writer, keeper.write_batches(KEY, SCHEMA, writer) as keep:
        for batch in BATCHES:
            keep(batch)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hopsgpu-keep"]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    keeper = Cache(tmp_path, 2**20)
    keep_all(keeper)
    assert kept(keeper) == BATCHES


def test_the_next_batch_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), cache._CacheFile._write

    def slow(writer: Any, batch: Any) -> None:
        assert go.wait(HANG_SECONDS)
        write(writer, batch)

    monkeypatch.setattr(cache._CacheFile, "_write", slow)
    keeper = Cache(tmp_path, 2**20)
    with CacheWriter() as writer, keeper.write_batches(KEY, SCHEMA, writer) as keep:
        keep(BATCHES[0])
        go.set()  # this thread goes on while that is to be written
        for batch in BATCHES[1:]:
            keep(batch)
    assert kept(keeper) == BATCHES


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_a_full_disk_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write, tried = cache._CacheFile._write, []

    def full(writer: Any, batch: Any) -> None:
        tried.append(batch)
        if len(tried) > failing:
            raise OSError(28, "No space left on device")
        write(writer, batch)

    monkeypatch.setattr(cache._CacheFile, "_write", full)
    keeper = Cache(tmp_path, 2**20)
    keep_all(keeper)
    assert kept(keeper) is None
    assert len(tried) == failing + 1
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(cache, "_WRITE_SECONDS", 0.05)
    monkeypatch.setattr(cache._CacheFile, "_write", lambda *_: go.wait(HANG_SECONDS))
    keeper = Cache(tmp_path, 2**20)
    keep_all(keeper)
    assert kept(keeper) is None
    (thread,) = threads()
    go.set()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_who_stops_half_way_keeps_nothing(tmp_path: Path) -> None:
    keeper = Cache(tmp_path, 2**20)
    with (
        pytest.raises(ZeroDivisionError),
        CacheWriter() as writer,
        keeper.write_batches(KEY, SCHEMA, writer) as keep,
    ):
        keep(BATCHES[0])
        raise ZeroDivisionError
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    assert kept(keeper) is None
    for thread in threads():
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_the_end_of_a_file_holds_nobody_up_but_who_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, try_rename = threading.Event(), cache._CacheFile.try_rename

    def slow(writer: Any, target: Path) -> bool:
        assert go.wait(HANG_SECONDS)
        return try_rename(writer, target)

    monkeypatch.setattr(cache._CacheFile, "try_rename", slow)
    keeper = Cache(tmp_path, 2**20)
    with CacheWriter() as writer:
        with keeper.write_batches(KEY, SCHEMA, writer) as keep:
            keep(BATCHES[0])
        writer.wait_for("columns/1")
        assert kept(keeper) is None, "it is not there yet, and was waited for"
        go.set()
        writer.wait_for(KEY)
        assert kept(keeper) == BATCHES[:1]


def test_what_is_about_to_be_there_counts_for_the_budget(tmp_path: Path) -> None:
    """A second file begins while the first one is ended."""
    keeper = Cache(tmp_path, 2**20)
    keep_all(keeper)
    size = (tmp_path / KEY).stat().st_size
    (tmp_path / KEY).unlink()
    keeper = Cache(tmp_path, 2 * size - 1 + (tmp_path / "columns").stat().st_size)
    with CacheWriter() as writer:
        for key in (KEY, "columns/1"):
            with keeper.write_batches(key, SCHEMA, writer) as keep:
                for batch in BATCHES:
                    keep(batch)
    assert kept(keeper) == BATCHES
    assert not (tmp_path / "columns" / "1").exists()


def test_a_cache_that_is_full_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.data")
    keeper = Cache(tmp_path, 10)
    for _ in range(2):
        keep_all(keeper)
    (message,) = caplog.messages
    assert message.startswith(f"caches no more rows in {tmp_path}: the budget of 10 bytes")
