"""Checkpoints on their way to the lake: a rank hands them over, its container's agent brings them.

What a rank hands over is a directory in `saves/` in the rank's directory, which comes there by one
rename: `saving.json` and a copy of the files in `files/`. So what is there is whole, and outlives
a rank that is killed; the agent brings the oldest first and removes it. What did not come to the
lake is in `saves/problem.json`, and raised by the rank's next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from hopsgpu.artifacts.checkpoint_retention import Saving
from hopsgpu.artifacts.checkpoints import Checkpoints, files_of
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.local_tree import files_below

# Of a rank, on its node's disk: one under way to the lake and the next.
MOST_PENDING = 2
_LOOK_SECONDS = 0.1
_HANDED = re.compile(r"\d{20}-[0-9a-f]{32}")


class Saves:
    """What a rank has handed over and is not on the lake yet.

    Args:
        directory: the rank's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "saves"
        self._problem = self._directory / "problem.json"
        self._told_stalled = False

    @property
    def begun(self) -> bool:
        """Whether the rank has saved anything in this attempt."""
        return self._directory.is_dir()

    def hand_over(self, path: Path, saving: Saving) -> None:
        """Copies a file or directory, for the agent to bring. Called by the rank, in any thread.

        Waits while two earlier ones of this rank are still on their way.

        Raises:
            ConfigError: nothing to save there, or what cannot be saved; nothing is kept of it.
            StoreError: an earlier one did not come to the lake; this one is not handed over.
            OSError: the node's disk is full; nothing is kept of it.
        """
        files = files_of(path)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        while len(self.pending()) >= MOST_PENDING:
            time.sleep(_LOOK_SECONDS)  # the agent, another process, tells nobody
        self._raise_problem()
        draft = self._directory / f"draft-{uuid.uuid4().hex}"
        try:
            for name, file in files.items():
                copy = draft / "files" / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                # No link: what it was copied from may be written anew in its place.
                shutil.copyfile(file, copy)
            (draft / "saving.json").write_text(json.dumps(asdict(saving)))
            # The clock is that of all processes of this machine, and never goes back.
            draft.rename(self._directory / f"{time.monotonic_ns():020}-{uuid.uuid4().hex}")
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def pending(self) -> list[Path]:
        """What waits to be brought, the oldest first."""
        try:
            there = sorted(self._directory.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in there if _HANDED.fullmatch(path.name)]

    def bring(self, handed: Path, checkpoints: Checkpoints, stop: threading.Event) -> str | None:
        """Uploads one of `pending` and removes it here.

        Where `stop` is set it is given up, and stays.

        Returns:
            Why it did not come to the lake, or, once, what else a person should know; or None.
        """
        if not handed.is_dir():
            return None  # refused meanwhile
        try:
            saving = Saving(**json.loads((handed / "saving.json").read_text()))
            stalled = checkpoints.save(files_below(handed / "files"), saving, stop)
        except BaseException as error:  # noqa: BLE001 - clients in Rust panic with one
            return None if stop.is_set() else self.refuse(handed, checkpoints.rank, error)
        shutil.rmtree(handed, ignore_errors=True)
        if stalled is None or self._told_stalled:
            return None
        self._told_stalled = True
        return stalled

    def refuse(self, handed: Path, rank: int, error: BaseException) -> str:
        """Removes one of `pending` that cannot be brought; what is told, and raised in the rank."""
        expected = isinstance(error, (HopsGpuError, OSError))
        why = str(error) if expected else f"{error!r:.500}"
        problem = f"rank {rank}'s checkpoint at {_step(handed)}: {why}"
        self._leave(problem, getattr(error, "kind", ""))
        shutil.rmtree(handed, ignore_errors=True)
        return problem

    def pending_bytes(self) -> int:
        """How much waits to be brought."""
        total = 0
        for handed in self.pending():
            for parent, _, names in os.walk(handed):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):  # brought meanwhile
                        total += Path(parent, name).stat().st_size
        return total

    def _leave(self, problem: str, kind: str) -> None:
        draft = self._problem.with_suffix(".draft")
        with contextlib.suppress(OSError):  # the disk is full; the driver is told in any case
            draft.write_text(json.dumps({"problem": problem, "kind": kind}))
            draft.rename(self._problem)

    def _raise_problem(self) -> None:
        taken = self._problem.with_suffix(".taken")
        try:
            self._problem.rename(taken)
        except FileNotFoundError:
            return
        told = json.loads(taken.read_text())
        raise StoreError(
            f"{told['problem']}. This save was not begun; it may be tried again", told["kind"]
        )


def _step(handed: Path) -> str:
    try:
        return f"step {json.loads((handed / 'saving.json').read_text())['step']}"
    except (OSError, ValueError, KeyError):
        return "a step that cannot be read any more"
