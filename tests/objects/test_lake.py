"""The files of a lake on an object store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage import object_store
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.contract import test_lake
from tests.objects.conftest import BUCKET
from tests.objects.contracts import contracts_of
from tests.objects.emulators import Emulator

# It has no rename, appends nothing, and has no directories without files; and what is of HDFS.
WITHOUT = (
    "test_status",
    "test_names_come_back",
    "test_rename_is_strict",
    "test_rename_of_a_file_is_strict",
    "test_one_of_many_creates",
    "test_append_adds_what_is_missing",
    "test_errors_say_what_is_wrong",
    "test_a_draft_is_removed_where_the_lake_answers",
    "test_other_places_are_refused",
    "test_what_belongs_to_others_is_refused",
    "test_a_full_quota_is_told",
    "test_the_umask_counts",
    "test_nobody_there_is_told_within_seconds",
    "test_what_a_dead_writer_holds_open_is_added_to",
)
globals().update(contracts_of(test_lake, WITHOUT))


MIB = 2**20


def test_a_directory_is_there_with_its_first_file(lake: LakePath, emulator: Emulator) -> None:
    (lake / "below").make()
    assert not lake.exists() and lake.names() == ()
    (lake / "below" / "five").write(b"12345")
    (lake / "empty").write(b"")
    found = {status.name: (status.is_directory, status.size) for status in lake.entries()}
    assert found == {"below": (True, 0), "empty": (False, 0)}
    assert (lake / "below" / "five").stat().size == 5
    assert lake.stat().is_directory and (lake / "below").exists()
    # What consoles make to show an empty directory.
    emulator.mark(f"{BUCKET}{lake.path}")
    assert lake.names() == ("below", "empty") and lake.names(only_directories=True) == ("below",)
    (lake / "below").remove()
    assert lake.names() == ("empty",)
    lake.remove()
    assert not lake.exists()


def test_marks_of_directories_are_no_files(lake: LakePath) -> None:
    (lake / "below" / "five").write(b"12345")
    # Clients of Hadoop and EMR make the first; the second has the directory's own name.
    for name in ("below_$folder$", "below"):
        (lake / name).write(b"")
    (lake / "full_$folder$").write(b"1")
    assert (lake / "below").stat().is_directory and (lake / "below").names() == ("five",)
    assert "below_$folder$" not in lake.names()
    assert "full_$folder$" in lake.names()


def test_credentials_that_were_refused_are_read_again(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*given: object, **named: object) -> None:
        raise PermissionError("The provided token has expired.")

    client = lake.client._client  # type: ignore[attr-defined]
    monkeypatch.setattr(client, "_info", refused)
    with pytest.raises(StoreError, match="token has expired") as told:
        lake.stat()
    assert told.value.kind == "permission"
    assert LakePath(lake.url).client._client is not client  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a b", "ü", "100%", "1%20", "a+b", "x=1&y", "[1]*", "(1)", "'"])
def test_names_are_kept(lake: LakePath, name: str) -> None:
    file = lake / name / name
    file.write(name.encode())
    assert lake.names() == (lake / name).names() == (name,)
    assert file.read() == name.encode()
    (lake / name).remove()
    assert lake.names() == ()


def test_one_of_many_creates_a_file(lake: LakePath) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: (lake / "claim").create(b"%d" % n), range(8)))
    assert sorted(made) == [False] * 7 + [True]
    assert (lake / "claim").read() == b"%d" % made.index(True)
    assert (lake / "claim").create() is False


def test_a_large_file_is_written_in_parts(
    lake: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * MIB)
    content = os.urandom(12 * MIB + 5)
    (tmp_path / "source").write_bytes(content)
    (lake / "file").upload(tmp_path / "source")
    (lake / "file").download(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (lake / "file").read(2**28) == content


def test_a_write_that_ends_early_leaves_nothing(
    lake: LakePath, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks() -> Iterator[bytes]:
        yield from [b"x" * (4 * MIB)] * 4
        raise ZeroDivisionError("the reader's own")

    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * MIB)
    with pytest.raises(ZeroDivisionError):
        lake.client.write(f"{lake.path}/file", blocks(), should_replace=True)
    assert not lake.exists()
    if emulator.scheme == "s3":
        # Those of the other stores go by themselves.
        assert not fsspec.filesystem("s3").list_multipart_uploads(BUCKET)


def test_what_an_object_store_lacks_is_refused(lake: LakePath) -> None:
    (lake / "file").write(b"1")
    for call in (
        lambda: (lake / "file").rename(lake / "other"),
        lambda: (lake / "file").append(b"2", at=1),
    ):
        with pytest.raises(StoreError, match="an object store") as refused:
            call()
        assert refused.value.kind == "unsupported"
    assert lake.names() == ("file",) and (lake / "file").read() == b"1"


def test_errors_have_their_kinds(lake: LakePath, emulator: Emulator) -> None:
    (lake / "file").write(b"1")
    with pytest.raises(StoreError, match=f"cannot read {lake.url}/absent: ") as absent:
        (lake / "absent").read()
    with pytest.raises(StoreError, match=f"cannot read {lake.url}: ") as directory:
        lake.read()
    nowhere = f"{emulator.url('nobody-has-this')}/x"
    with pytest.raises(StoreError, match=f"cannot write {nowhere}: ") as bucket:
        LakePath(nowhere).write(b"1")
    kinds = [told.value.kind for told in (absent, directory, bucket)]
    assert kinds == ["absent", "exists", "absent"]


_LOOK = """
import sys
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
try:
    LakePath(sys.argv[1], should_fail_fast=True).stat()
except StoreError as error:
    print(error.kind, error)
"""


def look(lake: LakePath, changed: Mapping[str, str], secret: str) -> str:
    """What a process with other variables says of a directory."""
    environ = {**os.environ, **changed}
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, lake.url],
        env={name: value for name, value in environ.items() if value},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    assert not secret or secret not in done.stdout + done.stderr
    return done.stdout


def test_a_store_at_which_nobody_answers_is_told(lake: LakePath, emulator: Emulator) -> None:
    said = look(lake, emulator.nobody, emulator.secret)
    assert said.startswith("unreachable ") and emulator.address in said, said


def test_a_store_that_accepts_no_stranger_is_told(lake: LakePath, emulator: Emulator) -> None:
    if emulator.stranger:
        said = look(lake, emulator.stranger, emulator.secret)
        assert said.startswith("permission ") and "credentials" in said, said
