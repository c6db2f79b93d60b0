"""Optuna's journal of a study, as its own JournalFileBackend writes it, in a file on the lake."""

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
from hopsgpu.storage.lake import Lake

_CHUNK = 4 * 2**20
_OTHER = "does another driver go on with the same study?"


class Journal(BaseJournalBackend):
    """A journal that one process writes.

    Optuna waits for no disk: what it writes is in memory first, and on the lake as soon as
    `follow` has brought it there.

    Args:
        target: the file on the lake. What it holds already is continued.

    Raises:
        StoreError: it cannot be read, or is no journal.
    """

    def __init__(self, target: Lake) -> None:
        self._target = target
        self._lock = threading.Lock()
        # One brings something to the lake at a time.
        self._following = threading.Lock()
        there = target.read() if target.exists() else b""
        whole = there[: there.rfind(b"\n") + 1]
        # First, so that what is no journal stays as it was.
        self._unread = deque(_entries(whole, target.url))
        if whole != there:
            # Its driver died in the middle of a line, which no reader takes.
            target.replace(whole)
        self._there = len(whole)
        self._lines: list[bytes] = []
        # Of them what is on its way to the lake, and is missing there.
        self._bringing = b""
        self._unsure = False
        self.is_new = not whole

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """What was written since the last time; the one storage on it reads all, in order."""
        with self._lock:
            unread, self._unread = self._unread, deque()
        return unread

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Takes what Optuna writes."""
        lines = [json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs]
        with self._lock:
            self._lines += lines
            # As a reader of the file would have them.
            self._unread.extend(json.loads(line) for line in lines)

    @property
    def size(self) -> int:
        """Bytes written so far, on the lake or on their way there."""
        with self._lock:
            return self._there + len(self._bringing) + sum(map(len, self._lines))

    @property
    def there(self) -> int:
        """Bytes that are on the lake."""
        return self._there

    def follow(self) -> None:
        """Brings what was written since the last time to the lake.

        Raises:
            StoreError: the lake refuses, or another process writes the same journal. What is
                missing there comes with the next call.
        """
        with self._following:
            with self._lock:
                self._bringing += b"".join(self._lines)
                self._lines.clear()
            while chunk := self._bringing[:_CHUNK]:
                end = self._append(chunk, self._there)
                with self._lock:
                    self._bringing = self._bringing[len(chunk) :]
                    self._there = end

    def _append(self, content: bytes, at: int) -> int:
        # What failed may have come there in part.
        if not self._unsure and (self._target.stat().size if at else 0) != at:
            raise StoreError(f"{self._target.url} has grown by itself: {_OTHER}", DAMAGED)
        self._unsure = True
        end = self._appended(content, at)
        self._unsure = False
        return end

    def _appended(self, content: bytes, at: int) -> int:
        try:
            return self._target.append(content, at)
        except StoreError as error:
            if error.kind == DAMAGED:
                text = f"{self._target.url} has become another one: {_OTHER} ({error})"
                raise StoreError(text, error.kind) from error
            if error.kind != UNSUPPORTED:
                raise
        # A first one has nothing before it, and nothing that could be read.
        before = self._target.read()[:at] if at else b""
        self._target.replace(before + content)
        return at + len(content)

    def try_follow(self) -> None:
        """As `follow`; a lake that refuses is tried again with the next call."""
        with contextlib.suppress(StoreError):
            self.follow()


def _entries(content: bytes, url: str) -> list[dict[str, Any]]:
    """What a journal holds.

    Raises:
        StoreError: a line of it is none.
    """
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise StoreError(
                f"{url} is no journal of an Optuna study: line {number} is {line[:80]!r}; put back"
                " what was there, or give another name for a new study",
                DAMAGED,
            )
        found.append(entry)
    return found
