"""One suite for the files of every lake: a local directory, and the real HDFS by two protocols."""

from __future__ import annotations

import concurrent.futures
import getpass
import io
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import requests

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage import lake as lake_module
from hopsgpu.storage.error_messages import ABSENT, StoreRefusal
from hopsgpu.storage.lake import LakePath, is_draft
from tests.bounds import HANG_SECONDS


def test_files(lake: LakePath) -> None:
    lake.make()
    lake.make()
    assert lake.names() == ()
    file = lake / "a file"
    file.write(b"one")
    file.write(b"two")
    assert file.read() == b"two"
    assert lake.names() == ("a file",)
    assert (lake / "absent").names() == ()
    file.remove()
    file.remove()
    assert lake.names() == ()


def test_status(lake: LakePath) -> None:
    (lake / "below").make()
    (lake / "empty").write(b"")
    (lake / "five").write(b"12345")
    found = {status.name: status for status in lake.entries()}
    assert {name: (s.is_directory, s.size) for name, s in found.items()} == {
        "below": (True, 0),
        "empty": (False, 0),
        "five": (False, 5),
    }
    assert (lake / "five").stat() == found["five"]
    assert lake.stat().is_directory
    assert (lake / "five").exists()
    assert (lake / "below").exists()
    assert not (lake / "absent").exists()


@pytest.mark.parametrize("name", ["a b", "ü", "100%", "1%20", "a+b", "x=1&y", "~tilde", "(1)", "'"])
def test_names_come_back(lake: LakePath, name: str) -> None:
    below = lake / name
    below.make()
    (below / name).write(name.encode())
    assert lake.names() == (name,)
    assert (below / name).read() == name.encode()
    assert (below / name).rename(below / f"{name}.new")
    assert below.names() == (f"{name}.new",)


def test_ranges_come_into_a_buffer(lake: LakePath) -> None:
    lake.make()
    content = os.urandom((2 << 20) + 4321)
    (lake / "file").write(content)
    with lake.client.read((lake / "file").path) as file:
        for at, size in ((0, 7), (65_535, 200_001), (1, 2 << 20), (2 << 20, 9_000), (0, 7)):
            file.seek(at)
            buffer, filled = memoryview(bytearray(size)), 0
            while count := file.readinto(buffer[filled:]):
                filled += count
            assert buffer[:filled] == content[at : at + size]
            assert file.tell() == at + filled == min(at + size, len(content))


def test_ranges(lake: LakePath) -> None:
    content = bytes(range(256)) * 1_000
    lake.make()
    place = lake / "file"
    place.write(content)
    assert place.range(0, 10) == content[:10]
    assert place.range(250, 270) == content[250:270]
    assert place.range(0, len(content) + 1) == content
    assert place.range(len(content) - 5, len(content) + 7) == content[-5:]
    assert place.range(5, None) == content[5:]
    assert place.range(len(content), len(content) + 1) == b""
    with pytest.raises(StoreError) as caught:
        (lake / "gone").range(0, 1)
    assert caught.value.kind == ABSENT


def test_rename_is_strict(lake: LakePath) -> None:
    for name in ("new", "old"):
        (lake / name).make()
        (lake / name / "f").write(name.encode())
    assert (lake / "new").rename(lake / "old") is False
    assert (lake / "old" / "f").read() == b"old"
    assert (lake / "new" / "f").read() == b"new"
    (lake / "empty").make()
    assert (lake / "new").rename(lake / "empty") is False
    assert (lake / "new").rename(lake / "newer") is True
    assert (lake / "newer" / "f").read() == b"new"
    assert (lake / "empty").names() == ()


def test_rename_of_a_file_is_strict(lake: LakePath) -> None:
    lake.make()
    (lake / "new").write(b"new")
    (lake / "old").write(b"old")
    (lake / "directory").make()
    assert (lake / "new").rename(lake / "old") is False
    assert (lake / "new").rename(lake / "directory") is False
    assert (lake / "old").read() == b"old"
    assert (lake / "directory").names() == ()
    assert (lake / "new").rename(lake / "newer") is True
    assert lake.names() == ("directory", "newer", "old")
    with pytest.raises(StoreError) as caught:
        (lake / "new").rename(lake / "elsewhere")
    assert caught.value.kind == "absent"


def test_one_of_many_creates(lake: LakePath) -> None:
    lake.make()
    assert (lake / "claim").create(b"mine") is True
    assert (lake / "claim").create(b"theirs") is False
    assert (lake / "claim").read() == b"mine"
    with pytest.raises(StoreError) as caught:
        (lake / "absent" / "claim").create()
    assert caught.value.kind == "absent"
    assert not (lake / "absent").exists()


