"""Directories of a rank's script on their way to the lake."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.agent import kept_mirror
from hopsgpu.agent.kept_mirror import KeptMirror
from hopsgpu.artifacts.kept_files import RankIndex, download, index_file, place_of, read_kept
from hopsgpu.errors import Cancelled, StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath

Mirrors = Callable[..., KeptMirror]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "rank-1" / "work"
    (directory / "out").mkdir(parents=True)
    return directory


@pytest.fixture
def run(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake/runs/fit-1")


@pytest.fixture
def start(work: Path, run: LakePath, clock: Clock) -> Iterator[Mirrors]:
    """Starts a mirror of rank 1 in attempt 0, which is closed after the test."""
    mirrors: list[KeptMirror] = []

    def start_mirror(
        *directories: str, restored: Collection[str] = (), attempt: int = 0
    ) -> KeptMirror:
        place, index = run / place_of(attempt, 1), RankIndex(attempt, 1)
        names = directories or ("out",)
        mirrors.append(KeptMirror(work, names, place, index, frozenset(restored), clock=clock))
        return mirrors[-1]

    yield start_mirror
    for mirror in mirrors:
        mirror.close()


def put(work: Path, name: str, text: str) -> Path:
    file = work / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def replace(work: Path, name: str, text: str) -> None:
    """Replaces a file as scripts should: by a rename of a complete file from elsewhere."""
    draft = put(work, f"drafts/{Path(name).name}", text)
    wait_until_later_than(draft)
    draft.replace(work / name)


def wait_until_later_than(file: Path) -> None:
    """Waits for the kernel's clock of files, which ticks each few milliseconds."""
    probe = file.parent.parent / "probe"
    while True:
        probe.write_text("x")
        if probe.stat().st_mtime_ns > file.stat().st_mtime_ns:
            probe.unlink()
            return


def listed(run: LakePath) -> dict[str, str]:
    """What the lake has of the files that count: their texts, which match their digests."""
    kept = read_kept(run)
    target = Path(run.path).parent.parent.parent / f"copy-{time.monotonic_ns()}"
    download(kept.files.values(), run, target)
    return {name: (target / name).read_text() for name in kept.files}


def stored(run: LakePath) -> list[str]:
    """The names of all files on the lake except indexes, whether one lists them or not."""
    root = Path(run.path) / "kept"
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return sorted("/".join(f.parts[3:]) for f in files if f.name != "index.json")


def index_of(run: LakePath, attempt: int = 0) -> RankIndex:
    file = index_file(run / place_of(attempt, 1))
    return RankIndex.parse(attempt, 1, file.read(), file.url)


def pass_seconds(mirror: KeptMirror, clock: Clock, seconds: float) -> list[str]:
    clock.now += seconds
    return mirror.poll()


