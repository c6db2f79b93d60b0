"""A run's checkpoints: `<root>/<step>/rank-<rank>.<attempt>.<number>/`.

What is saved again at a step lies beside what it replaces, which goes once all ranks have saved
anew. The record beside a part, `….complete`, with a metric `….min=0.25.complete`, comes after it
and goes before it: whoever is killed, and wherever renaming takes two steps, a part is there whole
or not at all. The record is a JSON object: the part's files with their sizes and digests. Which
ranks save is known before they have: by files in `<root>/_ranks/`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import threading
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.artifacts.checkpoint_retention import Saving, superseded
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, Facts
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.names import file_name
from hopsgpu.storage.transfer import upload_files

_STAGING = "_staging"
_RANKS = "_ranks"
_TRIES = 3
# How many steps a rank may be behind the others for nothing but the time that uploads take.
_ON_THEIR_WAY = 3
_NAME = re.compile(r"rank-(\d+)\.(\d+)\.(\d+)(?:(?:\.(min|max)=([^=]+))?(\.complete))?")


@dataclass(frozen=True, order=True)
class Part:
    """What a rank saved at a step, once. Those with the same attempt and number belong together.

    Attributes:
        attempt: in which it was saved.
        number: how often the rank had saved the step in this attempt before.
        rank: of the gang.
        metric: that it was saved with, or None.
        best: whether the "min" or the "max" of the metric is the best.
    """

    attempt: int
    number: int
    rank: int
    metric: float | None = field(default=None, compare=False)
    best: str = field(default="min", compare=False)

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"rank-{self.rank}.{self.attempt}.{self.number}"

    @property
    def record(self) -> str:
        """The name of what says that it is whole."""
        scored = "" if self.metric is None else f".{self.best}={self.metric!r}"
        return f"{self.name}{scored}.complete"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, as one of its ranks sees them.

    Attributes:
        root: their directory on the lake.
        rank: whose parts are saved.
        attempt: in which they are saved.
    """

    root: Lake
    rank: int
    attempt: int = 0

    def save(
        self, files: Mapping[str, Path], saving: Saving, stop: threading.Event | None = None
    ) -> str | None:
        """Uploads this rank's part of the checkpoint at a step, and removes what it supersedes.

        It goes to a staging directory first. What this rank has saved at the step before is
        removed once all ranks that save have replaced it.

        Args:
            files: of `files_of`.
            saving: the step, and what is to be kept of earlier ones.
            stop: set when the upload is to be given up.

        Returns:
            What a person should know: other ranks no longer save, so that steps pile up. Or None.

        Raises:
            StoreError: the lake refused; what was there before is there still.
            Cancelled: `stop` was set; the same.
        """
        home = self.root / str(saving.step)
        before = {part for part in _listed(home.names()) if part.rank == self.rank}
        numbers = (part.number for part in before if part.attempt == self.attempt)
        number = max(numbers, default=-1) + 1
        part = Part(self.attempt, number, self.rank, saving.metric, saving.best)
        self._enter()
        self._sweep()
        self._upload(files, home, part, stop or threading.Event())
        there = self.parts()
        ranks = self.ranks()
        whole = complete(there, ranks)
        for old in before:
            if saving.step in whole and old < min(whole[saving.step]):
                (home / old.record).remove()
                (home / old.name).remove()
        scores = {step: score(parts) for step, parts in whole.items()}
        directed = {step: (part.metric, part.best) for step, part in scores.items()}
        for step in superseded(there, directed, saving.keep):
            self._retire(step)
        return stalled(there, ranks, part, saving.keep)

    def _upload(
        self, files: Mapping[str, Path], home: Lake, part: Part, stop: threading.Event
    ) -> None:
        staging = self._staging()
        made: list[Lake] = []
        try:
            facts = upload_files(files, staging / "part", stop=stop)
            (staging / "record").write(_record(facts))
            if stop.is_set():
                raise Cancelled(f"the upload of {(home / part.name).url} was given up")
            for source, name in (("part", part.name), ("record", part.record)):
                _put(staging / source, home, name)
                made.insert(0, home / name)
        except BaseException:
            with contextlib.suppress(StoreError):  # the first problem is the one to tell
                for place in made:
                    place.remove()
            raise
        finally:
            with contextlib.suppress(StoreError):  # swept by the next attempt
                staging.remove()

    def _enter(self) -> None:
        """Has the others know that this rank saves, before it has."""
        if str(self.rank) not in (self.root / _RANKS).names():
            (self.root / _RANKS).make()
            (self.root / _RANKS / str(self.rank)).create()

    def ranks(self) -> frozenset[int]:
        """The ranks that save."""
        return frozenset(int(name) for name in (self.root / _RANKS).names() if name.isdecimal())

    def _staging(self) -> Lake:
        return self.root / _STAGING / f"{self.attempt}.{self.rank}.{uuid.uuid4().hex}"

    def _sweep(self) -> None:
        """Removes what earlier attempts left half done."""
        for name in (self.root / _STAGING).names():
            attempt = name.partition(".")[0]
            if attempt.isdecimal() and int(attempt) < self.attempt:
                (self.root / _STAGING / name).remove()

    def _retire(self, step: int) -> None:
        """Removes a step; it vanishes at once, and other ranks may do the same meanwhile."""
        gone = self._staging()
        (self.root / _STAGING).make()
        try:
            (self.root / str(step)).rename(gone)
        except StoreError as error:
            if error.kind != "absent":
                raise
        gone.remove()

    def parts(self) -> Mapping[int, frozenset[Part]]:
        """The parts that are there whole, by step; none of a step where none is."""
        return {
            int(step): frozenset(
                part for part, is_whole in _listed((self.root / step).names()).items() if is_whole
            )
            for step in self.root.names()
            if step.isdecimal()
        }