def test_replace_leaves_the_new_content_alone(lake: LakePath) -> None:
    lake.make()
    (lake / "record").replace(b"old")
    (lake / "record").replace(b"the new one")
    assert (lake / "record").read() == b"the new one"
    assert lake.names() == ("record",)


@pytest.mark.parametrize(
    ("error", "is_cleared"),
    [
        (OSError("Connection refused (os error 111)"), False),
        (StoreRefusal("SafeModeException", "Name node is in safe mode."), False),
        (StoreRefusal("DSQuotaExceededException", "The DiskSpace quota is exceeded"), True),
    ],
)
def test_a_draft_is_removed_where_the_lake_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_cleared: bool
) -> None:
    lake = LakePath(f"file://{tmp_path}", should_fail_fast=True)
    (lake / "record").replace(b"old")

    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(lake.client, "rename", refuse)
    monkeypatch.setattr(lake_module, "_FAIL_FAST_SECONDS", 0.0)
    with pytest.raises(StoreError, match="cannot replace"):
        (lake / "record").replace(b"new")
    left = [name for name in lake.names() if name != "record"]
    assert len(left) == (0 if is_cleared else 1) and all(map(is_draft, left))
    assert (lake / "record").read() == b"old"


def test_a_local_file_takes_the_place_of_another_whole(lake: LakePath, tmp_path: Path) -> None:
    lake.make()
    source = tmp_path / "source"
    source.write_bytes(b"new" * 1_000_000)
    (lake / "record").write(b"old")
    (lake / "record").replace_with(source)
    assert (lake / "record").read(2**22) == b"new" * 1_000_000
    assert lake.names() == ("record",)


def test_append_adds_what_is_missing(lake: LakePath) -> None:
    lake.make()
    log = lake / "log"
    assert log.append(b"one\n", at=0) == 4
    assert log.append(b"two\n", at=4) == 8
    assert log.append(b"two\n", at=4) == 8
    assert log.append(b"o\nthree\n", at=6) == 14
    assert log.append(b"", at=14) == 14
    assert log.read() == b"one\ntwo\nthree\n"
    with pytest.raises(StoreError, match=f"cannot append to {log.url}: .* found 14") as told:
        log.append(b"x", at=15)
    assert told.value.kind == "damaged"
    with pytest.raises(StoreError, match="expected 3 to 4 bytes, found 14"):
        log.append(b"x", at=3)
    assert log.read() == b"one\ntwo\nthree\n"


def test_opened_files_are_files(lake: LakePath) -> None:
    lake.make()
    with (lake / "f").open("wb") as file:
        file.write(b"first\n")
        file.write(b"second\nthird")
    with (lake / "f").open() as file:
        assert file.readline() == b"first\n"
        assert list(file) == [b"second\n", b"third"]
        assert file.read() == b""
        file.seek(-5, io.SEEK_END)
        assert file.read(3) == b"thi"
        file.seek(6)
        assert file.read() == b"second\nthird"
    with pytest.raises(ZeroDivisionError), (lake / "f").open("wb") as file:
        file.write(b"half")
        raise ZeroDivisionError("the writer's own")
    assert (lake / "f").read() == b"first\nsecond\nthird"


def test_errors_say_what_is_wrong(lake: LakePath) -> None:
    lake.make()
    with pytest.raises(StoreError, match=f"cannot read {lake.url}/absent: ") as absent:
        (lake / "absent").read()
    with pytest.raises(StoreError, match=f"cannot get the status of {lake.url}/absent: ") as unseen:
        (lake / "absent").stat()
    (lake / "file").write(b"")
    with pytest.raises(StoreError, match=f"cannot create {lake.url}/file") as taken:
        (lake / "file").make()
    with pytest.raises(StoreError, match=f"cannot read {lake.url}: ") as directory:
        lake.read()
    kinds = [caught.value.kind for caught in (absent, unseen, taken, directory)]
    assert kinds == ["absent", "absent", "exists", "exists"]


def test_a_process_can_be_forked_afterwards(lake: LakePath) -> None:
    """PySpark launches its JVM so; a child that dropped the client would hang."""
    lake.make()
    subprocess.run(["true"], preexec_fn=lambda: None, check=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    "url",
    ["oss://bucket/x", "relative/path", "hdfs:", "", "ftp://h/x", "file:///a#b"],
)
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="absolute hdfs:// or file:// URL"):
        LakePath(url)


