"""Which of the files that ranks have mirrored count, and what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hopsgpu.artifacts.kept_files import (
    Conflict,
    KeptFiles,
    RankIndex,
    conflict_error,
    download,
    download_distinct,
    has_kept,
    index_file,
    merge,
    place_of,
    read_kept,
)
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath


@pytest.fixture
def run(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake/runs/fit-1")


def facts_of(text: str) -> FileFacts:
    return FileFacts(len(text), xxhash.xxh3_128(text.encode()).hexdigest())


def index_of(
    attempt: int, rank: int, files: Mapping[str, str] | None = None, removed: tuple[str, ...] = ()
) -> RankIndex:
    """The index of a rank whose files, by name, have these texts, all of its first round."""
    described = {name: (facts_of(text), "1") for name, text in (files or {}).items()}
    return RankIndex(attempt, rank, described, frozenset(removed))


def put(run: LakePath, attempt: int, rank: int, files: Mapping[str, str], *removed: str) -> None:
    """Has a rank mirrored some files, as its agent does."""
    place = run / place_of(attempt, rank)
    for name, text in files.items():
        file = place / "1" / name
        file.parent.make()
        file.write(text.encode())
    place.make()
    index_file(place).write(index_of(attempt, rank, files, removed).dump())


def origins(kept: KeptFiles) -> dict[str, tuple[int, int]]:
    """The attempt and the rank of each file that counts."""
    return {name: (file.attempt, file.rank) for name, file in kept.files.items()}


def texts_below(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_text() for path in files}


def test_nothing_is_merged_of_nothing() -> None:
    assert merge([]) == merge([index_of(0, 0)]) == KeptFiles()


def test_ranks_with_different_files_add_up() -> None:
    kept = merge([index_of(0, 1, {"out/b": "b"}), index_of(0, 0, {"out/a": "a"})])
    assert origins(kept) == {"out/a": (0, 0), "out/b": (0, 1)}
    assert kept.conflicts == kept.alternatives == ()
    file = kept.files["out/b"]
    assert file.source == "kept/attempt-0/rank-1/1" and file.facts == facts_of("b")


def test_a_later_attempt_wins_whatever_the_order() -> None:
    indexes = [
        index_of(10, 3, {"out/a": "new"}),
        index_of(2, 0, {"out/a": "old", "out/only": "old"}),
        index_of(0, 0, {"out/a": "oldest"}),
    ]
    for ordered in (indexes, indexes[::-1]):
        assert origins(merge(ordered)) == {"out/a": (10, 3), "out/only": (2, 0)}


def test_a_round_is_part_of_the_source() -> None:
    files = {"out/a": (facts_of("a"), "17")}
    kept = merge([RankIndex(1, 2, files)])
    assert kept.files["out/a"].source == "kept/attempt-1/rank-2/17"


def test_a_removal_counts_for_earlier_attempts() -> None:
    first = index_of(0, 0, {"out/a": "a", "out/b": "b"})
    kept = merge([index_of(1, 1, {}, ("out/a",)), first])
    assert origins(kept) == {"out/b": (0, 0)}
    written_again = index_of(2, 0, {"out/a": "again"})
    assert origins(merge([first, index_of(1, 0, {}, ("out/a",)), written_again])) == {
        "out/a": (2, 0),
        "out/b": (0, 0),
    }


def test_a_file_that_one_rank_removes_and_another_writes_is_there() -> None:
    first = index_of(0, 0, {"out/a": "old"})
    for remover, writer in ((0, 1), (1, 0)):
        later = [index_of(1, remover, {}, ("out/a",)), index_of(1, writer, {"out/a": "new"})]
        assert origins(merge([first, *later])) == {"out/a": (1, writer)}


def test_different_content_of_two_ranks_is_a_conflict_that_names_both() -> None:
    kept = merge(
        [
            index_of(0, 5, {"out/a": "five", "out/fine": "x"}),
            index_of(0, 2, {"out/a": "two"}),
            index_of(0, 3, {"out/a": "two"}),
        ]
    )
    assert kept.conflicts == (Conflict("out/a", (2, 5)),)
    assert origins(kept) == {"out/a": (0, 2), "out/fine": (0, 5)}
    assert [(file.name, file.rank) for file in kept.alternatives] == [("out/a", 5)]


def test_all_other_versions_are_alternatives() -> None:
    kept = merge([index_of(0, rank, {"out/a": str(rank)}) for rank in range(3)])
    assert kept.conflicts == (Conflict("out/a", (0, 1)),)
    assert [file.rank for file in kept.alternatives] == [1, 2]


def test_equal_content_of_two_ranks_is_no_conflict() -> None:
    kept = merge([index_of(0, rank, {"out/a": "same"}) for rank in range(4)])
    assert origins(kept) == {"out/a": (0, 0)} and kept.conflicts == kept.alternatives == ()


def test_ranks_of_different_attempts_do_not_conflict() -> None:
    kept = merge([index_of(0, 0, {"out/a": "zero"}), index_of(1, 1, {"out/a": "one"})])
    assert kept.conflicts == () and origins(kept) == {"out/a": (1, 1)}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_later_attempt_resolves_a_conflict(rank: int) -> None:
    conflicting = [index_of(0, 0, {"out/a": "zero"}), index_of(0, 1, {"out/a": "one"})]
    kept = merge([*conflicting, index_of(1, rank, {"out/a": "new"})])
    assert kept.conflicts == kept.alternatives == () and origins(kept) == {"out/a": (1, rank)}
    kept = merge([*conflicting, index_of(1, rank, {}, ("out/a",))])
    assert kept == KeptFiles()


def test_a_later_attempt_may_have_a_conflict_of_its_own() -> None:
    first = [index_of(0, rank, {"out/a": str(rank)}) for rank in range(2)]
    later = [index_of(1, rank, {"out/a": f"later {rank}"}) for rank in (2, 3)]
    kept = merge([*later, *first])
    assert kept.conflicts == (Conflict("out/a", (2, 3)),)
    assert [(file.attempt, file.rank) for file in kept.alternatives] == [(1, 3)]


def test_the_indexes_are_not_changed() -> None:
    indexes = [index_of(0, 0, {"out/a": "a"}), index_of(1, 0, {"out/b": "b"}, ("out/a",))]
    assert merge(indexes) == merge(indexes)
    assert list(indexes[0].files) == ["out/a"]


def test_files_below_some_directories() -> None:
    names = ("ckpt/a", "ckpt/deep/a", "ckpt-2/a", "out/a", "logs/a")
    indexes = [index_of(0, rank, {name: f"{name}{rank}" for name in names}) for rank in range(2)]
    kept = merge(indexes).below(["ckpt", "logs"])
    expected = ["ckpt/a", "ckpt/deep/a", "logs/a"]
    assert sorted(kept.files) == expected
    assert [conflict.name for conflict in kept.conflicts] == expected
    assert [file.name for file in kept.alternatives] == expected
    assert merge(indexes).below([]) == KeptFiles()


def test_each_version_has_a_name_of_its_own() -> None:
    kept = merge(
        [
            index_of(0, 0, {"out/a": "zero", "out/b": "b"}),
            index_of(0, 1, {"out/a": "one"}),
            index_of(0, 2, {"out/c": "c"}),
        ]
    )
    assert {name: file.rank for name, file in kept.distinct.items()} == {
        **{"out/b": 0, "out/c": 2, "rank-0/out/a": 0, "rank-1/out/a": 1},
    }
    assert list(kept.distinct) == sorted(kept.distinct)


def test_indexes_survive_their_files() -> None:
    index = RankIndex(
        3, 4, {"out/a": (FileFacts(0, "0" * 32), "1"), "out/é": (FileFacts(7, "f"), "999")}
    )
    removed = RankIndex(3, 4, {}, frozenset({"out/b", "out/c"}))
    for each in (index, removed, RankIndex(3, 4)):
        assert RankIndex.parse(3, 4, each.dump(), "file:///i") == each


def test_an_index_that_nobody_could_read_is_not_written() -> None:
    files = {f"out/{'x' * 200}{number}": (FileFacts(1, "f"), "1") for number in range(40_000)}
    with pytest.raises(ConfigError, match="the list of 40000 files"):
        RankIndex(0, 0, files).dump()


GOOD: dict[str, Any] = {"bytes": 1, "xxh3_128": "f", "round": "1"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"7",
        b"[" * 100_000,
        b"9" * 10_000,
        json.dumps({}).encode(),
        json.dumps({"files": {}}).encode(),
        json.dumps({"removed": []}).encode(),
        json.dumps({"files": [1], "removed": []}).encode(),
        json.dumps({"files": "text", "removed": []}).encode(),
        json.dumps({"files": {"a": 1}, "removed": []}).encode(),
        json.dumps({"files": {"a": None}, "removed": []}).encode(),
    ],
)
def test_what_is_no_index_is_damaged(content: bytes) -> None:
    check_is_damaged(content)


def check_is_damaged(content: bytes) -> None:
    with pytest.raises(StoreError, match="file:///lake/i is damaged: ") as raised:
        RankIndex.parse(0, 0, content, "file:///lake/i")
    assert raised.value.kind == "damaged"


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../a", "a/../../b", "a/./b", "a//b", "a/", "a\\b", "c:a", "a\nb", "a?b"],
)
@pytest.mark.parametrize("part", ["files", "removed"])
def test_hostile_names_are_damage(part: str, name: str) -> None:
    content = {"files": {name: GOOD}, "removed": []}
    if part == "removed":
        content = {"files": {"a": GOOD}, "removed": [name]}
    check_is_damaged(json.dumps(content).encode())


@pytest.mark.parametrize(
    "fields",
    [
        *({"round": value} for value in ("", "..", "../1", "1/2", "-1", "1.0", "x", "1" * 13)),
        *({"round": value} for value in (1, None, ["1"], "1\n")),
        *({"bytes": value} for value in (-1, 1.5, True, "1", None, 2**63)),
        *({"xxh3_128": value} for value in (7, None, ["f"])),
    ],
)
def test_hostile_fields_are_damage(fields: dict[str, Any]) -> None:
    content = {"files": {"a": {**GOOD, **fields}}, "removed": []}
    check_is_damaged(json.dumps(content).encode())


@pytest.mark.parametrize("missing", ["bytes", "xxh3_128", "round"])
def test_missing_fields_are_damage(missing: str) -> None:
    fields = {name: value for name, value in GOOD.items() if name != missing}
    check_is_damaged(json.dumps({"files": {"a": fields}, "removed": []}).encode())


@pytest.mark.parametrize("removed", [None, 7, [7], [None], [["a"]], "/"])
def test_hostile_removals_are_damage(removed: object) -> None:
    check_is_damaged(json.dumps({"files": {"a": GOOD}, "removed": removed}).encode())


def test_a_run_without_mirrored_directories_has_no_files(run: LakePath) -> None:
    assert read_kept(run) == KeptFiles() and not has_kept(run)
    run.make()
    assert read_kept(run) == KeptFiles() and not has_kept(run)


def test_the_files_of_all_ranks_and_attempts_are_read(run: LakePath) -> None:
    put(run, 0, 0, {"out/a": "old", "out/b": "b"})
    put(run, 0, 1, {"out/c": "c"})
    put(run, 1, 10, {"out/a": "new"}, "out/c")
    kept = read_kept(run)
    assert origins(kept) == {"out/a": (1, 10), "out/b": (0, 0)}
    assert has_kept(run)


def test_removed_files_alone_are_none(run: LakePath) -> None:
    put(run, 1, 0, {}, "out/a")
    assert read_kept(run) == KeptFiles() and not has_kept(run)


def test_what_is_no_place_of_a_rank_is_passed_over(run: LakePath) -> None:
    put(run, 0, 0, {"out/a": "a"})
    kept = Path(run.path) / "kept"
    for name in ("attempt-x/rank-0", "attempt-0/rank-", "attempt-0/rank-0x", "attempt-0/other"):
        (kept / name).mkdir(parents=True)
        (kept / name / "index.json").write_text("{")
    (kept / "attempt-9").write_text("a file")
    (kept / "attempt-0" / "rank-7").mkdir()  # it has mirrored nothing yet
    assert origins(read_kept(run)) == {"out/a": (0, 0)}


def test_a_damaged_index_is_an_error_that_names_it(run: LakePath) -> None:
    put(run, 0, 0, {"out/a": "a"})
    put(run, 0, 1, {})
    place = run / place_of(0, 1)
    index_file(place).write(b"{")
    with pytest.raises(StoreError, match="kept/attempt-0/rank-1/index.json is damaged") as raised:
        read_kept(run)
    assert raised.value.kind == "damaged"


def test_files_are_downloaded_under_their_names(run: LakePath, tmp_path: Path) -> None:
    put(run, 0, 0, {"out/a": "old", "out/deep/b": "b"})
    put(run, 1, 1, {"out/a": "new", "out/empty": ""})
    target = tmp_path / "copy"
    download(read_kept(run).files.values(), run, target)
    assert texts_below(target) == {"out/a": "new", "out/deep/b": "b", "out/empty": ""}


def test_nothing_is_downloaded_of_nothing(run: LakePath, tmp_path: Path) -> None:
    download([], run, tmp_path / "copy")
    download_distinct(KeptFiles(), run, tmp_path / "copy")
    assert texts_below(tmp_path) == {}


def test_both_files_of_a_conflict_are_downloaded(run: LakePath, tmp_path: Path) -> None:
    put(run, 0, 0, {"out/a": "zero", "out/b": "b"})
    put(run, 0, 1, {"out/a": "one"})
    put(run, 0, 2, {"out/a": "two"})
    target = tmp_path / "copy"
    download_distinct(read_kept(run), run, target)
    assert texts_below(target) == {
        **{"out/b": "b", "rank-0/out/a": "zero", "rank-1/out/a": "one", "rank-2/out/a": "two"},
    }


@pytest.mark.parametrize("content", [b"b", b"aa", b"", None])
def test_a_file_that_has_changed_on_the_lake_is_damaged(
    run: LakePath, tmp_path: Path, content: bytes | None
) -> None:
    put(run, 0, 0, {"out/a": "a"})
    stored = run / place_of(0, 0) / "1" / "out/a"
    stored.remove()
    if content is not None:
        stored.write(content)
    with pytest.raises(StoreError) as raised:
        download(read_kept(run).files.values(), run, tmp_path / "copy")
    assert raised.value.kind == "damaged"


def test_the_error_of_a_conflict_says_what_to_do(run: LakePath) -> None:
    conflicts = [Conflict(f"ckpt/{number}", (0, number + 1)) for number in range(7)]
    one = str(conflict_error(conflicts[:1], "checkpoint_dir", run))
    assert one.startswith("ranks 0 and 1 wrote different content into ckpt/0, and checkpoint_dir")
    assert f"{run.url}/kept" in one and "RANK=0" in one and "more files" not in one
    many = str(conflict_error(conflicts, "checkpoint_dir", run))
    assert "ckpt/0 and 6 more files" in many and "ckpt/4" in many and "ckpt/5" not in many
