"""A run's checkpoints: `<root>/<step>/rank-<rank>.<attempt>.<number>/`.

What is saved again at a step lies beside what it replaces, which goes once all ranks have saved
anew. An empty file beside a part, `….complete`, comes after it and goes before it: whoever is
killed, and wherever renaming takes two steps, a part is there whole or not at all.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores.lake import UNFIT, Lake

_STAGING = "_staging"
_COMPLETE = ".complete"
_PART = re.compile(r"rank-(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Part:
    """What a rank saved at a step, once. Those with the same attempt and number belong together.

    Attributes:
        attempt: in which it was saved.
        number: how often the rank had saved the step in this attempt before.
        rank: of the gang.
    """

    attempt: int
    number: int
    rank: int

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"rank-{self.rank}.{self.attempt}.{self.number}"


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

    def save(self, path: Path, step: int) -> None:
        """Uploads a file or a directory as this rank's part of the checkpoint at a step.

        It goes to a staging directory first. What this rank has saved at the step before is
        removed once all ranks that save have replaced it.

        Args:
            path: of the file or directory.
            step: 0 and above.

        Raises:
            ConfigError: no such file, or no step.
            StoreError: the lake refused; what was there before is there still.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step={step!r}: a whole number of at least 0 is wanted")
        files = _files(path)
        home = self.root / str(step)
        before = {part for part in map(_part, home.names()) if part and part.rank == self.rank}
        numbers = (part.number for part in before if part.attempt == self.attempt)
        self._upload(files, home, Part(self.attempt, max(numbers, default=-1) + 1, self.rank))
        if not before:
            return
        newest = complete(self._parts()).get(step)
        for part in before:
            if newest is not None and part < min(newest):
                _marker(home, part).remove()
                (home / part.name).remove()

    def _upload(self, files: Mapping[str, Path], home: Lake, part: Part) -> None:
        staging = self.root / _STAGING / uuid.uuid4().hex
        made = [staging]
        try:
            staging.make()
            for name, file in files.items():
                if "/" in name:
                    (staging / name.rpartition("/")[0]).make()
                (staging / name).upload(file)
            home.make()
            if not staging.rename(home / part.name):
                raise StoreError(f"{(home / part.name).url} is being written by another process")
            made = [_marker(home, part), home / part.name]
            _marker(home, part).write(b"")
        except BaseException:
            with contextlib.suppress(StoreError):  # the first problem is the one to tell
                for place in made:
                    place.remove()
            raise

    def latest(self, into: Path) -> Path | None:
        """Downloads the latest checkpoint; None where there is none.

        That is the latest step that has the parts of all ranks that ever saved one, and of a step
        that was saved again what all of them saved last: what an attempt that failed while some of
        them saved has left does not count, and all ranks see the same.

        Args:
            into: a local directory, which keeps what was downloaded.

        Returns:
            The file or directory, as it was saved by this rank, or by the lowest where this one
            has saved none.

        Raises:
            StoreError: the lake refused.
        """
        while steps := complete(self._parts()):
            step = max(steps)
            part = next((p for p in steps[step] if p.rank == self.rank), min(steps[step]))
            home = self.root / str(step)
            # Outside gangs the checkpoints of all runs are downloaded into the same directory.
            digest = hashlib.sha256((home / part.name).url.encode()).hexdigest()
            local = into / f"{step}-{digest[:16]}"
            # What was replaced meanwhile is not there any more, but what replaced it is.
            if local.is_dir() or _fetched(home, part, local):
                (saved,) = local.iterdir()
                return saved
        return None

    def _parts(self) -> Mapping[int, frozenset[Part]]:
        """The parts that are there whole, by step."""
        found = {}
        for step in self.root.names():
            if step.isdecimal():
                names = frozenset((self.root / step).names())
                whole = {name for name in names if f"{name}{_COMPLETE}" in names}
                found[int(step)] = frozenset(part for part in map(_part, whole) if part is not None)
        return found


def complete(parts: Mapping[int, Collection[Part]]) -> Mapping[int, frozenset[Part]]:
    """The newest parts that belong together, by step, of the steps that have all.

    Args:
        parts: those that are there, by step; all ranks that have one anywhere save.
    """
    saving = {part.rank for there in parts.values() for part in there}
    found = {}
    for step, there in parts.items():
        together = collections.defaultdict(set)
        for part in there:
            together[part.attempt, part.number].add(part)
        whole = [which for which, those in together.items() if len(those) == len(saving)]
        if whole:
            found[step] = frozenset(together[max(whole)])
    return found


def _part(name: str) -> Part | None:
    found = _PART.fullmatch(name)
    return None if found is None else Part(int(found[2]), int(found[3]), int(found[1]))


def _marker(home: Lake, part: Part) -> Lake:
    return home / f"{part.name}{_COMPLETE}"


def _fetched(home: Lake, part: Part, local: Path) -> bool:
    """Downloads a part; False, and nothing is there, where it was removed meanwhile."""
    draft = local.with_name(f"{local.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    problem: StoreError | None = None
    try:
        _download(home / part.name, draft)
    except StoreError as error:
        problem = error
    if f"{part.name}{_COMPLETE}" not in home.names():
        return False
    if problem is not None:
        raise problem
    draft.rename(local)
    return True


def _files(path: Path) -> dict[str, Path]:
    """What is to be uploaded, by its name below the part."""
    if path.is_file():
        files = {path.name: path}
    elif path.is_dir():
        below = sorted(file for file in path.rglob("*") if file.is_file())
        files = {f"{path.name}/{file.relative_to(path).as_posix()}": file for file in below}
    else:
        files = {}
    if not files:
        raise ConfigError(f"{path} is no file, and no directory with files: nothing to save")
    unfit = next((name for name in files if UNFIT.search(name)), None)
    if unfit is not None:
        raise ConfigError(
            f"{unfit!r} cannot be saved: names with '#', '?', ';' or control characters do not"
            " survive every client of the lake; rename the file"
        )
    return files


def _download(source: Lake, target: Path) -> None:
    target.mkdir(parents=True)
    for entry in source.entries():
        if entry.is_directory:
            _download(source / entry.name, target / entry.name)
        else:
            (source / entry.name).download(target / entry.name)