def complete(
    parts: Mapping[int, Collection[Part]], ranks: Collection[int] = ()
) -> Mapping[int, frozenset[Part]]:
    """The newest parts that belong together, by step, of the steps that have all.

    Args:
        parts: those that are there, by step; all ranks that have one anywhere save.
        ranks: others that save.
    """
    saving = {part.rank for there in parts.values() for part in there}.union(ranks)
    found = {}
    for step, there in parts.items():
        together = collections.defaultdict(set)
        for part in there:
            together[part.attempt, part.number].add(part)
        whole = [which for which, those in together.items() if len(those) == len(saving)]
        if whole:
            found[step] = frozenset(together[max(whole)])
    return found


def stalled(
    parts: Mapping[int, Collection[Part]], ranks: Collection[int], own: Part, keep: int
) -> str | None:
    """What to tell where a rank saves on and others do not, so that no later step is complete.

    Args:
        parts: those that are there, by step.
        ranks: those that save.
        own: what the rank saved last; only what it saved in the same attempt counts.
        keep: how many complete steps it wants to keep.
    """
    saving = {part.rank for there in parts.values() for part in there}.union(ranks)
    last = max(complete(parts, ranks), default=-1)
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
    found = "no step is, so far" if last < 0 else f"step {last} stays the latest"
    return (
        f"{len(later)} checkpoints of rank {own.rank}, from step {step} on, are not complete, and"
        f" none of them is removed: of step {step} there is nothing yet of these ranks that save"
        f" too: {missing}; {found}. Have all that save at all save the same steps"
    )


def files_of(path: Path) -> dict[str, Path]:
    """The files to save of a file or a directory, by their names below the part.

    Raises:
        ConfigError: no such file, no file in the directory, or as `files_below`.
    """
    path = path.absolute()  # "." has no name
    if path.is_file():
        return {file_name(path.name, "path"): path}
    below = files_below(path) if path.is_dir() else {}
    if not below:
        raise ConfigError(f"{path} is no file, and no directory with files: nothing to save")
    top = file_name(path.name, "path")
    return {f"{top}/{name}": file for name, file in below.items()}


def score(parts: Collection[Part]) -> Part:
    """The part whose metric is the checkpoint's: of those with one that of the lowest rank."""
    return min(parts, key=lambda part: (part.metric is None, part.rank))


def _put(source: Lake, home: Lake, name: str) -> None:
    for left in reversed(range(_TRIES)):
        home.make()
        try:
            if not source.rename(home / name):
                raise StoreError(f"{(home / name).url} is being written by another process")
            return
        except StoreError as error:
            # A rank that is far ahead may have retired the step just now.
            if error.kind != "absent" or not left:
                raise


def _listed(names: Collection[str]) -> Mapping[Part, bool]:
    """The parts of which anything is there, and whether all is."""
    matches = [found for found in map(_NAME.fullmatch, names) if found is not None]
    directories = {_part(found) for found in matches if not found[6]}
    records = {_part(found) for found in matches if found[6]}
    return {part: part in directories and part in records for part in records} | {
        part: False for part in directories - records
    }


def _part(found: re.Match[str]) -> Part:
    metric = float(found[5]) if found[5] else None
    return Part(int(found[2]), int(found[3]), int(found[1]), metric, found[4] or "min")


def _record(facts: Mapping[str, Facts]) -> bytes:
    files = {name: {"bytes": fact.bytes, DIGEST: fact.digest} for name, fact in facts.items()}
    return json.dumps({"files": files}).encode()
