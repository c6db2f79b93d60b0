"""Reading and downloading a published version."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.errors import StoreError


@pytest.fixture
def version(tmp_path: Path) -> ModelVersion:
    source = tmp_path / "model"
    (source / "sub").mkdir(parents=True)
    for name in ("b", "é.txt", "sub/x"):
        (source / name).write_text(f"new {name}")
    return ModelStore(f"file://{tmp_path}/lake").publish(source, "net")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A directory into which an older version was downloaded."""
    (tmp_path / "copy" / "sub").mkdir(parents=True)
    (tmp_path / "copy" / "b").write_text("old")
    return tmp_path / "copy"


def refused(version: ModelVersion, target: Path) -> StoreError:
    """Return why a download fails, which changes nothing."""
    before = sorted(target.rglob("*"))
    with pytest.raises(StoreError, match=f"{target}: ") as raised:
        version.download(target)
    assert sorted(target.rglob("*")) == before
    assert (target / "b").read_text() == "old"
    return raised.value


def test_directory_in_the_way_of_a_file_is_refused(version: ModelVersion, target: Path) -> None:
    (target / "sub" / "x").mkdir()
    problem = refused(version, target)
    assert problem.kind == "exists"
    assert f"{target}/sub/x " in str(problem)
    (target / "sub" / "x").rmdir()
    assert (version.download(target) / "b").read_text() == "new b"


@pytest.mark.parametrize("what", ["a file", "a link to nothing"])
def test_file_in_the_way_of_a_directory_is_refused(
    version: ModelVersion, target: Path, what: str
) -> None:
    (target / "sub").rmdir()
    if what == "a file":
        (target / "sub").touch()
    else:
        (target / "sub").symlink_to(target / "absent")
    problem = refused(version, target)
    assert problem.kind == "exists" and f"{target}/sub " in str(problem)


def test_directory_without_write_permission_is_refused(
    version: ModelVersion, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write to all directories.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "sub")
    problem = refused(version, target)
    assert problem.kind == "permission" and f"{target}/sub" in str(problem)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EACCES, "permission"), (errno.ENOSPC, "quota")]
)
def test_errors_of_the_local_disk_have_a_kind(
    version: ModelVersion, target: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    problem = refused(version, target)
    assert problem.kind == kind and os.strerror(number) in str(problem)


def test_file_is_opened_by_any_normal_form_with_or_without_a_block(
    version: ModelVersion,
) -> None:
    for name in ("é.txt", "e\u0301.txt"):
        with version.open(name) as file:
            assert file.read().decode() == "new é.txt"
        assert file.closed
    opened = version.open("sub/x")
    assert opened.read() == b"new sub/x"
    opened.close()
    for path in ("sub", "../2/b", "/etc/passwd", "manifest.json"):
        with pytest.raises(StoreError, match=f"'{path}': b, sub/x, é.txt") as raised:
            version.open(path)
        assert raised.value.kind == "absent"


def test_manifest_and_files_are_copies(version: ModelVersion) -> None:
    version.manifest["files"].clear()
    version.files.clear()
    assert sorted(version.manifest["files"]) == sorted(version.files) == ["b", "sub/x", "é.txt"]


@pytest.mark.parametrize("damaged", ["a directory", "a file above"])
def test_replaced_file_is_damage(version: ModelVersion, tmp_path: Path, damaged: str) -> None:
    there = Path(version.url.removeprefix("file://")) / "sub"
    (there / "x").unlink()
    if damaged == "a directory":
        (there / "x").mkdir()
    else:
        there.rmdir()
        there.touch()
    for read in (version.verify, lambda: version.download(tmp_path / "copy")):
        with pytest.raises(StoreError, match="net/1/sub/x ") as raised:
            read()
        assert raised.value.kind == "damaged"


# This program downloads, and is killed after the first file.
_KILLED = """
import os, signal, sys
from hopsgpu.artifacts import versions
from hopsgpu.artifacts.models import ModelStore

def dying(*arguments):
    come(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

come, versions.download_files = versions.download_files, dying
ModelStore(sys.argv[1]).get("net").download(sys.argv[2])
"""


def test_files_of_a_killed_download_are_not_published_and_are_removed(
    version: ModelVersion, target: Path, tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/lake"
    command = [sys.executable, "-c", _KILLED, root, str(target)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (draft,) = target.glob(".*.download")
    assert (draft / "sub" / "x").read_text() == "new sub/x"
    # The draft may belong to a download that continues.
    version.download(target)
    assert (draft / "b").exists()
    (target / ".mine.download").write_text("the user's own")
    again = ModelStore(root).publish(target, "again")
    assert sorted(again.files) == [".mine.download", "b", "sub/x", "é.txt"]
    (target / f".{'0' * 32}.download").mkdir()
    hours = time.time() - 25 * 3600
    for path in (draft / "sub", *draft.rglob("*"), draft):
        os.utime(path, (hours, hours))
    os.utime(draft / "sub" / "x")
    version.download(target)
    assert (draft / "b").exists()
    os.utime(draft / "sub" / "x", (hours, hours))
    version.download(target)
    left = {path.name for path in target.glob(".*.download")}
    assert left == {f".{'0' * 32}.download", ".mine.download"}
