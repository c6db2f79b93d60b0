"""A run's checkpoints: `<root>/<step>/rank-<rank>.<attempt>.<number>/`.

Each shard directory has a record beside it: `….complete`, or `….min=0.25.complete` with a metric.
The record is a JSON object: the shard's files with their sizes and digests, and the position in
the launch's data, if any. It is written after the shard and removed before the shard. So a shard
is complete or absent, whichever process is killed. This holds even on a local file system, where a
rename takes two steps, and on an object store, where a shard is uploaded in place.

If a step is saved again, the new shards lie beside the old ones until all ranks have saved again.

Files in `<root>/_ranks/` announce the ranks that save: `<rank>.<attempt>.<world size>`. Each rank
creates its file before its first save in an attempt. A step of an attempt is complete once all
ranks that save in the attempt's world have saved it (`saving_ranks`).
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions, steps_to_remove
from hopsgpu.artifacts.saving_ranks import SavingRank, SavingRanks, parse_announcements
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, FileFacts, check_list
from hopsgpu.storage.error_messages import ABSENT
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.names import file_name
from hopsgpu.storage.transfer import upload_files

log = logging.getLogger(__name__)

_STAGING = "_staging"
_COMPLETE = ".complete"
_RANKS = "_ranks"
_MAX_TRIES = 3
# Steps that a rank may be behind the others only because uploads take time.
_MAX_UPLOAD_LAG = 3
_NAME = re.compile(r"rank-(\d+)\.(\d+)\.(\d+)(?:(?:\.(min|max)=([^=]+))?(\.complete))?")


@dataclass(frozen=True, order=True)
class CheckpointShard:
    """A rank's save at a step. Shards with the same attempt and number belong together.

    Attributes:
        number: how often the rank had saved the step in this attempt before.
        best: "min" if the smallest metric is the best, "max" if the largest is.
    """

    attempt: int
    number: int
    rank: int
    metric: float | None = field(default=None, compare=False)
    best: str = field(default="min", compare=False)

    @property
    def name(self) -> str:
        return f"rank-{self.rank}.{self.attempt}.{self.number}"

    @property
    def record(self) -> str:
        scored = "" if self.metric is None else f".{self.best}={self.metric!r}"
        return f"{self.name}{scored}{_COMPLETE}"


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    Attributes:
        is_complete: whether this shard belongs to a complete checkpoint: all ranks that save, as
            far as they were known, had saved the step in the same attempt too. If several ranks
            save a step, at least the last one finds the step complete.
        warning: tells people that other ranks no longer save, so that steps accumulate.
        agreed: as in the `CheckpointOptions` of the save.
    """

    step: int
    is_complete: bool
    warning: str | None = None
    agreed: int | None = None


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, for one of its ranks in an attempt."""

    root: LakePath
    rank: int
    attempt: int = 0
    world_size: int = 1

    def save(
        self,
        files: Mapping[str, Path],
        options: CheckpointOptions,
        stop: threading.Event | None = None,
    ) -> SaveResult:
        """Upload this rank's shard of the checkpoint at a step, and remove what it supersedes.

        This rank's older shard of the same step is removed once all ranks that save have replaced
        theirs. The shards of ranks that only an earlier, larger world had are removed with it.

        Args:
            files: files that `files_of` returned.

        Raises:
            StoreError: the lake refused the operation; what was saved before stays.
            Cancelled: `stop` was set; what was saved before stays.
        """
        step, home = options.step, self.root / str(options.step)
        existing = set(_list_shards(home.names()))
        own_key = (self.attempt, self.rank)
        numbers = (shard.number for shard in existing if (shard.attempt, shard.rank) == own_key)
        number = max(numbers, default=-1) + 1
        shard = CheckpointShard(self.attempt, number, self.rank, options.metric, options.best)
        self._announce()
        self._remove_unfinished_uploads()
        began = time.monotonic()
        upload = self._upload_in_place if self.root.is_object_store else self._upload_and_rename
        upload(files, home, shard, options.position, stop or threading.Event())
        seconds = time.monotonic() - began
        log.info("rank %d saved step %d in %s, %.1f s", self.rank, step, home.url, seconds)
        shards = self.shards()
        announced = self.announced_ranks()
        complete = complete_shards(shards, announced)
        if step not in complete:
            log.debug("step %d is not complete yet: other ranks have not saved it", step)
        sizes = {saver.attempt: saver.world_size for saver in announced}
        for old in existing:
            is_orphan = old.rank >= self.world_size < sizes.get(old.attempt, 0)
            if old.rank != self.rank and not is_orphan:
                continue
            if step in complete and old < min(complete[step]):
                (home / old.record).remove()
                (home / old.name).remove()
        scores = {}
        for complete_step, group in complete.items():
            scored = metric_shard(group)
            scores[complete_step] = (scored.metric, scored.best)
        for old_step in steps_to_remove(shards, scores, options.keep):
            self._remove_step(old_step)
        warning = stall_warning(shards, announced, shard, options.keep)
        return SaveResult(step, shard in complete.get(step, ()), warning, options.agreed)

    def _upload_in_place(
        self,
        files: Mapping[str, Path],
        home: LakePath,
        shard: CheckpointShard,
        position: Mapping[str, Any] | None,
        stop: threading.Event,
    ) -> None:
        try:
            facts = upload_files(files, home / shard.name, stop=stop)
            if stop.is_set():
                raise Cancelled(f"the upload of {(home / shard.name).url} was stopped")
            # No other process writes a shard of this name.
            (home / shard.record).write(_record(facts, position))
        except BaseException:
            with contextlib.suppress(StoreError):  # report the first error
                (home / shard.record).remove()
                (home / shard.name).remove()
            raise

    def _upload_and_rename(
        self,
        files: Mapping[str, Path],
        home: LakePath,
        shard: CheckpointShard,
        position: Mapping[str, Any] | None,
        stop: threading.Event,
    ) -> None:
        staging = self._staging()
        renamed: list[LakePath] = []
        try:
            _upload_with_record(files, staging, position, stop)
            if stop.is_set():
                raise Cancelled(f"the upload of {(home / shard.name).url} was stopped")
            for source, name in (("shard", shard.name), ("record", shard.record)):
                _rename_into(staging / source, home, name)
                renamed.insert(0, home / name)
        except BaseException:
            with contextlib.suppress(StoreError):  # report the first error
                for place in renamed:
                    place.remove()
            raise
        finally:
            with contextlib.suppress(StoreError):  # the next attempt removes the staging directory
                staging.remove()

    def _announce(self) -> None:
        name = SavingRank(self.attempt, self.rank, self.world_size).name
        if name not in (self.root / _RANKS).names():
            (self.root / _RANKS).make()
            (self.root / _RANKS / name).create()

    def announced_ranks(self) -> frozenset[SavingRank]:
        """Return the ranks of all attempts that have announced that they save."""
        return parse_announcements((self.root / _RANKS).names())

    def _staging(self) -> LakePath:
        return self.root / _STAGING / f"{self.attempt}.{self.rank}.{uuid.uuid4().hex}"

    def _remove_unfinished_uploads(self) -> None:
        for name in (self.root / _STAGING).names():
            attempt = name.partition(".")[0]
            if attempt.isdecimal() and int(attempt) < self.attempt:
                log.info("removes the unfinished upload %s of an earlier attempt", name)
                (self.root / _STAGING / name).remove()

    def _remove_step(self, step: int) -> None:
        """Hide a step from readers at once, then remove it; other ranks may remove it meanwhile."""
        log.info("removes step %d in %s: later steps replace it", step, self.root.url)
        home = self.root / str(step)
        if self.root.is_object_store:
            for name in home.names():
                if name.endswith(_COMPLETE):
                    (home / name).remove()
            home.remove()
            return
        hidden = self._staging()
        (self.root / _STAGING).make()
        try:
            home.rename(hidden)
        except StoreError as error:
            if error.kind != ABSENT:
                raise
        hidden.remove()

    def shards(self) -> Mapping[int, frozenset[CheckpointShard]]:
        """Return the complete shards by step; an empty set for a step that has none."""
        return {
            int(step): frozenset(
                shard
                for shard, is_whole in _list_shards((self.root / step).names()).items()
                if is_whole
            )
            for step in self.root.names()
            if step.isdecimal()
        }


def complete_shards(
    shards: Mapping[int, Collection[CheckpointShard]], announced: Collection[SavingRank] = ()
) -> Mapping[int, frozenset[CheckpointShard]]:
    """Return the newest shards that belong together, for each step that all saving ranks saved.

    Args:
        shards: the existing shards, by step; their ranks count as saving ranks.
    """
    savers = saving_ranks_of(shards, announced)
    complete = {}
    for step, existing in shards.items():
        together = collections.defaultdict(set)
        for shard in existing:
            together[shard.attempt, shard.number].add(shard)
        saved_by_all = [
            (attempt, number)
            for (attempt, number), group in together.items()
            if {shard.rank for shard in group} >= savers.of(attempt)
        ]
        if saved_by_all:
            complete[step] = frozenset(together[max(saved_by_all)])
    return complete


def saving_ranks_of(
    shards: Mapping[int, Collection[CheckpointShard]], announced: Collection[SavingRank]
) -> SavingRanks:
    seen = {SavingRank(shard.attempt, shard.rank) for group in shards.values() for shard in group}
    return SavingRanks(seen.union(announced))


def stall_warning(
    shards: Mapping[int, Collection[CheckpointShard]],
    announced: Collection[SavingRank],
    own: CheckpointShard,
    keep: int,
) -> str | None:
    """Return a warning if a rank saves and others do not, so that no later step becomes complete.

    Args:
        own: the shard that the rank saved last; its shards of other attempts do not count.
        keep: number of complete steps that the rank wants to keep.
    """
    savers = saving_ranks_of(shards, announced).of(own.attempt)
    last = max(complete_shards(shards, announced), default=-1)
    own_key = (own.attempt, own.rank)
    later = sorted(
        step
        for step, group in shards.items()
        if step > last and own_key in {(shard.attempt, shard.rank) for shard in group}
    )
    if len(later) <= max(keep, _MAX_UPLOAD_LAG):
        return None
    step = later[0]
    newest = max((shard.attempt, shard.number) for shard in shards[step])
    saved = {shard.rank for shard in shards[step] if (shard.attempt, shard.number) == newest}
    missing = ", ".join(str(rank) for rank in sorted(savers - saved))
    latest = "no step is complete" if last < 0 else f"step {last} is the latest complete step"
    return (
        f"{len(later)} checkpoints of rank {own.rank}, from step {step} on, are incomplete and"
        f" stay on the lake: other ranks that save have not saved step {step}: {missing}; {latest}."
        " All ranks that save must save the same steps, and the same ranks in every attempt"
    )


def files_of(path: Path) -> dict[str, Path]:
    """Return the files to save of a file or a directory, by their names below the shard.

    Raises:
        ConfigError: the path does not exist, or has no file or a name that cannot be saved.
    """
    path = path.absolute()  # "." has no name
    if path.is_file():
        return {file_name(path.name, "path"): path}
    files = files_below(path) if path.is_dir() else {}
    if not files:
        raise ConfigError(f"{path} is neither a file nor a directory with files: nothing to save")
    top = file_name(path.name, "path")
    return {f"{top}/{name}": file for name, file in files.items()}


def metric_shard(shards: Collection[CheckpointShard]) -> CheckpointShard:
    """Return the shard of the lowest rank that saved a metric: its metric is the checkpoint's."""
    return min(shards, key=lambda shard: (shard.metric is None, shard.rank))


