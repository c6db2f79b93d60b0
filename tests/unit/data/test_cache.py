"""Record batches are written to the disk in a thread, and dropped if the disk fails."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hopsgpu.data import cache as cache_module
from hopsgpu.data.cache import Cache, CacheWriter
from tests.bounds import HANG_SECONDS

BATCHES = [pa.record_batch({"x": [number] * 3}) for number in range(4)]
SCHEMA = BATCHES[0].schema
KEY = "columns/0"


def cached(cache: Cache) -> list[Any] | None:
    chunks = cache.read(KEY)
    return None if chunks is None else [chunk.batch for chunk in chunks]


def write_all(cache: Cache) -> None:
    with CacheWriter() as writer, cache.write_batches(KEY, SCHEMA, writer) as write:
        for batch in BATCHES:
            write(batch)


class HungDisk:
    """Work of a cache's thread that takes until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self) -> None:
        assert self.go.wait(HANG_SECONDS)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hopsgpu-keep"]


def test_cached_batches_are_those_that_were_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2**20)
    write_all(cache)
    assert cached(cache) == BATCHES


def test_reader_continues_while_a_batch_is_written(tmp_path: Path) -> None:
    cache, disk = Cache(tmp_path, 2**20), HungDisk()
    with CacheWriter() as writer, cache.write_batches(KEY, SCHEMA, writer) as write:
        writer.put(disk)
        write(BATCHES[0])
        disk.go.set()
        for batch in BATCHES[1:]:
            write(batch)
    assert cached(cache) == BATCHES


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_full_disk_caches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write, tried = cache_module._CacheFile._write, []

    def full(writer: Any, batch: Any) -> None:
        tried.append(batch)
        if len(tried) > failing:
            raise OSError(28, "No space left on device")
        write(writer, batch)

    monkeypatch.setattr(cache_module._CacheFile, "_write", full)
    cache = Cache(tmp_path, 2**20)
    write_all(cache)
    assert cached(cache) is None
    assert len(tried) == failing + 1
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_disk_that_hangs_delays_the_reader_only_once(tmp_path: Path) -> None:
    cache, disk = Cache(tmp_path, 2**20), HungDisk()
    with CacheWriter(0.05) as writer, cache.write_batches(KEY, SCHEMA, writer) as write:
        writer.put(disk)
        for batch in BATCHES:
            write(batch)
    assert cached(cache) is None
    (thread,) = threads()
    disk.go.set()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_error_of_the_reader_caches_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2**20)
    with (
        pytest.raises(ZeroDivisionError),
        CacheWriter() as writer,
        cache.write_batches(KEY, SCHEMA, writer) as write,
    ):
        write(BATCHES[0])
        raise ZeroDivisionError
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    assert cached(cache) is None
    for thread in threads():
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_only_a_reader_of_the_file_waits_for_its_end(tmp_path: Path) -> None:
    cache, disk = Cache(tmp_path, 2**20), HungDisk()
    with CacheWriter() as writer:
        with cache.write_batches(KEY, SCHEMA, writer) as write:
            write(BATCHES[0])
            writer.put(disk)
        writer.wait_for("columns/1")
        assert cached(cache) is None, "the file of another key was waited for"
        disk.go.set()
        writer.wait_for(KEY)
        assert cached(cache) == BATCHES[:1]


def test_file_that_is_being_written_counts_for_the_budget(tmp_path: Path) -> None:
    """A second file begins while the first one is completed."""
    cache = Cache(tmp_path, 2**20)
    write_all(cache)
    size = (tmp_path / KEY).stat().st_size
    (tmp_path / KEY).unlink()
    cache = Cache(tmp_path, 2 * size - 1 + (tmp_path / "columns").stat().st_size)
    with CacheWriter() as writer:
        for key in (KEY, "columns/1"):
            with cache.write_batches(key, SCHEMA, writer) as write:
                for batch in BATCHES:
                    write(batch)
    assert cached(cache) == BATCHES
    assert not (tmp_path / "columns" / "1").exists()


def test_full_cache_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.data")
    cache = Cache(tmp_path, 10)
    for _ in range(2):
        write_all(cache)
    (message,) = caplog.messages
    assert f"{tmp_path}: " in message and "10 bytes" in message
