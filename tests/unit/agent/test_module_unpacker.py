"""The user's modules in a container, for one attempt after the other."""

from __future__ import annotations

import os
import py_compile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from hopsgpu.agent.module_unpacker import UnpackedModules
from hopsgpu.packaging.modules import pack_modules
from tests.conftest import until


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "inner").mkdir(parents=True)
    (project / "mine.py").write_text("WHO = 'first'\n")
    (project / "inner" / "__init__.py").write_text("")
    (project / "inner" / "table.txt").write_text("1 2 3\n")
    return project


@pytest.fixture
def seconds() -> float:
    """How long a check holds; by default longer than any test takes."""
    return 600.0


@pytest.fixture
def unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> Iterator[UnpackedModules]:
    container = tmp_path / "container"
    container.mkdir()
    monkeypatch.chdir(container)
    with closing(UnpackedModules(seconds)) as unpacked:
        yield unpacked
    assert list((container / "hopsgpu").iterdir()) == []


def root_of(unpacked: UnpackedModules, project: Path) -> Path:
    packed = pack_modules([project])
    (root,) = unpacked.roots(packed.digest, packed.archive, 1)
    return Path(root)


def test_same_modules_stay_and_others_replace_them(
    unpacked: UnpackedModules, project: Path
) -> None:
    first = root_of(unpacked, project)
    assert (first / "inner" / "table.txt").read_text() == "1 2 3\n"
    # Python checks compiled files against their sources, so they do no harm.
    assert Path(py_compile.compile(str(first / "mine.py")) or "").parent == first / "__pycache__"
    assert root_of(unpacked, project) == first
    (project / "mine.py").write_text("WHO = 'again'\n")
    second = root_of(unpacked, project)
    assert (second / "mine.py").read_text() == "WHO = 'again'\n"
    assert not first.exists() and not (second / "__pycache__").exists()


def test_first_attempt_gets_the_prepared_directory_without_a_check(
    unpacked: UnpackedModules, project: Path
) -> None:
    packed = pack_modules([project])
    unpacked.prepare(packed.digest, packed.archive)
    (ahead,) = Path("hopsgpu").iterdir()
    unpacked.prepare(packed.digest, packed.archive)
    # A check would notice this file.
    (ahead / "0" / "more.py").touch()
    assert root_of(unpacked, project).parent == ahead.resolve()
    (project / "mine.py").write_text("WHO = 'again'\n")
    other = pack_modules([project])
    unpacked.prepare(other.digest, other.archive)
    assert not ahead.exists()
    assert (root_of(unpacked, project) / "mine.py").read_text() == "WHO = 'again'\n"


def overwrite(root: Path) -> None:
    """Change a file with the same size and times: only the change time differs."""
    file = root / "mine.py"
    before = file.stat()
    file.write_text("WHO = 'worse'\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def write_now(file: Path) -> int:
    file.write_text("")
    return file.stat().st_ctime_ns


@pytest.mark.parametrize(
    "harm",
    [
        overwrite,
        lambda root: (root / "mine.py").unlink(),
        lambda root: (root / "more.py").write_text(""),
        lambda root: (root / "package").mkdir(),
        lambda root: (root / "mine.py").chmod(0),
        lambda root: (root.parent / "0").rename(root.parent / "1"),
    ],
    ids=["overwritten", "removed", "added", "a directory", "unreadable", "renamed"],
)
def test_changes_by_a_rank_are_removed_for_the_next(
    unpacked: UnpackedModules, project: Path, harm: Callable[[Path], None]
) -> None:
    first = root_of(unpacked, project)
    # A change within one tick of the file system's clock keeps the change time.
    last = max(path.stat().st_ctime_ns for path in (first, *first.rglob("*")))
    assert until(lambda: write_now(project.parent / "clock") > last, step=0.001)
    harm(first)
    second = root_of(unpacked, project)
    assert (second / "mine.py").read_text() == "WHO = 'first'\n"
    assert os.access(second / "mine.py", os.R_OK)
    assert sorted(path.name for path in second.iterdir()) == ["inner", "mine.py"]


def test_check_ahead_holds_for_the_next_attempt_only(
    unpacked: UnpackedModules, project: Path
) -> None:
    first = root_of(unpacked, project)
    (first / "more.py").write_text("")
    unpacked.verify(unpacked.uses)
    second = root_of(unpacked, project)
    assert second != first and not (second / "more.py").exists()
    unpacked.verify(unpacked.uses)
    assert root_of(unpacked, project) == second
    # One check serves one attempt, and a late check serves none.
    unpacked.verify(unpacked.uses - 1)
    (second / "more.py").write_text("")
    third = root_of(unpacked, project)
    assert third != second and not (third / "more.py").exists()
    unpacked.close()
    unpacked.verify(unpacked.uses)
    assert root_of(unpacked, project).is_dir()


@pytest.mark.parametrize("seconds", [0.0])
def test_check_ahead_that_failed_or_is_old_does_not_hold(
    unpacked: UnpackedModules, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> NoReturn:
        raise FileNotFoundError(path)

    first = root_of(unpacked, project)
    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", fail)
        unpacked.verify(unpacked.uses)
    assert root_of(unpacked, project) == first
    unpacked.verify(unpacked.uses)
    (first / "more.py").write_text("")
    assert root_of(unpacked, project) != first


def test_roots_may_be_several_or_none(unpacked: UnpackedModules, project: Path) -> None:
    packed = pack_modules([project, project / "inner"])
    roots = unpacked.roots(packed.digest, packed.archive, packed.roots)
    assert [Path(root).name for root in roots] == ["0", "1"]
    assert unpacked.roots("none", pack_modules([]).archive, 0) == []


def test_executable_files_stay_executable(unpacked: UnpackedModules, project: Path) -> None:
    tool = project / "inner" / "tool"
    tool.write_text("")
    tool.chmod(0o755)
    root = root_of(unpacked, project)
    assert os.access(root / "inner" / "tool", os.X_OK)
    assert not (root / "mine.py").stat().st_mode & 0o111
    assert root_of(unpacked, project) == root
