"""The output and reports that a rank writes to files, sent on to the driver."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from hopsgpu.agent.stack_filter import OwnFrames, as_shown
from hopsgpu.core.metrics import MetricsChunk
from hopsgpu.core.output_limits import END_BYTES, LOG_LIMIT, REST_SECONDS, cut_note
from hopsgpu.core.rank_warnings import read_warnings
from hopsgpu.linux import punch_hole

# A poll of a rank's two files costs 0.1 ms of a core that the rank may need.
_POLL_SECONDS = 0.2
_CHUNK = 256 * 1024
_REPORT_SECONDS = 0.05
# A poll for a rank's warnings takes some microseconds, because most ranks leave none.
_WARNING_SECONDS = 1.0
_MAX_LINE = 64 * 1024
_STATE_SECONDS = 1.0
_MARK = "…"
# Holes in files have whole blocks; a hole is made once this share of the limit can be freed.
_BLOCK = 4096
_FREED_SHARE = 16
_UP = re.compile(r"\x1b\[[0-9]*[AF]")


class OutputCut:
    """Decides which part of a rank's output is not sent, because it would take too long.

    Args:
        limit: bytes of a log: half of them may be unsent, and all may be on the disk.
        stopping: event, set when the rank is stopped; None if it never is.
    """

    def __init__(
        self,
        limit: int = LOG_LIMIT,
        stopping: asyncio.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._stopping = stopping
        self._clock = clock
        self._over_at: float | None = None

    def excess(self, unsent: int, *, has_ended: bool) -> tuple[int, str]:
        """Return how many of the unsent bytes to leave out, the oldest ones, and why."""
        if has_ended and self._stopping is not None and self._stopping.is_set():
            now = self._clock()
            self._over_at = now + REST_SECONDS if self._over_at is None else self._over_at
            if now >= self._over_at and unsent > END_BYTES:
                reason = f"they were not sent within {REST_SECONDS:g} s after the rank was stopped"
                return unsent - END_BYTES, reason
        if unsent > self.limit // 2:
            return unsent - self.limit // 4, "the rank wrote faster than they could be sent"
        return 0, ""


async def follow(
    log: Path,
    ended: asyncio.Event,
    send: Callable[[bytes], Awaitable[None]],
    cut: OutputCut | None = None,
    note: Callable[[int, str], bytes] = lambda _count, _reason: b"",
) -> int:
    """Send what is appended to a file, in order, until `ended` is set and all is sent.

    The rank that writes the file never waits for the driver.

    Args:
        log: the file; created if missing.
        ended: event, set when no process writes to the file any more.
        send: receives at most 256 KiB at a time.
        cut: decides what is left out.
        note: returns what is sent instead of so many bytes, for a reason.

    Returns:
        The number of bytes that were left out.
    """
    with _open_file(log) as file:
        appended = _AppendedChunks(file.fileno(), ended, cut or OutputCut(), note)
        async for chunk in appended.chunks():
            if chunk:
                await send(chunk)
    return appended.missing


async def follow_output(
    log: Path,
    ended: asyncio.Event,
    send: Callable[[bytes], Awaitable[None]],
    cut: OutputCut | None = None,
    *,
    should_keep_own: bool = False,
) -> int:
    """Like `follow`, but remove hopsgpu's own frames from stacks, and say what is left out."""
    frames = OwnFrames(should_keep=should_keep_own)

    async def send_filtered(chunk: bytes) -> None:
        if filtered := frames.without(chunk):
            await send(filtered)

    missing = await follow(log, ended, send_filtered, cut, cut_note)
    if rest := frames.rest():
        await send(rest)
    return missing


