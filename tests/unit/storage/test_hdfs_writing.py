"""A file's blocks are fetched and written in one thread, and each write has limited time."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hopsgpu.storage.bounded_calls import WorkerThread
from hopsgpu.storage.hdfs import Hdfs
from tests.bounds import HANG_SECONDS
from tests.conftest import until


class Writer:
    """A writer like hdfs-native's, which waits for `go`."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.begun = threading.Event()
        self.go = threading.Event()

    def write(self, block: bytes) -> None:
        self.begun.set()
        assert self.go.wait(HANG_SECONDS)
        self.done.append(block)

    def close(self) -> None:
        self.done.append("closed")


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def seconds() -> float:
    """The longest write of a block."""
    return 180.0


@pytest.fixture
def hdfs(writer: Writer, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Hdfs:
    hdfs = Hdfs("hdfs://nowhere.invalid:1", should_fail_fast=True, write_seconds=seconds)

    class Client:
        def create(self, *given: Any) -> Writer:
            return writer

    monkeypatch.setattr(hdfs, "_client", Client())
    return hdfs


def test_blocks_are_written_one_after_another(hdfs: Hdfs, writer: Writer) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"first"
        assert writer.done == [b"first"]
        yield b""
        yield b"second"

    writer.go.set()
    hdfs.write("/file", blocks(), should_replace=True)
    assert writer.done == [b"first", b"second", "closed"]


@pytest.mark.parametrize("error", [ValueError("gone"), TimeoutError("gone"), RuntimeError("gone")])
def test_error_of_the_blocks_is_raised(hdfs: Hdfs, writer: Writer, error: Exception) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"first"
        raise error

    writer.go.set()
    with pytest.raises(type(error), match="gone"):
        hdfs.write("/file", blocks(), should_replace=True)
    assert writer.done == [b"first"]


@pytest.mark.parametrize("seconds", [0.1])
def test_write_that_hangs_is_abandoned_and_nothing_follows_it(hdfs: Hdfs, writer: Writer) -> None:
    threads: list[threading.Thread] = []

    def blocks() -> Iterator[bytes]:
        threads.append(threading.current_thread())
        yield b"first"
        yield b"never"

    with contextlib.closing(blocks()) as given, pytest.raises(OSError, match="0 s"):
        hdfs.write("/file", given, should_replace=True)
    writer.go.set()
    threads[0].join(HANG_SECONDS)
    assert not threads[0].is_alive()
    assert writer.done == [b"first"]


@pytest.mark.parametrize("seconds", [0.1])
def test_blocks_of_an_abandoned_write_are_freed(hdfs: Hdfs, writer: Writer) -> None:
    class Blocks:
        def __iter__(self) -> Iterator[bytes]:
            yield b"first"
            yield b"never"

    blocks = Blocks()
    seen = weakref.ref(blocks)
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            hdfs.write("/file", blocks, should_replace=True)
        del blocks
        writer.go.set()
        assert until(lambda: seen() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds", [0.5])
def test_fetching_a_block_may_take_longer(hdfs: Hdfs, writer: Writer) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"first"
        threading.Event().wait(1.2)
        yield b"second"

    writer.go.set()
    hdfs.write("/file", blocks(), should_replace=True)
    assert writer.done == [b"first", b"second", "closed"]


def test_nothing_is_written_after_an_interrupt(
    hdfs: Hdfs, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_result, waits = WorkerThread.next_result, []

    def interrupted(thread: WorkerThread, seconds: float) -> Any:
        waits.append(seconds)
        if len(waits) == 2:  # the first was for the writer
            assert writer.begun.wait(HANG_SECONDS)
            threading.Timer(0.1, writer.go.set).start()
            raise KeyboardInterrupt
        return next_result(thread, seconds)

    monkeypatch.setattr(WorkerThread, "next_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hdfs.write("/file", [b"first", b"never"], should_replace=True)
    assert writer.done == [b"first"]


def test_error_of_the_writer_ends_the_write(hdfs: Hdfs, writer: Writer) -> None:
    fetched: list[int] = []

    def refuse(block: bytes) -> None:
        raise RuntimeError('RPCError("org.apache.hadoop.fs.ParentNotDirectoryException", "no")')

    def blocks() -> Iterator[bytes]:
        for number in range(5):
            fetched.append(number)
            yield b"block"

    writer.write = refuse  # type: ignore[method-assign]
    with pytest.raises(Exception, match="no") as raised:
        hdfs.write("/file", blocks(), should_replace=True)
    assert not isinstance(raised.value, RuntimeError)
    assert fetched == [0] and writer.done == []


@pytest.mark.parametrize("blocks", [[], [b""]])
def test_empty_file_is_closed(hdfs: Hdfs, writer: Writer, blocks: list[bytes]) -> None:
    hdfs.write("/file", blocks, should_replace=True)
    assert writer.done == ["closed"]
