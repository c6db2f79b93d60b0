"""Optuna's journal of a study in a file on the lake, in the format of its JournalFileBackend."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import DAMAGED, UNSUPPORTED
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB

_CHUNK_BYTES = 4 * MIB
# A report of a trial takes about 100 bytes: enough for two million reports, which take a gigabyte
# of the driver's memory.
_MAX_JOURNAL_BYTES = 256 * MIB
_OTHER = "is another driver running the same study?"


class Journal(BaseJournalBackend):
    """A journal that one process writes.

    Optuna does not wait for a disk: the journal keeps new entries in memory until `follow` appends
    them to the file on the lake.

    Args:
        target: the file on the lake; new entries follow those that it already holds.
        chunk_bytes: the most bytes of an append.

    Raises:
        StoreError: the file cannot be read, or is no journal.
    """

    def __init__(self, target: LakePath, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._target = target
        self._lock = threading.Lock()
        # Only one thread at a time may append to the file.
        self._following = threading.Lock()
        content = target.read(_MAX_JOURNAL_BYTES) if target.exists() else b""
        complete_lines = content[: content.rfind(b"\n") + 1]
        # Parsed first, so that a file that is no journal stays unchanged.
        self._unread = deque(_entries(complete_lines, target.url))
        if complete_lines != content:
            # The driver died in the middle of a line, which no reader accepts.
            target.replace(complete_lines)
        self._lake_size = len(complete_lines)
        self._lines: list[bytes] = []
        # Lines taken from `_lines` that are not yet on the lake.
        self._appending = b""
        self._may_be_partial = False

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return the entries written since the last call; the only storage reads all in order."""
        with self._lock:
            unread, self._unread = self._unread, deque()
        return unread

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs]
        with self._lock:
            self._lines += lines
            # Parsed again, so that they equal what a reader of the file gets.
            self._unread.extend(json.loads(line) for line in lines)

    @property
    def size(self) -> int:
        """Return the number of bytes written so far, on the lake or not yet."""
        with self._lock:
            return self._lake_size + len(self._appending) + sum(map(len, self._lines))

    @property
    def lake_size(self) -> int:
        return self._lake_size

    def follow(self) -> None:
        """Append what was written since the last call to the file on the lake.

        Raises:
            StoreError: the lake refuses, or another process writes the same journal. The next call
                appends what is missing.
        """
        with self._following:
            with self._lock:
                self._appending += b"".join(self._lines)
                self._lines.clear()
            while chunk := self._appending[: self._chunk_bytes]:
                end = self._append(chunk, self._lake_size)
                with self._lock:
                    self._appending = self._appending[len(chunk) :]
                    self._lake_size = end

    def _append(self, content: bytes, at: int) -> int:
        # An append that failed may have written a part, so the size is not checked after one.
        if not self._may_be_partial and (self._target.stat().size if at else 0) != at:
            raise StoreError(f"{self._target.url} has an unexpected size: {_OTHER}", DAMAGED)
        self._may_be_partial = True
        end = self._append_or_replace(content, at)
        self._may_be_partial = False
        return end

    def _append_or_replace(self, content: bytes, at: int) -> int:
        try:
            return self._target.append(content, at)
        except StoreError as error:
            if error.kind == DAMAGED:
                text = f"{self._target.url} was changed by another writer: {_OTHER} ({error})"
                raise StoreError(text, error.kind) from error
            if error.kind != UNSUPPORTED:
                raise
        # At the first write there is no file to read yet.
        before = self._target.read(_MAX_JOURNAL_BYTES)[:at] if at else b""
        self._target.replace(before + content)
        return at + len(content)

    def try_follow(self) -> None:
        """Call `follow`, and ignore a StoreError: the next call tries again."""
        with contextlib.suppress(StoreError):
            self.follow()


def _entries(content: bytes, url: str) -> list[dict[str, Any]]:
    """Return the entries of a journal.

    Raises:
        StoreError: a line is no entry of a journal.
    """
    entries = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise StoreError(
                f"{url} is not the journal of an Optuna study: line {number} is {line[:80]!r};"
                " restore the file, or use another name for a new study",
                DAMAGED,
            )
        entries.append(entry)
    return entries