def _upload_with_record(
    files: Mapping[str, Path],
    staging: LakePath,
    position: Mapping[str, Any] | None,
    stop: threading.Event,
) -> None:
    """Upload a shard and its record, at the same time if possible.

    The content of the record is known once the shard's files are read. HDFS's client then takes
    another 0.4 s to close the last file, because it asks the NameNode before the DataNode has
    reported the last block.
    """
    facts_so_far: dict[str, FileFacts] = {}
    is_read = threading.Event()

    def add(name: str, facts: FileFacts) -> None:
        facts_so_far[name] = facts
        if len(facts_so_far) == len(files):
            is_read.set()

    with ThreadPoolExecutor(1, "hopsgpu-shard") as pool:
        uploading = pool.submit(upload_files, files, staging / "shard", stop=stop, on_facts=add)
        uploading.add_done_callback(lambda _: is_read.set())
        is_read.wait()
        early = dict(facts_so_far)
        if len(early) == len(files):
            (staging / "record").write(_record(early, position))
        facts = uploading.result()
    if facts != early:  # a file changed, or its upload was retried
        (staging / "record").write(_record(facts, position))


def _rename_into(source: LakePath, home: LakePath, name: str) -> None:
    for tries_left in reversed(range(_MAX_TRIES)):
        home.make()
        try:
            if not source.rename(home / name):
                raise StoreError(f"{(home / name).url} is being written by another process")
            return
        except StoreError as error:
            # Another rank, further ahead, may just have removed the step.
            if error.kind != ABSENT or not tries_left:
                raise
            log.debug("another rank has removed %s: creates it again", home.url)


def _list_shards(names: Collection[str]) -> Mapping[CheckpointShard, bool]:
    """Return the shards of which anything exists, each with whether it is complete."""
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    directories = {_parse_shard(match) for match in matches if not match[6]}
    records = {_parse_shard(match) for match in matches if match[6]}
    return {shard: shard in directories and shard in records for shard in records} | {
        shard: False for shard in directories - records
    }


def _parse_shard(match: re.Match[str]) -> CheckpointShard:
    metric = float(match[5]) if match[5] else None
    return CheckpointShard(int(match[2]), int(match[3]), int(match[1]), metric, match[4] or "min")


def _record(facts: Mapping[str, FileFacts], position: Mapping[str, Any] | None) -> bytes:
    files = {name: {"bytes": fact.bytes, DIGEST: fact.digest} for name, fact in facts.items()}
    extra = {} if position is None else {"position": position}
    return check_list(json.dumps({"files": files, **extra}).encode(), len(files))
