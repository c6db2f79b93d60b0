"""What a file is recognised by is known ahead of its end, and compared with what was read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hopsgpu.errors import ConfigError
from hopsgpu.storage import digests
from hopsgpu.storage.digests import Digest, DigestingReader, FileFacts
from hopsgpu.storage.filesystem import BLOCK
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local import Local
from hopsgpu.storage.transfer import upload_files
from tests.bounds import HANG_SECONDS
from tests.conftest import until

SIZE = 5 * BLOCK + 1


def facts_of(content: bytes) -> FileFacts:
    return FileFacts(len(content), xxhash.xxh3_128_hexdigest(content))


@pytest.fixture(autouse=True)
def little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_AHEAD_BYTES", 2 * BLOCK)
    monkeypatch.setattr(digests, "_MIN_AHEAD_BYTES", BLOCK)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "weights.bin"
    file.write_bytes(os.urandom(SIZE))
    return file


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The second reader waits; once it does, the function has it go on in a moment."""
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
def test_what_is_said_before_is_what_is_read(source: Path, size: int) -> None:
    content = source.read_bytes()[:size]
    source.write_bytes(content)
    told: list[FileFacts] = []
    reading = DigestingReader(source, told.append)
    assert b"".join(reading.blocks()) == content
    assert reading.facts == facts_of(content)
    assert told and set(told) == {reading.facts}
    assert digesting() == []


def test_a_large_file_is_known_while_its_last_part_is_on_its_way(source: Path) -> None:
    told: list[FileFacts] = []
    blocks = DigestingReader(source, told.append).blocks()
    for _ in range(4):
        next(blocks)
        assert told == []
    next(blocks)  # of what is read ahead the first
    assert until(lambda: told == [facts_of(source.read_bytes())])
    assert len(list(blocks)) == 1


def test_what_is_changed_after_it_was_told_is_seen(source: Path) -> None:
    told: list[FileFacts] = []
    reading = DigestingReader(source, told.append)
    blocks = reading.blocks()
    for _ in range(5):
        next(blocks)
    assert until(lambda: len(told) == 1)
    with source.open("r+b") as file:
        file.seek(SIZE - 1)
        file.write(bytes([source.read_bytes()[-1] ^ 1]))
    list(blocks)
    assert reading.facts == facts_of(source.read_bytes()) != told[0]


def test_who_stops_half_way_leaves_no_reader(source: Path, held_up: Callable[[], None]) -> None:
    told: list[FileFacts] = []
    blocks = DigestingReader(source, told.append).blocks()
    for _ in range(5):
        next(blocks)
    held_up()
    blocks.close()
    assert digesting() == [] and told == []


def test_an_upload_that_fails_leaves_no_reader(
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
    lake = LakePath(f"file://{tmp_path}/lake")
    told: list[tuple[str, FileFacts]] = []
    with pytest.raises(ConfigError, match="not yours") as kept:
        upload_files({"w": source}, lake, on_facts=lambda *facts: told.append(facts))
    assert kept.value.__traceback__ is not None  # which has all that was under way
    assert digesting() == [] and told == []


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [(os, "preadv", OSError("the disk is gone")), (threading.Thread, "start", RuntimeError("no"))],
)
def test_without_a_second_reader_it_is_known_at_the_end(
    source: Path, monkeypatch: pytest.MonkeyPatch, of: object, name: str, error: Exception
) -> None:
    def fail(*given: object) -> int:
        raise error

    monkeypatch.setattr(of, name, fail)
    told: list[FileFacts] = []
    list(DigestingReader(source, told.append).blocks())
    assert told == [facts_of(source.read_bytes())]


def test_nobody_who_asks_needs_no_second_reader(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv")
    reading = DigestingReader(source, None)
    assert b"".join(reading.blocks()) == source.read_bytes()
    assert reading.facts == facts_of(source.read_bytes())


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.* cannot be read"):
        list(DigestingReader(tmp_path / "gone", None).blocks())


def test_a_copy_goes_its_own_way() -> None:
    one = Digest()
    one.update(b"a")
    other = one.copy()
    other.update(b"b")
    assert (one.facts, other.facts) == (facts_of(b"a"), facts_of(b"ab"))
