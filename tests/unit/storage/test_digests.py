"""The facts of a file are known before its end, and compared with the bytes that were read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hopsgpu.errors import ConfigError
from hopsgpu.storage.digests import MIN_AHEAD_BYTES, Digest, DigestingReader, FileFacts
from hopsgpu.storage.filesystem import BLOCK
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local import Local
from hopsgpu.storage.transfer import upload_files
from tests.bounds import HANG_SECONDS
from tests.conftest import until

SIZE = 5 * BLOCK + 1


def facts_of(content: bytes) -> FileFacts:
    return FileFacts(len(content), xxhash.xxh3_128_hexdigest(content))


def reader_of(source: Path, on_facts: Callable[[FileFacts], None]) -> DigestingReader:
    return DigestingReader(source, on_facts, 2 * BLOCK, BLOCK)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "weights.bin"
    file.write_bytes(os.urandom(SIZE))
    return file


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the second reader wait; once it does, the function lets it continue in a moment."""
    begun, go, read = threading.Event(), threading.Event(), os.preadv

    def slow(*given: Any) -> int:
        begun.set()
        go.wait(HANG_SECONDS)
        return read(*given)

    def release() -> None:
        assert begun.wait(HANG_SECONDS)
        threading.Timer(0.1, go.set).start()

    monkeypatch.setattr(os, "preadv", slow)
    return release


def digesting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hopsgpu-digest"]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, SIZE])
def test_early_facts_are_those_of_the_read_bytes(source: Path, size: int) -> None:
    content = source.read_bytes()[:size]
    source.write_bytes(content)
    reported: list[FileFacts] = []
    reader = reader_of(source, reported.append)
    assert b"".join(reader.blocks()) == content
    assert reader.facts == facts_of(content)
    assert reported and set(reported) == {reader.facts}
    assert digesting() == []


def test_facts_of_a_large_file_are_known_while_its_last_part_is_read(source: Path) -> None:
    reported: list[FileFacts] = []
    blocks = reader_of(source, reported.append).blocks()
    for _ in range(4):
        next(blocks)
        assert reported == []
    next(blocks)  # the first block of the last part
    assert until(lambda: reported == [facts_of(source.read_bytes())])
    assert len(list(blocks)) == 1


def test_change_after_the_early_facts_is_noticed(source: Path) -> None:
    reported: list[FileFacts] = []
    reader = reader_of(source, reported.append)
    blocks = reader.blocks()
    for _ in range(5):
        next(blocks)
    assert until(lambda: len(reported) == 1)
    with source.open("r+b") as file:
        file.seek(SIZE - 1)
        file.write(bytes([source.read_bytes()[-1] ^ 1]))
    list(blocks)
    assert reader.facts == facts_of(source.read_bytes()) != reported[0]


def test_reading_that_stops_half_way_leaves_no_thread(
    source: Path, held_up: Callable[[], None]
) -> None:
    reported: list[FileFacts] = []
    blocks = reader_of(source, reported.append).blocks()
    for _ in range(5):
        next(blocks)
    held_up()
    blocks.close()
    assert digesting() == [] and reported == []


def test_failed_upload_leaves_no_thread(
    source: Path,
    tmp_path: Path,
    held_up: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(local: Local, path: str, blocks: Iterator[bytes], *, should_replace: bool) -> None:
        for _ in range(5):
            next(blocks)
        held_up()
        raise ConfigError("not yours")

    monkeypatch.setattr(Local, "write", refuse)
    os.truncate(source, MIN_AHEAD_BYTES)
    lake = LakePath(f"file://{tmp_path}/lake")
    reported: list[tuple[str, FileFacts]] = []
    # The error's traceback keeps the frames of the upload.
    with pytest.raises(ConfigError, match="not yours") as _kept:
        upload_files({"w": source}, lake, on_facts=lambda *facts: reported.append(facts))
    assert digesting() == [] and reported == []


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [(os, "preadv", OSError("the disk is gone")), (threading.Thread, "start", RuntimeError("no"))],
)
def test_without_a_second_reader_the_facts_are_known_at_the_end(
    source: Path, monkeypatch: pytest.MonkeyPatch, of: object, name: str, error: Exception
) -> None:
    def fail(*given: object) -> int:
        raise error

    monkeypatch.setattr(of, name, fail)
    reported: list[FileFacts] = []
    list(reader_of(source, reported.append).blocks())
    assert reported == [facts_of(source.read_bytes())]


def test_second_reader_is_not_used_without_a_callback(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv")
    os.truncate(source, MIN_AHEAD_BYTES)
    reader = DigestingReader(source, None)
    assert b"".join(reader.blocks()) == source.read_bytes()
    assert reader.facts == facts_of(source.read_bytes())


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/gone"):
        list(DigestingReader(tmp_path / "gone", None).blocks())


def test_copy_of_a_digest_is_independent() -> None:
    one = Digest()
    one.update(b"a")
    other = one.copy()
    other.update(b"b")
    assert (one.facts, other.facts) == (facts_of(b"a"), facts_of(b"ab"))
