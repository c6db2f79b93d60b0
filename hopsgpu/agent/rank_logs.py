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
from hopsgpu.core.rank_warnings import read_warnings

# A poll of a rank's two files costs 0.1 ms of a core that the rank may need.
_POLL_SECONDS = 0.2
_CHUNK = 256 * 1024
_REPORT_SECONDS = 0.05
# A poll for a rank's warnings takes some microseconds, because most ranks leave none.
_WARNING_SECONDS = 1.0
_MAX_LINE = 64 * 1024
_STATE_SECONDS = 1.0
_MARK = "…"
_UP = re.compile(r"\x1b\[[0-9]*[AF]")


async def follow(log: Path, ended: asyncio.Event, send: Callable[[bytes], Awaitable[None]]) -> None:
    """Send what is appended to a file, in order, until `ended` is set and all is sent.

    The rank that writes the file never waits for the driver.

    Args:
        log: the file; created if missing.
        ended: event, set when no process writes to the file any more.
        send: receives at most 256 KiB at a time.
    """
    with _open_file(log) as file:
        async for chunk in _appended_chunks(file.fileno(), ended):
            if chunk:
                await send(chunk)


async def follow_output(
    log: Path,
    ended: asyncio.Event,
    send: Callable[[bytes], Awaitable[None]],
    *,
    should_keep_own: bool = False,
) -> None:
    """Like `follow`, but remove hopsgpu's own frames from the stacks of a crash."""
    frames = OwnFrames(should_keep=should_keep_own)

    async def send_filtered(chunk: bytes) -> None:
        if filtered := frames.without(chunk):
            await send(filtered)

    await follow(log, ended, send_filtered)
    if rest := frames.rest():
        await send(rest)


async def follow_reports(
    file: Path,
    ended: asyncio.Event,
    send: Callable[[bytes], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Like `follow`, but send a rank's last metrics and GPU samples, about 20 times a second.

    Args:
        file: file of `core.metrics.append`, which keeps all values; created if missing.
        send: receives what `core.metrics.Metrics.add_chunk` accepts.
    """
    metrics_chunk = MetricsChunk()
    sent_at = float("-inf")
    with _open_file(file) as opened:
        async for chunk in _appended_chunks(opened.fileno(), ended):
            metrics_chunk.add(chunk)
            is_at_end = not chunk
            if metrics_chunk and (is_at_end or clock() - sent_at >= _REPORT_SECONDS):
                sent_at = clock()
                await send(metrics_chunk.flush())


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
    return path.open("rb")


async def _appended_chunks(descriptor: int, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield what is appended to a file, and b"" whenever the end of the file is reached."""
    offset = 0
    while True:
        is_last = ended.is_set()
        size = os.fstat(descriptor).st_size
        # A rank that opens /dev/stdout, as shells do for `> /dev/stdout`, empties the file.
        offset = 0 if size < offset else offset
        while chunk := os.pread(descriptor, min(_CHUNK, size - offset), offset):
            offset += len(chunk)
            yield chunk
            # Let other tasks run: a send that need not wait does not.
            await asyncio.sleep(0)
        yield b""
        if is_last:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await ended.wait()


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
