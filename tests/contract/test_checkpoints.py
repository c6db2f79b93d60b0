"""Checkpoints, on a local directory and on the real HDFS."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts import checkpoint_restore, checkpoints
from hopsgpu.artifacts.checkpoint_restore import download_best, download_latest
from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions, check_options, steps_to_remove
from hopsgpu.artifacts.checkpoints import (
    Checkpoints,
    CheckpointShard,
    SaveResult,
    complete_shards,
    files_of,
    stall_warning,
)
from hopsgpu.artifacts.saving_ranks import SavingRank
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.storage import transfer
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local_tree import files_below


def save(place: Checkpoints, path: Path, step: int, **said: Any) -> SaveResult:
    return place.save(files_of(path), CheckpointOptions(step, **said))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    path.write_bytes(b"step 1")
    return path


def test_the_latest_comes_back_as_it_was_saved(lake: LakePath, file: Path, tmp_path: Path) -> None:
    root = lake / "checkpoints"
    assert download_latest([Checkpoints(root, 0)], tmp_path / "none") is None
    for step in (1, 9, 10):
        file.write_bytes(b"step %d" % step)
        save(Checkpoints(root, 0), file, step)
    for rank in (0, 3):  # rank 3 saves none of its own
        found = download_latest([Checkpoints(root, rank)], tmp_path / f"rank-{rank}")
        assert found is not None and (found.name, found.read_bytes()) == ("state.pt", b"step 10")
    assert root.names() == ("1", "10", "9", "_ranks", "_staging")
    assert (root / "_staging").names() == ()


def test_directories_and_parts_of_ranks(lake: LakePath, tmp_path: Path) -> None:
    shard = tmp_path / "shard"
    (shard / "layers").mkdir(parents=True)
    for rank in range(2):
        (shard / "layers" / "w").write_text(f"of rank {rank}")
        (shard / "meta").write_text("m")
        save(Checkpoints(lake, rank), shard, 5)
    # Rank 1 has not come so far: step 6 is nobody's latest.
    save(Checkpoints(lake, 0), shard, 6)
    for rank in range(2):
        found = download_latest([Checkpoints(lake, rank)], tmp_path / f"got-{rank}")
        assert found is not None and found.name == "shard"
        assert (found / "layers" / "w").read_text() == f"of rank {rank}"
        assert (found / "meta").read_text() == "m"


def saved(place: Checkpoints, text: str, here: Path, step: int = 1) -> None:
    """Saves two files, of which each says in what state the other was."""
    (here / "state").mkdir(exist_ok=True)
    for name in ("a", "b"):
        (here / "state" / name).write_text(text)
    save(place, here / "state", step)


def found(place: Checkpoints, into: Path) -> str | None:
    """What the latest says, which must be of one save."""
    saved_last = download_latest([place], into)
    if saved_last is None:
        return None
    (said,) = {(saved_last / name).read_text() for name in ("a", "b")}
    return said


def test_a_step_that_is_saved_again_is_replaced(lake: LakePath, tmp_path: Path) -> None:
    mine, into = Checkpoints(lake, 0), tmp_path / "got"
    for number in range(3):
        saved(mine, f"save {number}", tmp_path)
        # Into the same directory, as a rank does.
        assert found(mine, into) == f"save {number}"
    assert (lake / "1").names() == ("rank-0.0.2", "rank-0.0.2.complete")
    assert (lake / "_staging").names() == ()


def test_checkpoints_of_another_run_are_not_taken_for_ones_own(
    lake: LakePath, tmp_path: Path
) -> None:
    for run in ("a", "b"):
        saved(Checkpoints(lake / run, 0), f"of {run}", tmp_path)
        assert found(Checkpoints(lake / run, 0), tmp_path / "got") == f"of {run}"


def test_what_some_ranks_have_saved_again_waits_for_the_others(
    lake: LakePath, tmp_path: Path
) -> None:
    def ranks(attempt: int) -> list[Checkpoints]:
        return [Checkpoints(lake, rank, attempt) for rank in range(2)]

    def seen() -> list[str | None]:
        return [found(one, tmp_path / f"got-{one.rank}") for one in ranks(9)]

    for one in ranks(0):
        saved(one, "attempt 0", tmp_path)
    assert seen() == ["attempt 0"] * 2
    # This attempt fails before rank 1 has come so far.
    saved(ranks(1)[0], "attempt 1", tmp_path)
    assert seen() == ["attempt 0"] * 2
    saved(ranks(2)[1], "attempt 2", tmp_path)
    assert seen() == ["attempt 0"] * 2
    saved(ranks(2)[0], "attempt 2", tmp_path)
    assert seen() == ["attempt 2"] * 2
    # Rank 1 has not saved since then.
    whole = [name for name in (lake / "1").names() if not name.endswith(".complete")]
    assert whole == ["rank-0.2.0", "rank-1.0.0", "rank-1.2.0"]
    saved(ranks(2)[1], "attempt 2 again", tmp_path)
    assert seen() == ["attempt 2"] * 2
    assert "rank-1.0.0" not in (lake / "1").names()


class Killed(BaseException):
    """Nothing is done any more from here on."""


def test_who_is_killed_while_it_saves_leaves_what_there_was(
    lake: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0

    counting = threading.Lock()

    def until_killed(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **named: Any) -> Any:
            nonlocal left
            with counting:
                if left == 0:
                    raise Killed
                left -= 1
            return do(*args, **named)

        return done

    seen: list[str | None] = []
    whole = False
    while not whole:
        run = lake / f"killed-after-{len(seen)}"
        saved(Checkpoints(run, 0), "before", tmp_path)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            left = len(seen)
            for name in ("make", "write", "upload", "rename", "remove"):
                patch.setattr(LakePath, name, until_killed(getattr(LakePath, name)))
            # A local directory is renamed in two steps.
            patch.setattr(os, "rename", until_killed(os.rename))
            patch.setattr(checkpoints, "upload_files", until_killed(transfer.upload_files))
            saved(Checkpoints(run, 0), "after", tmp_path)
            whole = True
        seen.append(found(Checkpoints(run, 0), tmp_path / "got"))
        # The next attempt is none the worse for it.
        saved(Checkpoints(run, 0, 1), "next", tmp_path)
        assert found(Checkpoints(run, 0), tmp_path / "got") == "next"
        assert (run / "1").names() == ("rank-0.1.0", "rank-0.1.0.complete")
    before = seen.count("before")
    assert before > 3 and seen == ["before"] * before + ["after"] * (len(seen) - before)


@pytest.mark.parametrize("first", ["a", "b"])
def test_who_reads_while_it_is_replaced_gets_all_of_one_save(
    lake: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    mine = Checkpoints(lake, 0)
    saved(mine, "before", tmp_path)
    download = transfer.download_files

    def replaced_then(facts: dict[str, FileFacts], source: LakePath, target: Path) -> None:
        monkeypatch.setattr(checkpoint_restore, "download_files", download)
        earlier, rest = {}, dict(facts)
        if first == "b":
            earlier = {"state/a": rest.pop("state/a")}
        download(earlier, source, target)
        saved(mine, "after", tmp_path)
        download(rest, source, target)

    monkeypatch.setattr(checkpoint_restore, "download_files", replaced_then)
    assert found(mine, tmp_path / "got") == "after"


def test_what_cannot_be_saved_leaves_nothing(lake: LakePath, file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(ConfigError, match="nothing to save"):
            files_of(path)
    (tmp_path / "a?b").touch()
    with pytest.raises(ConfigError, match=r"a\?b"):
        files_of(tmp_path / "a?b")
    lake.make()
    (lake / "7").write(b"in the way")
    with pytest.raises(StoreError):
        save(Checkpoints(lake, 0), file, 7)
    (lake / "7").remove()
    assert (lake / "_staging").names() == ()
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(Cancelled):
        Checkpoints(lake, 0).save(files_of(file), CheckpointOptions(8), given_up)
    assert (lake / "_staging").names() == () and (lake / "8").names() == ()


def test_what_is_said_of_a_checkpoint_is_checked() -> None:
    for step in (-1, 1.0, True, "1"):
        with pytest.raises(ConfigError, match="step=.*must be an integer ≥ 0"):
            check_options(step, 3, None, "min")
    for keep in (0, 1.5, None):
        with pytest.raises(ConfigError, match="keep=.*must be an integer ≥ 1"):
            check_options(1, keep, None, "min")
    for metric in ("0.5", [1], {}):
        with pytest.raises(ConfigError, match="metric=.*must be a number"):
            check_options(1, 3, metric, "min")
    with pytest.raises(ConfigError, match="best='least': must be 'min' or 'max'"):
        check_options(1, 3, None, "least")
    assert check_options(1, 2, 1, "max") == CheckpointOptions(1, 2, 1.0, "max")
    assert check_options(0, 1, float("nan"), "min").metric is None


def test_which_steps_are_superseded() -> None:
    def of(
        metrics: dict[int, float | None], *others: int, keep: int = 3, best: str = "min"
    ) -> set[int]:
        scores = {step: (metric, best) for step, metric in metrics.items()}
        return set(steps_to_remove([*metrics, *others], scores, keep))

    none = dict.fromkeys(range(1, 6))
    assert of({}, 1, 2) == of({1: None}, keep=1) == of(none, keep=5) == set()
    assert of(none, keep=3) == {1, 2}
    assert of(none, keep=1) == {1, 2, 3, 4}
    # Begun by an attempt that failed; the newest ones may still become complete.
    assert of({2: None, 4: None, 6: None}, 1, 3, 5, 7, keep=2) == {1, 2, 3}
    assert of({1: 0.1, 2: 0.3, 3: 0.2, 4: 0.4}, keep=2) == {2}
    assert of({1: 0.1, 2: 0.3, 3: 0.2, 4: 0.4}, keep=2, best="max") == {1, 2}
    assert of({1: 0.1, 2: 0.1, 3: None, 4: None}, keep=1) == {1, 3}
    # What is saved without a metric says nothing of what is the best.
    scores = {1: (0.9, "max"), 2: (0.5, "max"), 3: (None, "min"), 4: (None, "min")}
    assert steps_to_remove(scores, scores, 1) == {2, 3}


def steps(lake: LakePath) -> list[int]:
    return sorted(int(name) for name in lake.names() if name.isdecimal())


def test_the_last_and_the_best_are_kept(lake: LakePath, file: Path, tmp_path: Path) -> None:
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.4, 5: 1e-7, 6: 0.6, 7: 0.7}
    kept = {}
    for step, loss in losses.items():
        for rank in range(2):
            file.write_bytes(b"%d of %d" % (step, rank))
            metric = loss if rank == 0 else None
            save(Checkpoints(lake, rank), file, step, keep=2, metric=metric)
        kept[step] = steps(lake)
    assert kept[4] == [2, 3, 4] and kept[6] == [5, 6] and kept[7] == [5, 6, 7]
    assert (lake / "5").names()[0] == "rank-0.0.0"
    assert "rank-0.0.0.min=1e-07.complete" in (lake / "5").names()
    assert (lake / "_staging").names() == ()
    for rank in range(2):
        found = download_best([Checkpoints(lake, rank)], tmp_path / f"best-{rank}")
        assert found is not None and found.read_bytes() == b"5 of %d" % rank
        found = download_latest([Checkpoints(lake, rank)], tmp_path / f"best-{rank}")
        assert found is not None and found.read_bytes() == b"7 of %d" % rank


def test_what_an_earlier_attempt_left_half_done_goes(lake: LakePath, file: Path) -> None:
    for rank in range(2):
        save(Checkpoints(lake, rank), file, 1, keep=1)
    save(Checkpoints(lake, 0), file, 2, keep=1)
    (lake / "_staging" / "0.1.killed").make()
    for step in (1, 3, 4):
        for rank in range(2):
            save(Checkpoints(lake, rank, 1), file, step, keep=1)
        assert (lake / "_staging").names() == ()
    assert steps(lake) == [4]


def test_of_several_runs_the_latest_is_the_own_and_the_best_is_that_of_all(
    lake: LakePath, file: Path, tmp_path: Path
) -> None:
    own, other = Checkpoints(lake / "own", 0), Checkpoints(lake / "other", 0)
    assert download_best([own, other], tmp_path / "got") is None
    for step, accuracy in ((8, 0.9), (9, 0.8)):
        file.write_bytes(b"other %d" % step)
        save(other, file, step, metric=accuracy, best="max")

    def both() -> list[bytes | None]:
        found = [
            choose([own, other], tmp_path / "got") for choose in (download_latest, download_best)
        ]
        return [path and path.read_bytes() for path in found]

    assert both() == [b"other 9", b"other 8"]
    for step, accuracy in ((3, 0.7), (4, None), (5, 0.9)):
        file.write_bytes(b"own %d" % step)
        save(own, file, step, metric=accuracy, best="max")
    assert both() == [b"own 5", b"own 5"]
    file.write_bytes(b"own 6")
    save(own, file, 6, metric=0.5, best="max")
    assert both() == [b"own 6", b"own 5"]


def test_what_all_ranks_saved_comes_into_one_directory(lake: LakePath, tmp_path: Path) -> None:
    for rank in range(3):
        shard = tmp_path / f"on-{rank}" / "shard"
        (shard / "deep").mkdir(parents=True)
        (shard / "deep" / f"of-{rank}").write_text(f"shard {rank}")
        (shard / "same").write_text("same")
        (shard / ".metadata").write_text("all") if rank == 0 else None
        save(Checkpoints(lake, rank), shard, 1)
    for rank in range(2):
        found = download_latest([Checkpoints(lake, rank)], tmp_path / f"got-{rank}", all_ranks=True)
        assert found is not None
        there = {name: path.read_text() for name, path in files_below(found).items()}
        shards = {f"deep/of-{rank}": f"shard {rank}" for rank in range(3)}
        assert there == shards | {"same": "same", ".metadata": "all"}
    for rank in range(3):
        (tmp_path / "state").write_text(str(rank % 2))
        save(Checkpoints(lake, rank), tmp_path / "state", 2)
    with pytest.raises(ConfigError, match="ranks 0 and 1 saved different files named 'state'"):
        download_latest([Checkpoints(lake, 0)], tmp_path / "got-0", all_ranks=True)


def test_what_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state" / "shard").mkdir(parents=True)
    (tmp_path / "state" / "w").touch()
    scandir = os.scandir

    def refusing(path: Any) -> Any:  # root may read what others may not
        if str(path).endswith("shard"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigError, match="cannot read .*state/shard, so files may be missing"):
        files_of(tmp_path / "state")


def test_a_damaged_file_is_named(lake: LakePath, file: Path, tmp_path: Path) -> None:
    mine = Checkpoints(lake, 0)
    save(mine, file, 1)
    record = json.loads((lake / "1" / "rank-0.0.0.complete").read())
    assert record["files"]["state.pt"]["bytes"] == 6
    part = lake / "1" / "rank-0.0.0" / "state.pt"
    for damage in (b"step 2", b"step", b"step 1 and more"):
        part.write(damage)
        with pytest.raises(StoreError, match=r"state\.pt") as damaged:
            download_latest([mine], tmp_path / "got")
        assert damaged.value.kind == "damaged"
    part.remove()
    with pytest.raises(StoreError, match=r"state\.pt"):
        download_latest([mine], tmp_path / "got")
    part.write(b"step 1")
    found = download_latest([mine], tmp_path / "got")
    assert found is not None and found.read_bytes() == b"step 1"
    assert [path.name for path in (tmp_path / "got").iterdir()] == [found.parent.name]


def test_of_a_damaged_checkpoint_it_is_told_how_to_go_on_without_it(
    lake: LakePath, file: Path, tmp_path: Path
) -> None:
    mine = Checkpoints(lake, 0)
    for step in (1, 2):
        save(mine, file, step)
    (lake / "2" / "rank-0.0.0" / "state.pt").write(b"step")
    with pytest.raises(StoreError) as damaged:
        download_latest([mine], tmp_path / "got")
    assert damaged.value.kind == "damaged"
    assert str(damaged.value).endswith(
        f"remove the directory {(lake / '2').url}: training then resumes from step 1, in"
        f" {(lake / '1').url}"
    )
    (lake / "2").remove()
    found = download_latest([mine], tmp_path / "got")
    assert found is not None and found.read_bytes() == b"step 1"
    (lake / "1" / "rank-0.0.0.complete").write(b"{")
    with pytest.raises(StoreError, match="training then has no checkpoint to resume from$"):
        download_latest([mine], tmp_path / "other")


def test_ranks_that_retire_the_same_steps_do_not_mind_each_other(
    lake: LakePath, tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        state = tmp_path / f"state-{rank}"
        for step in range(6):
            state.write_text(f"{step} of {rank}")
            save(Checkpoints(lake, rank), state, step, keep=1)

    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(train, range(3)))
    assert steps(lake) == [5] and (lake / "_staging").names() == ()


def test_a_step_waits_for_a_rank_that_has_begun_to_save(
    lake: LakePath, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "upload_files", killed)
        save(Checkpoints(lake, 1), file, 1)
    save(Checkpoints(lake, 0), file, 1)
    assert download_latest([Checkpoints(lake, 0, 1)], tmp_path / "got") is None
    save(Checkpoints(lake, 1), file, 1)
    assert download_latest([Checkpoints(lake, 0, 1)], tmp_path / "got") is not None


def test_all_ranks_go_on_from_the_same_step_of_the_run_that_they_resume(
    lake: LakePath, file: Path, tmp_path: Path
) -> None:
    def places(rank: int, attempt: int = 0) -> list[Checkpoints]:
        return [Checkpoints(lake / run, rank, attempt, 2) for run in ("own", "other")]

    def seen(rank: int, attempt: int = 0, world_size: int = 2) -> bytes | None:
        found = download_latest(places(rank, attempt), tmp_path / "got", world_size=world_size)
        return found and found.read_bytes()

    for rank in range(2):
        file.write_bytes(b"other, of %d" % rank)
        save(places(rank)[1], file, 1000)
    # Rank 1 takes long to begin.
    file.write_bytes(b"own, of 0")
    save(places(0)[0], file, 1001)
    assert [seen(rank) for rank in range(2)] == [b"other, of 0", b"other, of 1"]
    # There is no rank 1 in a world of one, and one that saves no more is not waited for for ever.
    assert seen(0, world_size=1) == seen(0, attempt=1) == b"own, of 0"
    file.write_bytes(b"own, of 1")
    save(places(1)[0], file, 1001)
    assert [seen(rank) for rank in range(2)] == [b"own, of 0", b"own, of 1"]


def test_a_rank_that_begins_late_begins_with_what_the_others_began_with(
    lake: LakePath, file: Path, tmp_path: Path
) -> None:
    def seen(rank: int, attempt: int, *, has_saved: bool) -> bytes | None:
        place = Checkpoints(lake, rank, attempt)
        found = download_latest([place], tmp_path / "got", world_size=2, has_saved=has_saved)
        return found and found.read_bytes()

    # Nobody knows yet that rank 0 saves too.
    file.write_bytes(b"attempt 0, of 1")
    save(Checkpoints(lake, 1), file, 1)
    assert seen(0, 0, has_saved=False) is None and seen(1, 0, has_saved=True) == b"attempt 0, of 1"
    file.write_bytes(b"attempt 0, of 0")
    save(Checkpoints(lake, 0), file, 1)
    assert seen(0, 0, has_saved=True) == b"attempt 0, of 0"
    for rank in range(2):
        file.write_bytes(b"attempt 1, of %d" % rank)
        save(Checkpoints(lake, rank, 1), file, 2)
        assert seen(0, 1, has_saved=False) == b"attempt 0, of 0"
    assert seen(0, 1, has_saved=True) == b"attempt 1, of 0"
    assert seen(0, 2, has_saved=False) == b"attempt 1, of 0"


def test_a_rank_that_saves_on_alone_is_noticed() -> None:
    def steps(mine: int, others: int, attempt: int = 0) -> dict[int, frozenset[CheckpointShard]]:
        of_others = {step: CheckpointShard(0, 0, 1) for step in range(others)}
        return {
            step: frozenset(
                {CheckpointShard(attempt, 0, 0)} | ({of_others[step]} if step < others else set())
            )
            for step in range(mine)
        }

    def both(attempt: int) -> set[SavingRank]:
        return {SavingRank(attempt, rank, 2) for rank in range(2)}

    def told(mine: int, others: int, keep: int) -> str:
        return stall_warning(steps(mine, others), both(0), CheckpointShard(0, 0, 0), keep) or ""

    # So many may be on their way.
    assert told(4, 1, keep=1) == told(8, 8, keep=1) == told(6, 1, keep=5) == ""
    assert told(5, 1, keep=1).startswith("4 checkpoints of rank 0, from step 1 on, are incomplete")
    assert "have not saved step 1: 1; step 0 is the latest complete step" in told(7, 1, keep=5)
    assert ": 1; no step is complete" in told(4, 0, keep=1)
    # What an earlier attempt has left does not count.
    assert stall_warning(steps(9, 1), both(0) | both(1), CheckpointShard(1, 0, 0), 1) is None


def test_which_parts_belong_together() -> None:
    def shards(*ranks: int, attempt: int = 0, number: int = 0) -> frozenset[CheckpointShard]:
        return frozenset(CheckpointShard(attempt, number, rank) for rank in ranks)

    both = shards(0, 1)
    assert complete_shards({}) == complete_shards({3: shards()}) == {}
    assert complete_shards({1: shards(0), 2: shards(0)}) == {1: shards(0), 2: shards(0)}
    assert complete_shards({1: both, 2: shards(0)}) == {1: both}
    assert complete_shards({1: shards(0), 2: shards(1)}) == {}
    assert complete_shards({1: both}, [SavingRank(0, 1, 2)]) == {1: both}
    assert complete_shards({1: both}, [SavingRank(0, 2, 3)]) == {}
    again = shards(0, 1, number=1)
    assert complete_shards({1: both | again}) == {1: again}
    assert complete_shards({1: both | shards(1, number=1)}) == {1: both}
    assert complete_shards({1: both | shards(0, attempt=1) | shards(1, attempt=2)}) == {1: both}
    assert complete_shards({1: again | shards(0, 1, attempt=1)}) == {1: shards(0, 1, attempt=1)}


def test_each_step_is_judged_by_the_ranks_of_its_own_world(
    lake: LakePath, file: Path, tmp_path: Path
) -> None:
    def ranks(attempt: int, world_size: int) -> list[Checkpoints]:
        return [Checkpoints(lake, rank, attempt, world_size) for rank in range(world_size)]

    def saves(place: Checkpoints, step: int) -> bool:
        file.write_text(f"step {step}, of {place.rank}")
        return save(place, file, step, keep=2).is_complete

    def begins(attempt: int, world_size: int) -> list[str | None]:
        """What each rank begins with, as long as it has not saved."""
        found = [
            download_latest([one], tmp_path / "got", world_size=world_size, has_saved=False)
            for one in ranks(attempt, world_size)
        ]
        return [path and path.read_text() for path in found]

    # Of what the first ranks save nobody knows yet whether others save too.
    assert [saves(one, 1) for one in ranks(0, 4)][-1]
    assert [saves(one, 2) for one in ranks(0, 4)] == [False, False, False, True]
    saves(ranks(0, 4)[0], 3)
    # A smaller world does not wait for the rank that has gone.
    assert begins(1, 3) == [f"step 2, of {rank}" for rank in range(3)]
    assert [saves(one, 3) for one in ranks(1, 3)[:2]] == [False, False]
    # Ranks 2 and 3 were killed before they saved anything there: it does not count.
    assert begins(2, 3) == [f"step 2, of {rank}" for rank in range(3)]
    assert begins(2, 2) == [f"step 2, of {rank}" for rank in range(2)]
    assert [saves(one, 3) for one in ranks(2, 3)] == [False, False, True]
    # A larger world: a rank that had no part gets the lowest rank's.
    assert begins(3, 5) == [f"step 3, of {rank}" for rank in (0, 1, 2, 0, 0)]
    for step in (4, 5, 6):
        assert not any(saves(one, step) for one in ranks(3, 5)[:4])
    # However late the last one is.
    assert begins(3, 5)[4] == "step 3, of 0"
    assert [saves(ranks(3, 5)[4], step) for step in (4, 5, 6)] == [True] * 3
    assert begins(4, 1) == ["step 6, of 0"]
    assert steps(lake) == [5, 6]
    assert [saves(one, 7) for one in ranks(4, 1)] == [True]
    assert begins(5, 2) == ["step 7, of 0"] * 2


def test_a_save_of_a_step_again_is_complete_with_its_last_part(lake: LakePath, file: Path) -> None:
    for attempt in range(2):
        for _ in range(2):
            complete = [save(Checkpoints(lake, r, attempt, 2), file, 1).is_complete for r in (0, 1)]
    assert complete == [False, True]


def test_parts_of_ranks_that_have_gone_go_with_what_replaces_them(
    lake: LakePath, file: Path
) -> None:
    for rank in range(3):
        save(Checkpoints(lake, rank, 0, 3), file, 1)
    for rank in range(2):
        assert "rank-2.0.0.complete" in (lake / "1").names()
        save(Checkpoints(lake, rank, 1, 2), file, 1)
    there = [name for name in (lake / "1").names() if not name.endswith(".complete")]
    # Rank 0 removes its own when it saves next.
    assert there == ["rank-0.0.0", "rank-0.1.0", "rank-1.1.0"]


def test_a_world_of_another_size_gets_the_parts_of_all_ranks_that_there_were(
    lake: LakePath, tmp_path: Path
) -> None:
    for rank in range(3):
        shard = tmp_path / f"on-{rank}" / "shard"
        shard.mkdir(parents=True)
        (shard / f"of-{rank}").write_text(f"shard {rank}")
        save(Checkpoints(lake / "other", rank, 4, 3), shard, 1)
    for world_size in (1, 2, 5):
        for rank in range(world_size):
            places = [Checkpoints(lake / run, rank, 0, world_size) for run in ("own", "other")]
            # In a next attempt of the same run, and in a run that resumes it.
            for among in (places, [Checkpoints(lake / "other", rank, 5, world_size)]):
                found = download_latest(
                    among, tmp_path / "got", all_ranks=True, world_size=world_size, has_saved=False
                )
                assert found is not None
                assert sorted(files_below(found)) == ["of-0", "of-1", "of-2"]


def test_what_others_announce_meanwhile_changes_nothing_for_a_late_rank(
    lake: LakePath, file: Path, tmp_path: Path
) -> None:
    def seen(rank: int) -> bytes | None:
        found = download_latest([Checkpoints(lake, rank, 1, 2)], tmp_path / "got", has_saved=False)
        return found and found.read_bytes()

    # Rank 1 did not save in the first attempt, so nobody knows that it would have.
    save(Checkpoints(lake, 0, 0, 2), file, 1)
    assert seen(1) == b"step 1"
    save(Checkpoints(lake, 1, 1, 2), file, 2)
    assert seen(0) == b"step 1"
