"""The time that a rank's main thread is blocked by hopsgpu, counted in a file that its agent reads.

For each purpose the file has two floats: the seconds of all finished blocks, and the start of the
current block by the machine's clock, or 0. The agent can thus count the current block, and the
blocks of a killed rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.rank.shared_words import create_file, map_file

_FILE = "blocked-time"
# The first word of each purpose; the next word is the start of the current block.
_DATA = 0
_CHECKPOINTS = 2
_WORDS = 4


class BlockedTime:
    """The agent's side of the file.

    Raises:
        OSError: the file cannot be created, for example because the disk is full.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._words = map_file(create_file(directory / _FILE, _WORDS), _WORDS).cast("d")
        self._clock = clock

    def read(self) -> RankLosses:
        now = self._clock()
        return RankLosses(self._total(_DATA, now), self._total(_CHECKPOINTS, now))

    def _total(self, purpose: int, now: float) -> float:
        since = self._words[purpose + 1]
        return self._words[purpose] + (max(now - since, 0.0) if since else 0.0)


class Stopwatch:
    """A reusable context that counts the time within it; not reentrant.

    Only the rank's main thread counts: another thread or a child does not delay the training.
    """

    def __init__(self, words: memoryview[float], purpose: int, clock: Callable[[], float]) -> None:
        self._words = words
        self._purpose = purpose
        self._clock = clock

    def __enter__(self) -> None:
        if _is_main_thread():
            self._words[self._purpose + 1] = self._clock()

    def __exit__(self, *problem: object) -> None:
        if not _is_main_thread():
            return
        words, purpose = self._words, self._purpose
        if not words[purpose + 1]:
            return  # a signal handler has counted this block until its own end
        seconds = self._clock() - words[purpose + 1]
        # Clear the start first, so that the agent never counts a block twice.
        words[purpose + 1] = 0.0
        words[purpose] += seconds


def _is_main_thread() -> bool:
    # A rank leads its session, which distinguishes it from its children.
    is_thread = threading.current_thread() is threading.main_thread()
    return is_thread and os.getsid(0) == os.getpid()


class RankBlockedTime:
    """The rank's side of the file.

    Args:
        clock: seconds, the same for all processes of the machine.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        words = map_file(directory / _FILE, _WORDS).cast("d")
        self.data = Stopwatch(words, _DATA, clock)
        self.checkpoints = Stopwatch(words, _CHECKPOINTS, clock)
