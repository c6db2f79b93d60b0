"""Checkpoints, on a local directory and on the real HDFS."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores.checkpoints import Checkpoints, Part, complete
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


def saved(checkpoints: Checkpoints, text: str, here: Path, step: int = 1) -> None:
    """Saves two files, of which each says in what state the other was."""
    (here / "state").mkdir(exist_ok=True)
    for name in ("a", "b"):
        (here / "state" / name).write_text(text)
    checkpoints.save(here / "state", step)


def found(checkpoints: Checkpoints, into: Path) -> str | None:
    """What the latest says, which must be of one save."""
    latest = checkpoints.latest(into)
    if latest is None:
        return None
    (said,) = {(latest / name).read_text() for name in ("a", "b")}
    return said


def test_a_step_that_is_saved_again_is_replaced(lake: Lake, tmp_path: Path) -> None:
    mine, into = Checkpoints(lake, 0), tmp_path / "got"
    for number in range(3):
        saved(mine, f"save {number}", tmp_path)
        # Into the same directory, as a rank does.
        assert found(mine, into) == f"save {number}"
    assert (lake / "1").names() == ("rank-0.0.2", "rank-0.0.2.complete")
    assert (lake / "_staging").names() == ()


def test_checkpoints_of_another_run_are_not_taken_for_ones_own(lake: Lake, tmp_path: Path) -> None:
    for run in ("a", "b"):
        saved(Checkpoints(lake / run, 0), f"of {run}", tmp_path)
        assert found(Checkpoints(lake / run, 0), tmp_path / "got") == f"of {run}"


def test_what_some_ranks_have_saved_again_waits_for_the_others(lake: Lake, tmp_path: Path) -> None:
    def ranks(attempt: int) -> list[Checkpoints]:
        return [Checkpoints(lake, rank, attempt) for rank in range(2)]

    def latest() -> list[str | None]:
        return [found(one, tmp_path / f"got-{one.rank}") for one in ranks(9)]

    for one in ranks(0):
        saved(one, "attempt 0", tmp_path)
    assert latest() == ["attempt 0"] * 2
    # This attempt fails before rank 1 has come so far.
    saved(ranks(1)[0], "attempt 1", tmp_path)
    assert latest() == ["attempt 0"] * 2
    saved(ranks(2)[1], "attempt 2", tmp_path)
    assert latest() == ["attempt 0"] * 2
    saved(ranks(2)[0], "attempt 2", tmp_path)
    assert latest() == ["attempt 2"] * 2
    # Rank 1 has not saved since then.
    whole = [name for name in (lake / "1").names() if not name.endswith(".complete")]
    assert whole == ["rank-0.2.0", "rank-1.0.0", "rank-1.2.0"]
    saved(ranks(2)[1], "attempt 2 again", tmp_path)
    assert latest() == ["attempt 2"] * 2
    assert "rank-1.0.0" not in (lake / "1").names()


class Killed(BaseException):
    """Nothing is done any more from here on."""


def test_who_is_killed_while_it_saves_leaves_what_there_was(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0

    def until_killed(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return do(*args)

        return done

    seen: list[str | None] = []
    whole = False
    while not whole:
        run = lake / f"killed-after-{len(seen)}"
        saved(Checkpoints(run, 0), "before", tmp_path)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            left = len(seen)
            for name in ("make", "write", "upload", "rename", "remove"):
                patch.setattr(Lake, name, until_killed(getattr(Lake, name)))
            # A local directory is renamed in two steps.
            patch.setattr(Path, "rename", until_killed(Path.rename))
            saved(Checkpoints(run, 0), "after", tmp_path)
            whole = True
        seen.append(found(Checkpoints(run, 0), tmp_path / "got"))
        # The next attempt is none the worse for it.
        saved(Checkpoints(run, 0, 1), "next", tmp_path)
        assert found(Checkpoints(run, 0), tmp_path / "got") == "next"
        assert (run / "1").names() == ("rank-0.1.0", "rank-0.1.0.complete")
    before = seen.count("before")
    assert before > 4 and seen == ["before"] * before + ["after"] * (len(seen) - before)


@pytest.mark.parametrize("first", ["a", "b"])
def test_who_reads_while_it_is_replaced_gets_all_of_one_save(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    mine = Checkpoints(lake, 0)
    saved(mine, "before", tmp_path)
    download = Lake.download

    def replaced_then(source: Lake, target: Path) -> None:
        if source.url.endswith(f"/{first}"):
            monkeypatch.setattr(Lake, "download", download)
            saved(mine, "after", tmp_path)
        download(source, target)

    monkeypatch.setattr(Lake, "download", replaced_then)
    assert found(mine, tmp_path / "got") == "after"


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


def test_which_parts_belong_together() -> None:
    def parts(*ranks: int, attempt: int = 0, number: int = 0) -> frozenset[Part]:
        return frozenset(Part(attempt, number, rank) for rank in ranks)

    both = parts(0, 1)
    assert complete({}) == complete({3: parts()}) == {}
    assert complete({1: parts(0), 2: parts(0)}) == {1: parts(0), 2: parts(0)}
    assert complete({1: both, 2: parts(0)}) == {1: both}
    assert complete({1: parts(0), 2: parts(1)}) == {}
    again = parts(0, 1, number=1)
    assert complete({1: both | again}) == {1: again}
    assert complete({1: both | parts(1, number=1)}) == {1: both}
    assert complete({1: both | parts(0, attempt=1) | parts(1, attempt=2)}) == {1: both}
    assert complete({1: again | parts(0, 1, attempt=1)}) == {1: parts(0, 1, attempt=1)}
