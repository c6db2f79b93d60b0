"""Checkpoints on their way to the lake: a rank hands them over, its container's agent uploads them.

A rank hands over a directory in `saves/` in the rank's directory: `saving.json`, and a copy of the
files in `files/`. One rename makes the directory visible, so that it is complete even if the rank
is killed. If an upload fails, the rank's next save raises the error in `saves/problem.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions
from hopsgpu.artifacts.checkpoints import Checkpoints, SaveResult, files_of
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.local_tree import files_below

log = logging.getLogger(__name__)

# Checkpoints of a rank on the node's disk: the one that is being uploaded, and the next one.
MAX_PENDING = 2
_POLL_SECONDS = 0.1
_LOG_WAIT_SECONDS = 5.0
_PENDING_NAME = re.compile(r"\d{20}-[0-9a-f]{32}")


class PendingCheckpoints:
    """The checkpoints that a rank has handed over and that are not on the lake yet."""

    def __init__(self, rank_directory: Path) -> None:
        self._directory = rank_directory / "saves"
        self._problem = self._directory / "problem.json"
        self._has_warned = False

    @property
    def has_saved(self) -> bool:
        return self._directory.is_dir()

    def hand_over(self, path: Path, options: CheckpointOptions) -> None:
        """Copy a file or directory, for the agent to upload. Threads of the rank call this method.

        The call waits while two earlier checkpoints of this rank are still to be uploaded.

        Raises:
            ConfigError: the path does not exist, or contains something that cannot be saved; no
                copy is kept.
            StoreError: an earlier checkpoint did not reach the lake; this one is not handed over.
            OSError: the node's disk is full; no copy is kept.
        """
        files = files_of(path)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._wait_until_uploaded()
        self._raise_problem()
        draft = self._directory / f"draft-{uuid.uuid4().hex}"
        try:
            for name, file in files.items():
                copy = draft / "files" / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                # Not a hard link: the rank may overwrite the original in place.
                shutil.copyfile(file, copy)
            (draft / "saving.json").write_text(json.dumps(asdict(options)))
            # The name gives the order: all processes share this clock, which never goes back.
            draft.rename(self._directory / f"{time.monotonic_ns():020}-{uuid.uuid4().hex}")
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _wait_until_uploaded(self) -> None:
        log_at = time.monotonic() + _LOG_WAIT_SECONDS
        while len(self.pending()) >= MAX_PENDING:
            if time.monotonic() > log_at:
                log.info("a save waits: two earlier checkpoints of this rank are being uploaded")
                log_at = math.inf
            time.sleep(_POLL_SECONDS)  # the agent is another process and sends no signal

    def pending(self) -> list[Path]:
        """Return the directories that are still to be uploaded, the oldest first."""
        try:
            paths = sorted(self._directory.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in paths if _PENDING_NAME.fullmatch(path.name)]

    def upload(
        self, handed: Path, checkpoints: Checkpoints, stop: threading.Event
    ) -> tuple[SaveResult | None, str | None]:
        """Upload one of the `pending` directories, and remove it here.

        If `stop` is set, the upload is abandoned and the directory stays.

        Returns:
            The result, or None; and a warning for people, or None: why the checkpoint did not reach
            the lake, or, the first time, the result's own warning.
        """
        if not handed.is_dir():
            return None, None  # `refuse` has removed the directory meanwhile
        try:
            options = CheckpointOptions(**json.loads((handed / "saving.json").read_text()))
            result = checkpoints.save(files_below(handed / "files"), options, stop)
        except BaseException as error:  # noqa: BLE001 - clients in Rust panic with one
            return None, None if stop.is_set() else self.refuse(handed, checkpoints.rank, error)
        shutil.rmtree(handed, ignore_errors=True)
        if result.warning is None or self._has_warned:
            return result, None
        self._has_warned = True
        return result, result.warning

    def refuse(self, handed: Path, rank: int, error: BaseException) -> str:
        """Remove a `pending` directory that cannot be uploaded; return why.

        The rank's next save raises the same error.
        """
        is_expected = isinstance(error, (HopsGpuError, OSError))
        why = str(error) if is_expected else f"{error!r:.500}"
        problem = f"rank {rank}'s checkpoint at {_step(handed)} did not reach the lake: {why}"
        log.info("%s", problem)
        self._write_problem(problem, getattr(error, "kind", ""))
        shutil.rmtree(handed, ignore_errors=True)
        return problem

    def pending_bytes(self) -> int:
        total = 0
        for handed in self.pending():
            for parent, _, names in os.walk(handed):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):  # uploaded meanwhile
                        total += Path(parent, name).stat().st_size
        return total

    def _write_problem(self, problem: str, kind: str) -> None:
        draft = self._problem.with_suffix(".draft")
        with contextlib.suppress(OSError):  # the disk is full; the agent reports the problem too
            draft.write_text(json.dumps({"problem": problem, "kind": kind}))
            draft.rename(self._problem)

    def _raise_problem(self) -> None:
        claimed = self._problem.with_suffix(".taken")
        try:
            self._problem.rename(claimed)
        except FileNotFoundError:
            return
        content = json.loads(claimed.read_text())
        raise StoreError(
            f"{content['problem']}. The present checkpoint is not saved; the call may be repeated",
            content["kind"],
        )


def _step(handed: Path) -> str:
    try:
        return f"step {json.loads((handed / 'saving.json').read_text())['step']}"
    except (OSError, ValueError, KeyError):
        return "an unknown step"
