"""A file's next block is fetched while hdfs-native writes the one before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hopsgpu.stores.hdfs import Hdfs

SECONDS = 30


class Writer:
    """hdfs-native's writer, which waits where it is told to."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.begun = threading.Event()
        self.go = threading.Event()

    def write(self, block: bytes) -> None:
        self.begun.set()
        assert self.go.wait(SECONDS)
        self.done.append(block)

    def close(self) -> None:
        self.done.append("closed")


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def hdfs(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Hdfs:
    hdfs = Hdfs("hdfs://nowhere.invalid:1", quick=True)

    class Client:
        def create(self, *given: Any) -> Writer:
            return writer

    monkeypatch.setattr(hdfs, "_client", Client())
    return hdfs


def test_the_next_block_is_fetched_meanwhile(hdfs: Hdfs, writer: Writer) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"first"
        assert writer.begun.wait(SECONDS) and writer.done == []
        writer.go.set()
        yield b""
        yield b"second"

    hdfs.write("/file", blocks(), replace=True)
    assert writer.done == [b"first", b"second", "closed"]


def test_what_cannot_be_fetched_leaves_nothing_on_its_way(hdfs: Hdfs, writer: Writer) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"first"
        assert writer.begun.wait(SECONDS)
        threading.Timer(0.1, writer.go.set).start()
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        hdfs.write("/file", blocks(), replace=True)
    assert writer.done == [b"first"]


def test_why_nothing_could_be_fetched_is_said_whatever_the_write_says(
    hdfs: Hdfs, writer: Writer
) -> None:
    def refuse(block: bytes) -> None:
        raise RuntimeError("no")

    def blocks() -> Iterator[bytes]:
        yield b"first"
        raise KeyboardInterrupt

    writer.write = refuse  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        hdfs.write("/file", blocks(), replace=True)


def test_an_error_of_writing_ends_it(hdfs: Hdfs, writer: Writer) -> None:
    fetched: list[int] = []

    def refuse(block: bytes) -> None:
        raise RuntimeError('RPCError("org.apache.hadoop.fs.ParentNotDirectoryException", "no")')

    def blocks() -> Iterator[bytes]:
        for number in range(5):
            fetched.append(number)
            yield b"block"

    writer.write = refuse  # type: ignore[method-assign]
    with pytest.raises(Exception, match="no") as told:
        hdfs.write("/file", blocks(), replace=True)
    assert not isinstance(told.value, RuntimeError)
    assert fetched == [0, 1] and writer.done == []


@pytest.mark.parametrize("blocks", [[], [b""]])
def test_an_empty_file_is_closed(hdfs: Hdfs, writer: Writer, blocks: list[bytes]) -> None:
    hdfs.write("/file", blocks, replace=True)
    assert writer.done == ["closed"]