_AS_ANOTHER = """
import sys
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
private = LakePath(sys.argv[1])
calls = {
    "write": lambda: (private / "new").write(b""),
    "create": lambda: (private / "new").create(),
    "read": (private / "secret").read,
    "look": (private / "secret").stat,
    "list": private.entries,
    "make": (private / "new").make,
    "rename": lambda: (private / "secret").rename(private / "taken"),
    "remove": (private / "secret").remove,
    "share": lambda: private.set_mode(0o777),
}
for doing, call in calls.items():
    try:
        call()
    except StoreError as error:
        print(doing, error.kind, "HOPSGPU_ROOT" in str(error))
    else:
        print(doing, "was allowed")
"""


def test_what_belongs_to_others_is_refused(hdfs_lake: LakePath) -> None:
    hdfs_lake.make()
    private = hdfs_lake / "private"
    private.make()
    (private / "secret").write(b"s")
    private.set_mode(0o700)
    done = subprocess.run(
        [sys.executable, "-c", _AS_ANOTHER, private.url],
        env={**os.environ, "HADOOP_USER_NAME": "mallory"},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    doings = ("write", "create", "read", "look", "list", "make", "rename", "remove", "share")
    assert done.stdout.splitlines() == [f"{doing} permission True" for doing in doings]
    assert (private / "secret").read() == b"s"


@pytest.mark.parametrize("quota", ["namespacequota", "storagespacequota"])
def test_a_full_quota_is_told(hdfs_lake: LakePath, webhdfs_url: str, quota: str) -> None:
    hdfs_lake.make()
    answer = requests.put(
        f"{webhdfs_url.replace('webhdfs', 'http')}/webhdfs/v1{hdfs_lake.path}",
        params={"op": "SETQUOTA", quota: 1, "user.name": getpass.getuser()},
        timeout=HANG_SECONDS,
    )
    answer.raise_for_status()
    began = time.monotonic()
    with pytest.raises(StoreError, match=f"cannot write {hdfs_lake.url}/f: .*quota") as told:
        (hdfs_lake / "f").write(b"more than one byte")
    assert told.value.kind == "quota"
    assert time.monotonic() - began < 30, "it was tried again, which cannot help"


@pytest.mark.parametrize(
    ("mask", "directory", "file"), [("077", 0o700, 0o600), ("022", 0o755, 0o644)]
)
def test_the_umask_counts(
    hdfs_lake: LakePath,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mask: str,
    directory: int,
    file: int,
) -> None:
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.permissions.umask-mode</name>"
        f"<value>{mask}</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    lake = LakePath(hdfs_lake.url)
    (lake / "d").make()
    (lake / "d" / "written").write(b"1")
    (lake / "d" / "created").create()
    (lake / "d" / "replaced").replace(b"1")
    (lake / "d" / "added").append(b"1", at=0)
    assert (lake / "d").stat().mode == directory
    assert {status.mode for status in (lake / "d").entries()} == {file}


def test_nobody_there_is_told_within_seconds(hdfs_lake: LakePath) -> None:
    scheme = hdfs_lake.url.partition("://")[0]
    began = time.monotonic()
    with pytest.raises(StoreError, match="Connection refused.*HADOOP_CONF_DIR") as told:
        LakePath(f"{scheme}://127.0.0.1:1/x", should_fail_fast=True).stat()
    assert told.value.kind == "unreachable"
    assert time.monotonic() - began < 30


def test_readers_see_whole_records(lake: LakePath) -> None:
    """While it is replaced again and again."""
    lake.make()
    record = lake / "record"
    contents = {bytes([65 + number]) * (50_000 + 999 * number) for number in range(8)}
    record.replace(max(contents))
    ended = threading.Event()

    def replace() -> None:
        try:
            for content in sorted(contents):
                record.replace(content)
        finally:
            ended.set()

    seen = set()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(replace)
        while not ended.is_set():
            seen.add(record.read())
        done.result()
    assert seen <= contents
    assert record.read() == max(contents)
    assert lake.names() == ("record",)


_HOLDS_OPEN = """
import sys
from hopsgpu.storage.lake import LakePath
lake = LakePath(sys.argv[1])
writer = lake.client._client.append(lake.path)
writer.write(b"by the dead")
writer.hsync()
print("open", flush=True)
sys.stdin.read()
"""


def test_what_a_dead_writer_holds_open_is_added_to(hdfs_url: str) -> None:
    lake = LakePath(f"{hdfs_url}/tmp/contract-{uuid.uuid4().hex}")
    lake.make()
    try:
        log = lake / "log"
        log.append(b"one\n", at=0)
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDS_OPEN, log.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"open\n"
            writer.kill()
        assert log.append(b"by the dead, and by the living\n", at=4) == 35
        assert log.read() == b"one\nby the dead, and by the living\n"
    finally:
        lake.remove()
