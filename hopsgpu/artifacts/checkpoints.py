"""A run's checkpoints: `<root>/<step>/rank-<rank>.<attempt>.<number>/`.

If a step is saved again, the new parts lie beside the old ones, which are removed once all ranks
have saved anew. Each part has a record beside it, `….complete`, or `….min=0.25.complete` with a
metric. The record is written after the part and removed before it. So a part is complete or absent,
whichever process is killed, even where a rename takes two steps, and on an object store, where a
part is uploaded to its place for want of a rename. The record is a JSON object: the part's files
with their sizes and digests, and the position in the launch's data if it has data.
Files in `<root>/_ranks/` announce the ranks that save, each before its first save in an attempt:
`<rank>.<attempt>.<world size>`. A step of an attempt is complete once all ranks that save in the
attempt's world have saved it (`checkpoint_savers`).
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

from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions, superseded
from hopsgpu.artifacts.checkpoint_savers import Saver, Savers, announced_savers
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.names import file_name
from hopsgpu.storage.transfer import upload_files

log = logging.getLogger(__name__)

_STAGING = "_staging"
_COMPLETE = ".complete"
_RANKS = "_ranks"
_TRIES = 3
# A rank may be so many steps behind the others just because uploads take time.
_ON_THEIR_WAY = 3
_NAME = re.compile(r"rank-(\d+)\.(\d+)\.(\d+)(?:(?:\.(min|max)=([^=]+))?(\.complete))?")


@dataclass(frozen=True, order=True)
class Part:
    """What a rank saved at a step, once. Parts with the same attempt and number belong together.

    Attributes:
        attempt: number of the attempt that saved it.
        number: how often the rank had saved the step in this attempt before.
        rank: rank in the gang.
        metric: the metric that it was saved with, or None.
        best: "min" if the smallest metric is the best, "max" if the largest is.
    """

    attempt: int
    number: int
    rank: int
    metric: float | None = field(default=None, compare=False)
    best: str = field(default="min", compare=False)

    @property
    def name(self) -> str:
        """Return the name of the part's directory."""
        return f"rank-{self.rank}.{self.attempt}.{self.number}"

    @property
    def record(self) -> str:
        """Return the name of the record, which shows that the part is complete."""
        scored = "" if self.metric is None else f".{self.best}={self.metric!r}"
        return f"{self.name}{scored}{_COMPLETE}"


