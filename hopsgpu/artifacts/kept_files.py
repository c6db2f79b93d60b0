"""Files of scripts that outlive their ranks, in the run's directory on the lake.

    <run>/kept/attempt-<a>/rank-<r>/index.json   what the rank has mirrored, and what it removed
    <run>/kept/attempt-<a>/rank-<r>/<round>/<path>

The agent of a rank mirrors its directories there (`agent.kept_mirror`). The index is replaced once
the files of a round are complete, so what it lists is whole. The driver merges the indexes: the
latest attempt that wrote or removed a file counts. Two ranks of one attempt must not write
different files of one name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import DIGEST, MAX_LIST_BYTES, FileFacts, check_list, read_facts
from hopsgpu.storage.error_messages import ABSENT, DAMAGED
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.names import is_path_below
from hopsgpu.storage.transfer import download_files

log = logging.getLogger(__name__)

KEPT = "kept"
_INDEX = "index.json"
_ATTEMPT = re.compile(r"attempt-(\d{1,9})")
_RANK = re.compile(r"rank-(\d{1,9})")
_ROUND = re.compile(r"\d{1,12}")
_READERS = 16
_MAX_LISTED = 5


@dataclass(frozen=True)
class KeptFile:
    """A file on the lake.

    Attributes:
        name: path relative to the script's working directory.
        source: directory on the lake, relative to the run's directory, that has it as `name`.
    """

    name: str
    attempt: int
    rank: int
    source: str
    facts: FileFacts


@dataclass(frozen=True)
class RankIndex:
    """The files that one rank of one attempt has mirrored.

    Attributes:
        files: facts of the files, and the round that uploaded each, by name.
        removed: names of files of earlier attempts that the rank has removed.
    """

    attempt: int
    rank: int
    files: Mapping[str, tuple[FileFacts, str]] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def dump(self) -> bytes:
        """Return the content of the index.

        Raises:
            ConfigError: there are too many files.
        """
        files = {
            name: {"bytes": facts.bytes, DIGEST: facts.digest, "round": number}
            for name, (facts, number) in self.files.items()
        }
        content = {"files": files, "removed": sorted(self.removed)}
        return check_list(json.dumps(content).encode(), len(files))

    @classmethod
    def parse(cls, attempt: int, rank: int, content: bytes, url: str) -> RankIndex:
        """Return the index in a file's content; raise StoreError if it is invalid."""
        try:
            values = json.loads(content)
            listed: Mapping[str, Any] = values["files"]
            facts = read_facts(listed, DIGEST) if listed else {}
            files = {name: (facts[name], _round(listed[name]["round"])) for name in facts}
            removed = frozenset(values["removed"])
            if not all(map(is_path_below, removed)):
                raise ValueError("it removes something outside the directory")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(f"{url} is damaged: {error}", DAMAGED) from error
        return cls(attempt, rank, files, removed)


def _round(value: object) -> str:
    if not isinstance(value, str) or not _ROUND.fullmatch(value):
        raise ValueError(f"{value!r:.99} is not a round")
    return value


def place_of(attempt: int, rank: int) -> str:
    """Return the directory of a rank's files, relative to the run's directory."""
    return f"{KEPT}/attempt-{attempt}/rank-{rank}"


def index_file(place: LakePath) -> LakePath:
    return place / _INDEX


@dataclass(frozen=True)
class Conflict:
    """Two ranks of one attempt that wrote different files of one name."""

    name: str
    ranks: tuple[int, int]


@dataclass(frozen=True)
class KeptFiles:
    """The merged files of a run.

    Attributes:
        files: the file that counts, by name; of a conflict, that of the lowest rank.
        alternatives: the other files of conflicts.
    """

    files: Mapping[str, KeptFile] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    alternatives: tuple[KeptFile, ...] = ()

    def below(self, directories: Collection[str]) -> KeptFiles:
        """Return the files below some directories."""

        def is_below(name: str) -> bool:
            return any(name.startswith(f"{directory}/") for directory in directories)

        return KeptFiles(
            {name: file for name, file in self.files.items() if is_below(name)},
            tuple(conflict for conflict in self.conflicts if is_below(conflict.name)),
            tuple(file for file in self.alternatives if is_below(file.name)),
        )

    @property
    def distinct(self) -> dict[str, KeptFile]:
        """All files by a name of their own: the ranks of a conflict come before its name."""
        conflicting = {conflict.name for conflict in self.conflicts}
        named = {name: file for name, file in self.files.items() if name not in conflicting}
        for file in (*(self.files[name] for name in conflicting), *self.alternatives):
            named[f"rank-{file.rank}/{file.name}"] = file
        return dict(sorted(named.items()))


