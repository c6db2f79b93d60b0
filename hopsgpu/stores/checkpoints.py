"""A run's checkpoints: `<root>/<step>/rank-<rank>/`, each part there whole or not at all."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores.lake import UNFIT, Lake

_STAGING = "_staging"
_PART = re.compile(r"rank-(\d+)")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, as one of its ranks sees them.

    Attributes:
        root: their directory on the lake.
        rank: whose parts are saved.
    """

    root: Lake
    rank: int

    def save(self, path: Path, step: int) -> None:
        """Uploads a file or a directory as this rank's part of the checkpoint at a step.

        It goes to a staging directory first. A part that is there already is replaced.

        Args:
            path: of the file or directory.
            step: 0 and above.

        Raises:
            ConfigError: no such file, or no step.
            StoreError: the lake refused; nothing is left behind.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step={step!r}: a whole number of at least 0 is wanted")
        files = _files(path)
        staging = self.root / _STAGING / uuid.uuid4().hex
        part = self.root / str(step) / f"rank-{self.rank}"
        try:
            staging.make()
            for name, file in files.items():
                if "/" in name:
                    (staging / name.rpartition("/")[0]).make()
                (staging / name).upload(file)
            (self.root / str(step)).make()
            if not staging.rename(part):
                part.remove()
                if not staging.rename(part):
                    raise StoreError(f"{part.url} is being written by another process")
        except BaseException:
            with contextlib.suppress(StoreError):  # the first problem is the one to tell
                staging.remove()
            raise

    def latest(self, into: Path) -> Path | None:
        """Downloads the latest checkpoint; None where there is none.

        That is the latest step that has the parts of all ranks that ever saved one: the step of an
        attempt that failed while some of them saved does not count, and all ranks see the same.

        Args:
            into: a local directory.

        Returns:
            The file or directory, as it was saved by this rank, or by the lowest where this one
            has saved none.

        Raises:
            StoreError: the lake refused.
        """
        step = latest_step(self._parts())
        if step is None:
            return None
        number, ranks = step
        part = self.root / str(number) / f"rank-{self.rank if self.rank in ranks else min(ranks)}"
        local = into / str(number)
        if not local.is_dir():
            draft = into / f"{number}.draft"
            shutil.rmtree(draft, ignore_errors=True)
            _download(part, draft)
            draft.rename(local)
        (saved,) = local.iterdir()
        return saved

    def _parts(self) -> Mapping[int, frozenset[int]]:
        """The ranks whose parts are there, by step."""
        found = {}
        for name in self.root.names():
            if name.isdecimal():
                parts = map(_PART.fullmatch, (self.root / name).names())
                found[int(name)] = frozenset(int(part[1]) for part in parts if part is not None)
        return found


def latest_step(parts: Mapping[int, frozenset[int]]) -> tuple[int, frozenset[int]] | None:
    """The latest step that has all parts, with their ranks; None where there is none.

    Args:
        parts: the ranks whose parts are there, by step.
    """
    saving = frozenset[int]().union(*parts.values())
    return max(
        ((n, ranks) for n, ranks in parts.items() if ranks and ranks == saving), default=None
    )


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
