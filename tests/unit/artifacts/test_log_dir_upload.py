"""Logs for TensorBoard on their way to the lake."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import hopsgpu
from hopsgpu.artifacts.log_dir_upload import LogDirUploader
from hopsgpu.errors import StoreError
from hopsgpu.rank.context import VARIABLE, Context
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

EVENTS = "events.out.tfevents.1700000000.node1.7.0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "rank-0" / "logs"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def lake(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake/rank-0")


def uploader_of(logs: Path, lake: LakePath, clock: Clock | None = None) -> LogDirUploader:
    return LogDirUploader(logs, lake, threading.Event(), clock or Clock())


def on_lake(lake: LakePath) -> dict[str, bytes]:
    root = Path(lake.path)
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_event_files_are_appended_to(
    logs: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended: list[tuple[bytes, int]] = []
    append = LakePath.append

    def noted(target: LakePath, content: bytes, at: int) -> int:
        appended.append((content, at))
        return append(target, content, at)

    monkeypatch.setattr(LakePath, "append", noted)
    uploader = uploader_of(logs, lake)
    assert uploader.upload_changes() == [] and on_lake(lake) == {}
    (logs / "train").mkdir()
    for name in (EVENTS, f"train/{EVENTS}"):
        (logs / name).write_bytes(b"one")
    assert uploader.upload_changes() == []
    assert on_lake(lake) == {EVENTS: b"one", f"train/{EVENTS}": b"one"}
    with (logs / EVENTS).open("ab") as file:
        file.write(b" two")
    for _ in range(2):
        assert uploader.upload_changes() == []
    assert on_lake(lake) == {EVENTS: b"one two", f"train/{EVENTS}": b"one"}
    assert appended == [(b"one", 0), (b"one", 0), (b" two", 3)]


def test_event_file_of_an_earlier_attempt_or_that_shrank_is_replaced(
    logs: Path, lake: LakePath
) -> None:
    lake.make()
    (lake / EVENTS).write(b"of an earlier attempt")
    (logs / EVENTS).write_bytes(b"new")
    uploader = uploader_of(logs, lake)
    uploader.upload_changes()
    assert on_lake(lake) == {EVENTS: b"new"}
    (logs / EVENTS).write_bytes(b"x")
    uploader.upload_changes()
    assert on_lake(lake) == {EVENTS: b"x"}


def test_other_files_are_replaced_with_pauses(
    logs: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    replace = LakePath.replace

    def takes_a_second(target: LakePath, content: bytes) -> None:
        clock.now += 1.0
        replace(target, content)

    monkeypatch.setattr(LakePath, "replace", takes_a_second)
    uploader = uploader_of(logs, lake, clock)

    def look(content: bytes, *, last: bool = False) -> bytes:
        (logs / "losses.csv").write_bytes(content)
        assert uploader.upload_changes(is_last=last) == []
        return on_lake(lake)["losses.csv"]

    assert look(b"1") == b"1"
    assert look(b"22") == b"1"
    clock.now = 9.9
    assert look(b"333") == b"1"
    clock.now = 10.0
    assert look(b"333") == b"333"
    assert look(b"4444", last=True) == b"4444"


def test_invalid_names_are_warned_of_once(logs: Path, lake: LakePath) -> None:
    for name in ("odd?", "odder#", "fine"):
        (logs / name).write_text(name)
    (logs / "link").symlink_to(logs / "fine")
    os.mkfifo(logs / "pipe")
    uploader = uploader_of(logs, lake)
    (warning,) = uploader.upload_changes()
    assert warning.startswith("'odd")
    assert uploader.upload_changes(is_last=True) == []
    assert on_lake(lake) == {"fine": b"fine"}


def test_unreachable_lake_is_tried_again(
    logs: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(target: LakePath, content: bytes, at: int) -> int:
        tried.append(target.url)
        raise StoreError("nobody answers", "unreachable")

    uploader = LogDirUploader(logs, lake, threading.Event(), max_parallel_files=1)
    for number in range(2):
        (logs / f"{number}.{EVENTS}").write_bytes(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(LakePath, "append", refuse)
        (early,) = uploader.upload_changes()
        assert f"'0.{EVENTS}'" in early and "yet: nobody answers" in early
        assert uploader.upload_changes() == []
        (late,) = uploader.upload_changes(is_last=True)
        assert f"'0.{EVENTS}'" in late and "yet" not in late
    # The second file would have been refused too.
    assert tried == [(lake / f"0.{EVENTS}").url] * 3
    assert uploader.upload_changes() == []
    assert on_lake(lake) == {f"{number}.{EVENTS}": b"one" for number in range(2)}


def test_refused_file_delays_no_other(
    logs: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = LakePath.append

    def refuse(target: LakePath, content: bytes, at: int) -> int:
        if target.url.endswith(f"/0.{EVENTS}"):
            raise StoreError("not yours", "permission")
        return append(target, content, at)

    monkeypatch.setattr(LakePath, "append", refuse)
    for number in range(2):
        (logs / f"{number}.{EVENTS}").write_bytes(b"one")
    assert len(uploader_of(logs, lake).upload_changes()) == 1
    assert on_lake(lake) == {f"1.{EVENTS}": b"one"}


def test_eight_files_are_uploaded_in_parallel(
    logs: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = threading.Barrier(8)
    append = LakePath.append

    def meets(target: LakePath, content: bytes, at: int) -> int:
        met.wait(HANG_SECONDS)
        return append(target, content, at)

    monkeypatch.setattr(LakePath, "append", meets)
    for number in range(16):
        (logs / f"{number}.{EVENTS}").write_bytes(b"one")
    before = set(threading.enumerate())
    assert uploader_of(logs, lake).upload_changes() == []
    assert len(on_lake(lake)) == 16 and set(threading.enumerate()) <= before


def test_unexpected_error_of_a_file_is_a_warning(
    logs: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """Clients in Rust raise such errors."""

    def panics(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(LakePath, "append", panics)
    (logs / EVENTS).write_bytes(b"one")
    (logs / "losses.csv").write_bytes(b"1")
    (warning,) = uploader_of(logs, lake).upload_changes()
    assert "Panic('index out of bounds')" in warning
    assert on_lake(lake) == {"losses.csv": b"1"}


def test_nothing_is_uploaded_after_the_stop(logs: Path, lake: LakePath) -> None:
    stop = threading.Event()
    stop.set()
    (logs / EVENTS).write_bytes(b"one")
    assert LogDirUploader(logs, lake, stop).upload_changes(is_last=True) == []
    assert on_lake(lake) == {}


def test_log_directory_is_made_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "context.json"
    urls = (f"file://{tmp_path}/c", f"file://{tmp_path}/l")
    Context(0, 0, 1, "here", (), "worker", "r", 0, tmp_path / "model", *urls).dump(described)
    monkeypatch.setenv(VARIABLE, str(described))
    uploader = uploader_of(tmp_path / "logs", LakePath(urls[1]))
    assert not uploader.is_needed
    assert hopsgpu.context().log_dir == hopsgpu.context().log_dir == tmp_path / "logs"
    assert uploader.is_needed and (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("RANK", "0")
    assert hopsgpu.context().log_dir.is_dir()
    assert hopsgpu.context().log_dir == hopsgpu.context().log_dir != tmp_path / "logs"
