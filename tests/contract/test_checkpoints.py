"""Checkpoints, on a local directory and on the real HDFS."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores.checkpoints import Checkpoints, latest_step
from hopsgpu.stores.lake import Lake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    path.write_bytes(b"step 1")
    return path


def test_the_latest_comes_back_as_it_was_saved(lake: Lake, file: Path, tmp_path: Path) -> None:
    root = lake / "checkpoints"
    assert Checkpoints(root, 0).latest(tmp_path / "none") is None
    for step in (1, 9, 10):
        file.write_bytes(b"step %d" % step)
        Checkpoints(root, 0).save(file, step)
    for rank in (0, 3):  # rank 3 saves none of its own
        found = Checkpoints(root, rank).latest(tmp_path / f"rank-{rank}")
        assert found is not None and (found.name, found.read_bytes()) == ("state.pt", b"step 10")
    assert root.names() == ("1", "10", "9", "_staging")
    assert (root / "_staging").names() == ()


def test_directories_and_parts_of_ranks(lake: Lake, tmp_path: Path) -> None:
    shard = tmp_path / "shard"
    (shard / "layers").mkdir(parents=True)
    for rank in range(2):
        (shard / "layers" / "w").write_text(f"of rank {rank}")
        (shard / "meta").write_text("m")
        Checkpoints(lake, rank).save(shard, 5)
    # Rank 1 has not come so far: step 6 is nobody's latest.
    Checkpoints(lake, 0).save(shard, 6)
    for rank in range(2):
        found = Checkpoints(lake, rank).latest(tmp_path / f"got-{rank}")
        assert found is not None and found.name == "shard"
        assert (found / "layers" / "w").read_text() == f"of rank {rank}"
        assert (found / "meta").read_text() == "m"


def test_a_step_that_is_saved_again_is_replaced(lake: Lake, file: Path, tmp_path: Path) -> None:
    Checkpoints(lake, 0).save(file, 1)
    file.write_bytes(b"again")
    Checkpoints(lake, 0).save(file, 1)
    found = Checkpoints(lake, 0).latest(tmp_path / "got")
    assert found is not None and found.read_bytes() == b"again"


def test_what_cannot_be_saved_leaves_nothing(lake: Lake, file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(ConfigError, match="nothing to save"):
            Checkpoints(lake, 0).save(path, 1)
    for step in (-1, 1.0, True, "1"):
        with pytest.raises(ConfigError, match="step=.*a whole number of at least 0"):
            Checkpoints(lake, 0).save(file, step)  # type: ignore[arg-type]
    assert lake.names() == ()
    lake.make()
    (lake / "7").write(b"in the way")
    with pytest.raises(StoreError):
        Checkpoints(lake, 0).save(file, 7)
    assert (lake / "_staging").names() == ()


def test_which_step_is_the_latest() -> None:
    one, both = frozenset({0}), frozenset({0, 1})
    assert latest_step({}) is None
    assert latest_step({3: frozenset()}) is None
    assert latest_step({1: one, 2: one}) == (2, one)
    assert latest_step({1: both, 2: one}) == (1, both)
    assert latest_step({1: one, 2: frozenset({1})}) is None
