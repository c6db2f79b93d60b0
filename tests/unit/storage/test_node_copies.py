"""Copies that the containers of a node share: made once, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.storage.node_copies import ensure_copy, find_copy, shared_directories


def test_a_copy_is_made_once_for_all(tmp_path: Path) -> None:
    places = [tmp_path / "disk1", tmp_path / "disk2"]
    made: list[Path] = []

    def fill(home: Path) -> None:
        home.mkdir()
        made.append(home)

    first = ensure_copy(places, "abc", fill)
    assert ensure_copy(places, "abc", fill) == first == find_copy(places, "abc")
    assert made == [first] and first.parent in places


def test_a_copy_that_was_not_completed_is_made_anew(tmp_path: Path) -> None:
    def fails(home: Path) -> None:
        home.mkdir()
        (home / "half").touch()
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        ensure_copy([tmp_path], "abc", fails)
    assert find_copy([tmp_path], "abc") is None
    home = ensure_copy([tmp_path], "abc", lambda home: home.mkdir())
    assert not list(home.iterdir())


def test_the_directories_are_yarns_or_the_containers_own() -> None:
    disks = {"LOCAL_DIRS": "/disk1/app,/disk2/app"}
    found = shared_directories(disks, Path("/own"), "models")
    assert found == [Path("/disk1/app/models"), Path("/disk2/app/models")]
    assert shared_directories({}, Path("/own"), "models") == [Path("/own/models")]