async def follow_reports(
    file: Path,
    ended: asyncio.Event,
    send: Callable[[bytes], Awaitable[None]],
    cut: OutputCut | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Like `follow`, but send a rank's last metrics and GPU samples, about 20 times a second.

    Args:
        file: file of `core.metrics.append`, which keeps all values; created if missing.
        send: receives what `core.metrics.Metrics.add_chunk` accepts.
    """
    metrics_chunk = MetricsChunk()
    sent_at = float("-inf")
    with _open_file(file) as opened:
        appended = _AppendedChunks(opened.fileno(), ended, cut or OutputCut(), lambda *_: b"")
        async for chunk in appended.chunks():
            metrics_chunk.add(chunk)
            is_at_end = not chunk
            if metrics_chunk and (is_at_end or clock() - sent_at >= _REPORT_SECONDS):
                sent_at = clock()
                await send(metrics_chunk.flush())
    return appended.missing


async def follow_warnings(
    directory: Path, ended: asyncio.Event, send: Callable[[str], Awaitable[None]]
) -> None:
    """Send each warning that a rank writes for its run, until `ended` is set and all are sent."""
    sent_count = 0
    is_last = False
    while not is_last:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WARNING_SECONDS):
                await ended.wait()
        is_last = ended.is_set()
        for text in (warnings := read_warnings(directory))[sent_count:]:
            await send(text)
        sent_count = max(sent_count, len(warnings))


def _open_file(path: Path) -> BinaryIO:
    path.touch(mode=0o600)
    return path.open("r+b")


class _AppendedChunks:
    """Bytes that are appended to a file, without those that an `OutputCut` leaves out.

    Attributes:
        missing: the number of bytes that were left out.
    """

    def __init__(
        self,
        descriptor: int,
        ended: asyncio.Event,
        cut: OutputCut,
        note: Callable[[int, str], bytes],
    ) -> None:
        self.missing = 0
        self._descriptor = descriptor
        self._ended = ended
        self._cut = cut
        self._note = note
        self._offset = 0
        self._last = b"\n"
        self._freed = 0
        self._can_free = True

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks, and b"" whenever the end of the file is reached."""
        while True:
            is_last = self._ended.is_set()
            size = self._size()
            # A rank that opens /dev/stdout, as shells do for `> /dev/stdout`, empties the file.
            if size < self._offset:
                self._offset = self._freed = 0
            while chunk := self._next_chunk(size):
                self._last = chunk[-1:]
                yield chunk
                # Let other tasks run: a send that need not wait does not.
                await asyncio.sleep(0)
            yield b""
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._ended.wait()

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def _next_chunk(self, size: int) -> bytes:
        """Return the next bytes before `size`, or a note instead of those that are left out."""
        written = self._size()
        self._free_sent(written)
        unsent = written - self._offset
        excess, reason = self._cut.excess(unsent, has_ended=self._ended.is_set())
        if excess:
            # Continue at the begin of a line, if one begins soon.
            start = os.pread(self._descriptor, _MAX_LINE, self._offset + excess)
            excess += start.find(b"\n") + 1
            self._offset += excess
            self.missing += excess
            before = b"" if self._last == b"\n" else b"\n"
            if noted := before + self._note(excess, reason):
                return noted
        chunk = os.pread(self._descriptor, min(_CHUNK, max(size - self._offset, 0)), self._offset)
        self._offset += len(chunk)
        return chunk

    def _free_sent(self, written: int) -> None:
        """Free the disk of what was sent or left out, except the last `limit` bytes."""
        limit = self._cut.limit
        end = min(self._offset, written - limit) // _BLOCK * _BLOCK
        if not self._can_free or end - self._freed < max(limit // _FREED_SHARE, _BLOCK):
            return
        try:
            punch_hole(self._descriptor, self._freed, end)
        except OSError:
            # This file system keeps files whole.
            self._can_free = False
        self._freed = end


class LineSplitter:
    """Splits chunks of a rank's output, which may end anywhere, into lines to show.

    Bytes that are not UTF-8 are shown as `\\xff`. A line longer than 64 Ki characters is split,
    with `…` at the cuts. A line that rewrites itself with carriage returns, such as a progress bar,
    is shown once a second, and in its last state.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""
        self._is_cut = False
        self._shown: str | None = None
        self._shown_at = float("-inf")

    def lines(self, chunk: bytes) -> list[str]:
        text = self._rest + self._decoder.decode(chunk)
        *lines, self._rest = text.split("\n")
        is_plain = "\r" not in text and "\x1b" not in text and not self._is_partly_shown
        if not is_plain or max(map(len, lines), default=0) > _MAX_LINE:
            lines = [piece for line in lines for piece in self._finish(line)]
        self._rest = _latest_state(self._rest)
        return lines + self._overlong() + self.due_state()

    def due_state(self) -> list[str]:
        """Return the state of a line that rewrites itself, if it is time to show it again."""
        if "\r" not in self._rest or self._is_early():
            return []
        state = as_shown(self._rest)
        if state in ("", self._shown):
            return []
        self._shown, self._shown_at = state, self._clock()
        return [state]

    def rest(self) -> list[str]:
        """Return the last line if it has no newline, at the end of the output."""
        rest = self._rest + self._decoder.decode(b"", final=True)
        self._rest = ""
        return self._finish(rest) if rest else []

    @property
    def _is_partly_shown(self) -> bool:
        return self._is_cut or self._shown is not None

    def _is_early(self) -> bool:
        return self._clock() - self._shown_at < _STATE_SECONDS

    def _finish(self, line: str) -> list[str]:
        """Return the pieces of a complete line that are not shown yet."""
        is_cut, shown = self._is_cut, self._shown
        self._is_cut, self._shown = False, None
        state = as_shown(line)
        if state == shown or (is_cut and not state):
            return []
        if _UP.search(line):
            # Several bars below each other are all written again at each change.
            if self._is_early():
                return []
            self._shown_at = self._clock()
        return _pieces(state, is_continuation=is_cut, is_end=True)

    def _overlong(self) -> list[str]:
        if len(self._rest) <= _MAX_LINE:
            return []
        rest = self._rest.lstrip("\r")
        keep = (len(rest) - 1) % _MAX_LINE + 1
        pieces = _pieces(rest[: len(rest) - keep], is_continuation=self._is_cut, is_end=False)
        self._rest = rest[len(rest) - keep :]
        self._is_cut = True
        return pieces


def _latest_state(rest: str) -> str:
    """Return an incomplete line without its overwritten states."""
    before, rewritten, state = rest.rpartition("\r")
    if state.strip() or not before:
        return rewritten + state
    return "\r" + before.rpartition("\r")[2] + "\r"


def _pieces(line: str, *, is_continuation: bool, is_end: bool) -> list[str]:
    """Return a part of a line in pieces, with marks where the line continues."""
    parts = [line[start : start + _MAX_LINE] for start in range(0, len(line), _MAX_LINE)] or [""]
    prefixes = [_MARK if is_continuation else "", *(_MARK for _ in parts[1:])]
    suffixes = [*(_MARK for _ in parts[1:]), "" if is_end else _MARK]
    return ["".join(piece) for piece in zip(prefixes, parts, suffixes, strict=True)]