def open_descriptors(below: Path) -> int:
    """How many files below a directory this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += link.readlink().is_relative_to(below)
        except OSError:  # the listing's own descriptor
            continue
    return count


def test_a_file_is_uploaded_once_it_has_not_changed_for_two_seconds(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    assert mirror.poll() == [] and not run.exists()
    put(work, "out/a", "1")
    for text in ("1", "22", "333"):
        put(work, "out/a", text)
        assert pass_seconds(mirror, clock, 1.9) == [] and listed(run) == {}
    assert pass_seconds(mirror, clock, 1.9) == [] and listed(run) == {}
    assert pass_seconds(mirror, clock, 0.1) == [] and listed(run) == {"out/a": "333"}


def test_a_changed_file_takes_the_place_of_its_earlier_version(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/same", "same")
    for text in ("1", "22", "333"):
        put(work, "out/deep/a", text)
        mirror.poll()
        pass_seconds(mirror, clock, 2.0)
        assert listed(run) == {"out/deep/a": text, "out/same": "same"}
        assert stored(run) == ["out/deep/a", "out/same"]


def test_an_unchanged_file_is_uploaded_once(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    before = index_file(run / place_of(0, 1)).stat()
    for _ in range(5):
        pass_seconds(mirror, clock, 2.0)
    mirror.finish(was_killed=False)
    after = index_file(run / place_of(0, 1)).stat()
    assert after == before and index_of(run).files["out/a"][1] == "1"


def test_a_file_that_is_replaced_each_second_is_uploaded(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    seen = set()
    for second in range(12):
        replace(work, "out/last.pt", f"version {second} " * (second + 1))
        pass_seconds(mirror, clock, 1.0)
        seen.update(listed(run).values())
    complete = {f"version {second} " * (second + 1) for second in range(12)}
    assert len(seen) >= 3 and seen <= complete
    assert stored(run) == ["out/last.pt"]


def test_a_file_that_is_written_all_the_time_is_uploaded_after_less_than_a_minute(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    for second in range(50):
        put(work, "out/log", "x" * (second + 1))
        pass_seconds(mirror, clock, 1.0)
        assert listed(run) == {}
    put(work, "out/log", "x" * 51)
    pass_seconds(mirror, clock, 1.0)
    assert listed(run) == {"out/log": "x" * 51}


def test_a_copy_of_a_file_that_changed_meanwhile_is_not_listed(
    work: Path, run: LakePath, clock: Clock, start: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = start()
    upload = kept_mirror.upload_files

    def upload_while_written(
        files: Mapping[str, Path], root: LakePath, **options: Any
    ) -> dict[str, FileFacts]:
        facts = upload(files, root, **options)
        with (work / "out" / "log").open("a") as log:
            log.write("more")
        return facts

    put(work, "out/log", "1")
    put(work, "out/fine", "1")
    mirror.poll()
    with monkeypatch.context() as patch:
        patch.setattr(kept_mirror, "upload_files", upload_while_written)
        pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/fine": "1"}
    assert stored(run) == ["out/fine"], "each such copy would stay on the lake"
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/fine": "1", "out/log": "1more"}


def test_a_deleted_file_leaves_the_index_and_the_lake(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    for name in ("a", "b"):
        put(work, f"out/{name}", name)
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert sorted(listed(run)) == ["out/a", "out/b"]
    (work / "out" / "a").unlink()
    mirror.poll()
    assert listed(run) == {"out/b": "b"} and stored(run) == ["out/b"]
    # No earlier attempt has it, so there is nothing to hide.
    assert index_of(run).removed == frozenset()


def test_a_directory_that_is_deleted_and_filled_again(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    (work / "out" / "a").unlink()
    (work / "out").rmdir()
    assert mirror.poll() == [] and listed(run) == {}
    put(work, "out/a", "again")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/a": "again"}


def test_a_file_that_is_moved_away_and_back_is_uploaded_again(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    file = put(work, "out/a", "1")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    file.rename(work / "aside")
    mirror.poll()
    assert listed(run) == {}
    (work / "aside").rename(file)
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/a": "1"}


def test_a_file_that_is_gone_before_its_upload_is_not_uploaded(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    file = put(work, "out/a", "1")
    mirror.poll()
    file.unlink()
    pass_seconds(mirror, clock, 2.0)
    mirror.finish(was_killed=False)
    assert not run.exists() and open_descriptors(work) == 0


def test_a_renamed_file_moves_on_the_lake(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    file = put(work, "out/last", "1")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    file.rename(work / "out" / "previous")
    put(work, "out/last", "22")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/last": "22", "out/previous": "1"}


def test_files_that_existed_before_are_not_uploaded_until_they_change(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    for name in ("restored", "travelled"):
        put(work, f"out/{name}", name)
    mirror = start(restored=["out/restored"])
    for _ in range(3):
        pass_seconds(mirror, clock, 60.0)
    assert not run.exists()
    put(work, "out/restored", "changed in this attempt")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/restored": "changed in this attempt"}
    mirror.finish(was_killed=False)
    assert stored(run) == ["out/restored"]


def test_a_restored_file_that_is_deleted_is_removed_for_earlier_attempts(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    first = start()
    for name in ("a", "b"):
        put(work, f"out/{name}", name)
    first.finish(was_killed=False)
    second = start(restored=["out/a", "out/b"], attempt=1)
    (work / "out" / "a").unlink()
    second.poll()
    assert index_of(run, 1).removed == {"out/a"} and listed(run) == {"out/b": "b"}
    put(work, "out/a", "again")
    second.poll()
    pass_seconds(second, clock, 2.0)
    assert index_of(run, 1).removed == frozenset()
    assert listed(run) == {"out/a": "again", "out/b": "b"}


def test_a_restored_file_that_was_changed_and_then_deleted_is_removed(
    work: Path, run: LakePath, start: Mirrors
) -> None:
    first = start()
    file = put(work, "out/a", "a")
    first.finish(was_killed=False)
    second = start(restored=["out/a"], attempt=1)
    put(work, "out/a", "changed")
    second.finish(was_killed=False)
    assert listed(run) == {"out/a": "changed"}
    file.unlink()
    second.finish(was_killed=False)
    assert listed(run) == {} and index_of(run, 1).removed == {"out/a"}


def test_only_the_kept_directories_are_mirrored(work: Path, run: LakePath, start: Mirrors) -> None:
    mirror = start("out", "deep/ckpt", "not-made")
    for name in ("out/a", "deep/ckpt/b/c", "deep/other", "outer", "out-2/a"):
        put(work, name, name)
    mirror.finish(was_killed=False)
    assert sorted(listed(run)) == ["deep/ckpt/b/c", "out/a"]


def test_links_and_pipes_are_not_mirrored(work: Path, run: LakePath, start: Mirrors) -> None:
    mirror = start()
    put(work, "elsewhere/secret", "secret")
    put(work, "out/a", "1")
    (work / "out" / "link").symlink_to(work / "elsewhere" / "secret")
    (work / "out" / "directory").symlink_to(work / "elsewhere")
    os.mkfifo(work / "out" / "pipe")
    assert mirror.finish(was_killed=False) == []
    assert listed(run) == {"out/a": "1"}


def test_a_rank_that_ends_by_itself_leaves_nothing_behind(
    work: Path, run: LakePath, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    put(work, "out/empty", "")
    mirror.poll()
    put(work, "out/a", "22")
    put(work, "out/b", "just written")
    assert mirror.finish(was_killed=False) == []
    assert listed(run) == {"out/a": "22", "out/b": "just written", "out/empty": ""}
    assert open_descriptors(work) == 0


@pytest.mark.parametrize("was_killed", [False, True])
def test_the_last_version_of_a_file_that_is_replaced_is_uploaded(
    work: Path, run: LakePath, start: Mirrors, was_killed: bool
) -> None:
    mirror = start()
    replace(work, "out/last.pt", "first")
    mirror.poll()
    replace(work, "out/last.pt", "the last one")
    assert mirror.finish(was_killed=was_killed) == []
    assert listed(run) == {"out/last.pt": "the last one"}
    assert stored(run) == ["out/last.pt"]


@pytest.mark.parametrize("count", [5, 12, 13])
def test_more_files_than_may_be_open_are_uploaded(
    work: Path,
    run: LakePath,
    clock: Clock,
    start: Mirrors,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    monkeypatch.setattr(kept_mirror, "_MAX_OPEN", 4)
    mirror = start()
    for number in range(count):
        put(work, f"out/{number}", str(number))
    mirror.poll()
    assert open_descriptors(work) == 4 and not run.exists()
    pass_seconds(mirror, clock, 2.0)
    assert len(listed(run)) == 4
    mirror.finish(was_killed=False)
    assert listed(run) == {f"out/{number}": str(number) for number in range(count)}
    assert open_descriptors(work) == 0


def test_more_files_than_may_be_open_are_uploaded_while_the_rank_runs(
    work: Path, run: LakePath, clock: Clock, start: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_mirror, "_MAX_OPEN", 4)
    mirror = start()
    for number in range(10):
        put(work, f"out/{number}", str(number))
    for _ in range(6):
        mirror.poll()
        pass_seconds(mirror, clock, 2.0)
    assert len(listed(run)) == 10


def test_a_half_written_file_of_a_killed_rank_is_not_uploaded(
    work: Path, run: LakePath, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/half", "ha")
    mirror.finish(was_killed=True)
    assert not run.exists()


def test_the_complete_version_of_a_half_written_file_stays(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/a", "complete")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    put(work, "out/a", "ha")
    mirror.finish(was_killed=True)
    assert listed(run) == {"out/a": "complete"}


def test_a_file_that_a_killed_rank_has_renamed_into_place_is_uploaded(
    work: Path, run: LakePath, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/half", "ha")
    replace(work, "out/renamed", "complete")
    mirror.finish(was_killed=True)
    assert listed(run) == {"out/renamed": "complete"}


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_the_version_before_a_new_half_written_file_stays(
    work: Path, run: LakePath, clock: Clock, start: Mirrors, is_uploaded: bool
) -> None:
    mirror = start()
    # As scripts that remove the last checkpoint before they write the next one.
    file = put(work, "out/last.pt", "complete")
    mirror.poll()
    if is_uploaded:
        pass_seconds(mirror, clock, 2.0)
    # An open file keeps its inode, so that the next file has another one on any file system.
    with file.open():
        file.unlink()
        put(work, "out/last.pt", "ha")
        mirror.finish(was_killed=True)
    assert listed(run) == {"out/last.pt": "complete"}


def test_the_version_before_a_half_written_copy_stays(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    best = put(work, "ckpt/5.pt", "complete")
    os.utime(best, (1, 1))
    shutil.copy2(best, work / "out" / "best.pt")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    assert listed(run) == {"out/best.pt": "complete"}
    # The next copy writes into the same file, and the kill comes before its end.
    put(work, "out/best.pt", "ha")
    mirror.finish(was_killed=True)
    assert listed(run) == {"out/best.pt": "complete"}


def test_a_file_that_a_killed_rank_wrote_long_before_is_uploaded(
    work: Path, run: LakePath, clock: Clock, start: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3.0)
    mirror.finish(was_killed=True)
    assert listed(run) == {"out/a": "1"}


def test_what_was_unchanged_for_two_seconds_is_uploaded_after_a_kill(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    mirror.poll()
    clock.now += 2.0
    put(work, "out/half", "ha")
    mirror.finish(was_killed=True)
    assert listed(run) == {"out/a": "1"}


def test_a_killed_rank_may_have_removed_files(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    put(work, "out/restored", "1")
    mirror = start(restored=["out/restored"])
    file = put(work, "out/a", "1")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    file.unlink()
    (work / "out" / "restored").unlink()
    mirror.finish(was_killed=True)
    assert listed(run) == {} and index_of(run).removed == {"out/restored"}


def test_names_that_the_lake_refuses_are_warned_of_once(
    work: Path, run: LakePath, clock: Clock, start: Mirrors
) -> None:
    mirror = start()
    for name in ("odd?", "odder#", "a:b", "fine"):
        put(work, f"out/{name}", name)
    put(work, f"out/{os.fsdecode(bytes([255]))}", "not Unicode")
    (warning,) = mirror.poll()
    assert "is not on the lake: the lake does not accept its name" in warning
    assert pass_seconds(mirror, clock, 2.0) == []
    assert listed(run) == {"out/fine": "fine"}
    assert mirror.finish(was_killed=False) == []


def test_too_many_files_are_warned_of_once(
    work: Path, run: LakePath, start: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_mirror, "_MAX_FILES", 3)
    mirror = start()
    for number in range(6):
        put(work, f"out/{number}", str(number))
    (warning,) = mirror.finish(was_killed=False)
    assert warning == "only the first 3 files of the kept directories are on the lake"
    assert listed(run) == {f"out/{number}": str(number) for number in range(3)}


@pytest.mark.parametrize("refused", ["index.json", "a"])
def test_the_poll_after_a_failure_uploads(
    work: Path,
    run: LakePath,
    clock: Clock,
    start: Mirrors,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    put(work, "out/b", "1")
    mirror.poll()
    with monkeypatch.context() as patch:
        refuse_writes(patch, refused)
        with pytest.raises(StoreError, match="not yours"):
            pass_seconds(mirror, clock, 2.0)
        assert listed(run) == {}
    assert mirror.poll() == []
    assert listed(run) == {"out/a": "1", "out/b": "1"}


def refuse_writes(patch: pytest.MonkeyPatch, name: str) -> None:
    """Has the lake refuse to write files of a name, or their drafts."""
    client: Any = type(LakePath("file:///").client)
    write = client.write

    def refuse(self: Any, path: str, *rest: Any, **options: Any) -> Any:
        last = path.rpartition("/")[2]
        if last == name or last.startswith(f".{name}."):
            raise PermissionError(13, "not yours", path)
        return write(self, path, *rest, **options)

    patch.setattr(client, "write", refuse)


def test_the_last_version_is_uploaded_after_a_failure_too(
    work: Path, run: LakePath, clock: Clock, start: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = start()
    put(work, "out/a", "1")
    mirror.poll()
    with monkeypatch.context() as patch:
        refuse_writes(patch, "a")
        with pytest.raises(StoreError):
            pass_seconds(mirror, clock, 2.0)
    put(work, "out/a", "22")
    assert mirror.finish(was_killed=False) == []
    assert listed(run) == {"out/a": "22"}


def test_a_removal_that_failed_is_listed_by_the_next_poll(
    work: Path, run: LakePath, clock: Clock, start: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = start()
    file = put(work, "out/a", "1")
    mirror.poll()
    pass_seconds(mirror, clock, 2.0)
    file.unlink()
    with monkeypatch.context() as patch:
        refuse_writes(patch, "index.json")
        with pytest.raises(StoreError):
            mirror.poll()
    assert listed(run) == {"out/a": "1"}, "the index and the files stay together"
    mirror.poll()
    assert listed(run) == {} and stored(run) == []


def test_a_stop_ends_the_uploads(work: Path, run: LakePath, start: Mirrors) -> None:
    mirror = start()
    put(work, "out/a", "1")
    mirror.stop.set()
    with pytest.raises(Cancelled):
        mirror.finish(was_killed=False)
    assert listed(run) == {}


def test_no_file_stays_open_after_the_end(work: Path, start: Mirrors) -> None:
    mirror = start()
    put(work, "out/a", "1")
    mirror.poll()
    assert open_descriptors(work) == 1
    mirror.close()
    assert open_descriptors(work) == 0
