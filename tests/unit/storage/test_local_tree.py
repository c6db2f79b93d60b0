"""The files below a directory: all of them, or an error that names the refused one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hopsgpu.artifacts import checkpoints, publication
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.local_tree import files_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "b" / "empty").mkdir(parents=True)
    (tmp_path / "root" / "b" / "u\u0308").write_bytes(b"1")
    return tmp_path / "root"


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "file").write_bytes(b"2")
    (root / "a").symlink_to(root / "b" / "u\u0308")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "b" / "again").symlink_to(tmp_path / "elsewhere" / "deep")
    found = files_below(root)
    assert list(found) == ["a", "b/again/file", "b/ü", "c/deep/file"]
    assert [found[name].read_bytes() for name in found] == [b"1", b"2", b"1", b"2"]
    assert publication.files_of(root) == found
    assert checkpoints.files_of(root) == {f"root/{name}": file for name, file in found.items()}


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        ("nowhere", "absent", "broken link"),
        ("itself", "itself", "neither"),
        ("b/back", "..", "/root, "),
        ("b/empty/around", "../../b", "/root/b, "),
        ("outer", "../..", "a link to "),
    ],
)
def test_broken_and_circular_links_are_refused(root: Path, name: str, to: str, why: str) -> None:
    (root / name).symlink_to(to)
    for refused in (files_below, publication.files_of, checkpoints.files_of):
        with pytest.raises(ConfigError, match=f"/{name}: .*{why}"):
            refused(root)


def test_two_links_to_each_other_are_refused(root: Path) -> None:
    (root / "c").mkdir()
    (root / "b" / "c").symlink_to(root / "c")
    (root / "c" / "b").symlink_to(root / "b")
    with pytest.raises(ConfigError, match="/b/c"):
        files_below(root)


def test_pipe_is_refused(root: Path) -> None:
    os.mkfifo(root / "b" / "pipe")
    with pytest.raises(ConfigError, match="/b/pipe: "):
        files_below(root)


def test_invalid_names_are_refused(root: Path) -> None:
    (root / "b" / "what?").touch()
    with pytest.raises(ConfigError, match=r"what\?"):
        files_below(root)


def test_two_files_of_one_name_are_refused(root: Path, tmp_path: Path) -> None:
    (root / "b" / "ü").touch()
    with pytest.raises(ConfigError, match="'b/ü'"):
        files_below(root)
    (root / "b" / "ü").unlink()
    (tmp_path / "elsewhere").mkdir()
    for directory in (root / "é", tmp_path / "elsewhere"):
        directory.mkdir(exist_ok=True)
        (directory / "a").write_text(directory.name)
    (root / "e\u0301").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="'é/a'"):
        files_below(root)


def test_file_and_directory_of_one_name_are_refused(root: Path) -> None:
    (root / "b" / "é").mkdir()
    (root / "b" / "é" / "a").touch()
    (root / "b" / "e\u0301").touch()
    with pytest.raises(ConfigError, match="'b/é'"):
        files_below(root)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json/a"])
def test_name_of_the_manifest_is_reserved(root: Path, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).touch()
    with pytest.raises(StoreError, match="manifest.json"):
        publication.files_of(root)


def test_entry_that_cannot_be_inspected_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "odd").symlink_to("x" * 300)
    with pytest.raises(ConfigError, match="/odd"):
        files_below(tmp_path)