@dataclass(frozen=True)
class Saved:
    """What came of a save.

    Attributes:
        step: the step.
        complete: whether this part belongs to a complete checkpoint: all ranks that save, as far as
            they were known, had saved the step in the same attempt too. Of several ranks, at least
            the last one to save a step finds it complete.
        warning: a warning for people if other ranks no longer save, so that steps accumulate.
        agreed: as in the `CheckpointOptions` of the save.
    """

    step: int
    complete: bool
    warning: str | None = None
    agreed: int | None = None


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, for one of its ranks.

    Attributes:
        root: their directory on the lake.
        rank: rank whose parts are saved.
        attempt: number of the attempt that saves.
        world_size: number of ranks in the attempt.
    """

    root: LakePath
    rank: int
    attempt: int = 0
    world_size: int = 1

    def save(
        self,
        files: Mapping[str, Path],
        saving: CheckpointOptions,
        stop: threading.Event | None = None,
    ) -> Saved:
        """Upload this rank's part of the checkpoint at a step, and remove what it supersedes.

        Where there are renames, the part is uploaded to a staging directory first. What this rank
        saved at the step before is removed once all ranks that save have replaced theirs, and with
        it the parts of ranks that an earlier, larger world had.

        Args:
            files: files that `files_of` returned.
            saving: description with the step, and with how many earlier steps to keep.
            stop: event, set when the upload is to be abandoned.

        Raises:
            StoreError: the lake refused the operation; what was saved before stays.
            Cancelled: `stop` was set; what was saved before stays.
        """
        home = self.root / str(saving.step)
        before = set(_listed(home.names()))
        own = (self.attempt, self.rank)
        numbers = (part.number for part in before if (part.attempt, part.rank) == own)
        number = max(numbers, default=-1) + 1
        part = Part(self.attempt, number, self.rank, saving.metric, saving.best)
        self._enter()
        self._sweep()
        began = time.monotonic()
        upload = self._upload_to_place if self.root.is_object_store else self._upload_and_rename
        upload(files, home, part, saving.position, stop or threading.Event())
        seconds = time.monotonic() - began
        log.info("rank %d saved step %d in %s, %.1f s", self.rank, saving.step, home.url, seconds)
        there = self.parts()
        announced = self.announced()
        whole = complete(there, announced)
        if saving.step not in whole:
            log.debug("step %d is not complete yet: other ranks have not saved it", saving.step)
        sizes = {saver.attempt: saver.world_size for saver in announced}
        for old in before:
            is_orphan = old.rank >= self.world_size < sizes.get(old.attempt, 0)
            if old.rank != self.rank and not is_orphan:
                continue
            if saving.step in whole and old < min(whole[saving.step]):
                (home / old.record).remove()
                (home / old.name).remove()
        scores = {step: score(parts) for step, parts in whole.items()}
        directed = {step: (part.metric, part.best) for step, part in scores.items()}
        for step in superseded(there, directed, saving.keep):
            self._retire(step)
        warning = stalled(there, announced, part, saving.keep)
        return Saved(saving.step, part in whole.get(saving.step, ()), warning, saving.agreed)

    def _upload_to_place(
        self,
        files: Mapping[str, Path],
        home: LakePath,
        part: Part,
        position: Mapping[str, Any] | None,
        stop: threading.Event,
    ) -> None:
        try:
            facts = upload_files(files, home / part.name, stop=stop)
            if stop.is_set():
                raise Cancelled(f"the upload of {(home / part.name).url} was stopped")
            # No other process writes a part of this name.
            (home / part.record).write(_record(facts, position))
        except BaseException:
            with contextlib.suppress(StoreError):  # the first problem is the one to report
                (home / part.record).remove()
                (home / part.name).remove()
            raise

    def _upload_and_rename(
        self,
        files: Mapping[str, Path],
        home: LakePath,
        part: Part,
        position: Mapping[str, Any] | None,
        stop: threading.Event,
    ) -> None:
        staging = self._staging()
        made: list[LakePath] = []
        try:
            _upload_with_record(files, staging, position, stop)
            if stop.is_set():
                raise Cancelled(f"the upload of {(home / part.name).url} was stopped")
            for source, name in (("part", part.name), ("record", part.record)):
                _put(staging / source, home, name)
                made.insert(0, home / name)
        except BaseException:
            with contextlib.suppress(StoreError):  # the first problem is the one to report
                for place in made:
                    place.remove()
            raise
        finally:
            with contextlib.suppress(StoreError):  # the next attempt sweeps it
                staging.remove()

    def _enter(self) -> None:
        """Announce to the others that this rank saves, before its first save is complete."""
        name = Saver(self.attempt, self.rank, self.world_size).name
        if name not in (self.root / _RANKS).names():
            (self.root / _RANKS).make()
            (self.root / _RANKS / name).create()

    def announced(self) -> frozenset[Saver]:
        """Return the ranks that have announced that they save, of all attempts."""
        return announced_savers((self.root / _RANKS).names())

    def _staging(self) -> LakePath:
        return self.root / _STAGING / f"{self.attempt}.{self.rank}.{uuid.uuid4().hex}"

    def _sweep(self) -> None:
        """Remove unfinished uploads of earlier attempts."""
        for name in (self.root / _STAGING).names():
            attempt = name.partition(".")[0]
            if attempt.isdecimal() and int(attempt) < self.attempt:
                log.info("removes the unfinished upload %s of an earlier attempt", name)
                (self.root / _STAGING / name).remove()

    def _retire(self, step: int) -> None:
        """Remove a step, at once for its readers; other ranks may do the same meanwhile."""
        log.info("removes step %d in %s: later steps replace it", step, self.root.url)
        home = self.root / str(step)
        if self.root.is_object_store:
            for name in home.names():
                if name.endswith(_COMPLETE):
                    (home / name).remove()
            home.remove()
            return
        gone = self._staging()
        (self.root / _STAGING).make()
        try:
            home.rename(gone)
        except StoreError as error:
            if error.kind != "absent":
                raise
        gone.remove()

    def parts(self) -> Mapping[int, frozenset[Part]]:
        """Return the complete parts by step; an empty set for a step that has none."""
        return {
            int(step): frozenset(
                part for part, is_whole in _listed((self.root / step).names()).items() if is_whole
            )
            for step in self.root.names()
            if step.isdecimal()
        }


def complete(
    parts: Mapping[int, Collection[Part]], announced: Collection[Saver] = ()
) -> Mapping[int, frozenset[Part]]:
    """Return the newest parts that belong together, for each step that all savers have saved.

    Args:
        parts: the existing parts, by step; the ranks that saved them save.
        announced: the ranks that announced that they save.
    """
    savers = savers_of(parts, announced)
    found = {}
    for step, there in parts.items():
        together = collections.defaultdict(set)
        for part in there:
            together[part.attempt, part.number].add(part)
        whole = [
            (attempt, number)
            for (attempt, number), those in together.items()
            if {part.rank for part in those} >= savers.of(attempt)
        ]
        if whole:
            found[step] = frozenset(together[max(whole)])
    return found


def savers_of(parts: Mapping[int, Collection[Part]], announced: Collection[Saver]) -> Savers:
    """Return which ranks must save, by what is announced and by the existing parts."""
    seen = {Saver(part.attempt, part.rank) for there in parts.values() for part in there}
    return Savers(seen.union(announced))


def stalled(
    parts: Mapping[int, Collection[Part]], announced: Collection[Saver], own: Part, keep: int
) -> str | None:
    """Return a warning if a rank saves and others do not, so that no later step becomes complete.

    Args:
        parts: the existing parts, by step.
        announced: the ranks that announced that they save.
        own: the part that the rank saved last; only parts that it saved in the same attempt count.
        keep: number of complete steps that the rank wants to keep.
    """
    saving = savers_of(parts, announced).of(own.attempt)
    last = max(complete(parts, announced), default=-1)
    mine = (own.attempt, own.rank)
    later = sorted(
        step
        for step, there in parts.items()
        if step > last and mine in {(part.attempt, part.rank) for part in there}
    )
    if len(later) <= max(keep, _ON_THEIR_WAY):
        return None
    step = later[0]
    newest = max((part.attempt, part.number) for part in parts[step])
    have = {part.rank for part in parts[step] if (part.attempt, part.number) == newest}
    missing = ", ".join(str(rank) for rank in sorted(saving - have))
    latest = "no step is complete" if last < 0 else f"step {last} is the latest complete step"
    return (
        f"{len(later)} checkpoints of rank {own.rank}, from step {step} on, are incomplete and"
        f" stay on the lake: other ranks that save have not saved step {step}: {missing}; {latest}."
        " All ranks that save must save the same steps, and the same ranks in every attempt"
    )


def files_of(path: Path) -> dict[str, Path]:
    """Return the files to save of a file or a directory, by their names below the part.

    Raises:
        ConfigError: the path does not exist, the directory has no file, or as `files_below`.
    """
    path = path.absolute()  # "." has no name
    if path.is_file():
        return {file_name(path.name, "path"): path}
    below = files_below(path) if path.is_dir() else {}
    if not below:
        raise ConfigError(f"{path} is neither a file nor a directory with files: nothing to save")
    top = file_name(path.name, "path")
    return {f"{top}/{name}": file for name, file in below.items()}


def score(parts: Collection[Part]) -> Part:
    """Return the part whose metric is the checkpoint's: of those with one, the lowest rank's."""
    return min(parts, key=lambda part: (part.metric is None, part.rank))


def _upload_with_record(
    files: Mapping[str, Path],
    staging: LakePath,
    position: Mapping[str, Any] | None,
    stop: threading.Event,
) -> None:
    """Upload a part and its record, at the same time if possible.

    What the record says is known once the part's files are read. To close a file then takes HDFS's
    client 0.4 s, because it asks the NameNode before the DataNode has told it of the last block.
    """
    known: dict[str, FileFacts] = {}
    is_read = threading.Event()

    def learn(name: str, facts: FileFacts) -> None:
        known[name] = facts
        if len(known) == len(files):
            is_read.set()

    with ThreadPoolExecutor(1, "hopsgpu-part") as pool:
        uploading = pool.submit(upload_files, files, staging / "part", stop=stop, known=learn)
        uploading.add_done_callback(lambda _: is_read.set())
        is_read.wait()
        early = dict(known)
        if len(early) == len(files):
            (staging / "record").write(_record(early, position))
        facts = uploading.result()
    if facts != early:  # a file was changed, or tried again
        (staging / "record").write(_record(facts, position))


def _put(source: LakePath, home: LakePath, name: str) -> None:
    for left in reversed(range(_TRIES)):
        home.make()
        try:
            if not source.rename(home / name):
                raise StoreError(f"{(home / name).url} is being written by another process")
            return
        except StoreError as error:
            # A rank that is far ahead may have removed the step just now.
            if error.kind != "absent" or not left:
                raise
            log.debug("another rank has removed %s: creates it again", home.url)


def _listed(names: Collection[str]) -> Mapping[Part, bool]:
    """Return the parts of which anything exists, each with whether it is complete."""
    matches = [found for found in map(_NAME.fullmatch, names) if found is not None]
    directories = {_part(found) for found in matches if not found[6]}
    records = {_part(found) for found in matches if found[6]}
    return {part: part in directories and part in records for part in records} | {
        part: False for part in directories - records
    }


def _part(match: re.Match[str]) -> Part:
    metric = float(match[5]) if match[5] else None
    return Part(int(match[2]), int(match[3]), int(match[1]), metric, match[4] or "min")


def _record(facts: Mapping[str, FileFacts], position: Mapping[str, Any] | None) -> bytes:
    files = {name: {"bytes": fact.bytes, DIGEST: fact.digest} for name, fact in facts.items()}
    in_data = {} if position is None else {"position": position}
    return json.dumps({"files": files, **in_data}).encode()