def merge(indexes: Iterable[RankIndex]) -> KeptFiles:
    """Merge what the ranks of all attempts have mirrored. Pure."""
    attempts: dict[int, list[RankIndex]] = {}
    for index in indexes:
        attempts.setdefault(index.attempt, []).append(index)
    files: dict[str, KeptFile] = {}
    conflicts: dict[str, Conflict] = {}
    alternatives: dict[str, list[KeptFile]] = {}
    for attempt, of_attempt in sorted(attempts.items()):
        written: dict[str, list[KeptFile]] = {}
        for index in sorted(of_attempt, key=lambda index: index.rank):
            for name in index.removed:
                files.pop(name, None)
                conflicts.pop(name, None)
            for name, (facts, number) in index.files.items():
                source = f"{place_of(attempt, index.rank)}/{number}"
                written.setdefault(name, []).append(
                    KeptFile(name, attempt, index.rank, source, facts)
                )
        for name, versions in written.items():
            files[name] = versions[0]
            different = [file for file in versions if file.facts != versions[0].facts]
            conflicts.pop(name, None)
            alternatives[name] = different
            if different:
                conflicts[name] = Conflict(name, (versions[0].rank, different[0].rank))
    return KeptFiles(
        files,
        tuple(conflict for _, conflict in sorted(conflicts.items())),
        tuple(file for name in sorted(conflicts) for file in alternatives[name]),
    )


def read_kept(run: LakePath) -> KeptFiles:
    """Return the merged files of a run; none if it has no mirrored directory.

    Raises:
        StoreError: the lake failed, or an index is damaged.
    """
    places = [
        (int(attempt[1]), int(rank[1]))
        for attempt in _matches(_ATTEMPT, run / KEPT)
        for rank in _matches(_RANK, run / KEPT / attempt[0])
    ]
    run.with_client()

    def read(place: tuple[int, int]) -> RankIndex | None:
        file = index_file(run / place_of(*place))
        try:
            return RankIndex.parse(*place, file.read(MAX_LIST_BYTES), file.url)
        except StoreError as error:
            if error.kind == ABSENT:  # the rank has mirrored nothing yet
                return None
            raise

    with ThreadPoolExecutor(_READERS, thread_name_prefix="hopsgpu-kept") as pool:
        return merge(index for index in pool.map(read, places) if index is not None)


def _matches(pattern: re.Pattern[str], directory: LakePath) -> list[re.Match[str]]:
    matches = (pattern.fullmatch(name) for name in directory.names(only_directories=True))
    return [match for match in matches if match is not None]


def has_kept(run: LakePath) -> bool:
    """Return whether a rank of a run has mirrored files."""
    return bool(read_kept(run).files)


def conflict_error(conflicts: Sequence[Conflict], option: str, run: LakePath) -> StoreError:
    """Return the error for ranks that wrote different files of one name.

    Args:
        option: what names the directory.
    """
    first = conflicts[0]
    more = f" and {len(conflicts) - 1} more files" if len(conflicts) > 1 else ""
    names = ", ".join(conflict.name for conflict in conflicts[:_MAX_LISTED])
    return StoreError(
        f"ranks {first.ranks[0]} and {first.ranks[1]} wrote different content into {first.name}"
        f"{more}, and {option} has one directory for all ranks ({names}): let one rank write it"
        " (RANK=0), or put the rank into its name. Both files stay in"
        f" {(run / KEPT).url} (`hopsgpu runs files`)"
    )


def download_distinct(kept: KeptFiles, run: LakePath, target: Path) -> None:
    """Download all files of a run below a directory, under the names of `KeptFiles.distinct`.

    Raises:
        StoreError, OSError: as `download`.
    """
    by_prefix: dict[str, list[KeptFile]] = {}
    for name, file in kept.distinct.items():
        by_prefix.setdefault(name.removesuffix(file.name), []).append(file)
    for prefix, files in by_prefix.items():
        download(files, run, target / prefix if prefix else target)


def download(files: Iterable[KeptFile], run: LakePath, target: Path) -> None:
    """Download files of a run below a directory, under their names, and check their digests.

    Raises:
        StoreError: the lake failed, or a file is damaged.
        OSError: the directory cannot be written.
    """
    by_source: dict[str, dict[str, FileFacts]] = {}
    for file in files:
        by_source.setdefault(file.source, {})[file.name] = file.facts
    for source, facts in by_source.items():
        download_files(facts, run / source, target)
