"""A filter of stacks in a rank's output: it removes hopsgpu's frames and keeps the lines before.

Python's faulthandler writes stacks when native code crashes, and for `run_timeout`. The C++ code of
torch, TensorFlow and JAX writes stacks too. The reason for the exit is above the stacks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hopsgpu import tracebacks
from hopsgpu.core.output_limits import END_BYTES

# ECMA-48 control sequences except colours. Nested bars would move the cursor of the driver.
_CURSOR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]")
# A line of each stack that faulthandler writes.
_STACK_MARK = b"(most recent call first)"
# Bytes to search in one call; a process may write faster than it is read.
_MAX_SEARCHED = 8 * 2**20
_MAX_LINES = 20
_MAX_FRAMES = 12
_MAX_CHARACTERS = 64 * 1024
# Lines to show before the stack of a crashed child process.
_LINES_BEFORE = 5

# CUDA prints this line once for each thread.
_ON_GPU = re.compile(r".*: block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion .+ failed\.?")
_CRASHED = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?:\d+|\?\?\?) in .*')
_FRAME_START = b'  File "'
# Bytes of the longest line that may be a frame: a path has 4096. A line without end is no frame.
_MAX_FRAME = 16 * 1024
# The frames of runpy above hopsgpu's modules.
_RUNPY = "<frozen runpy>"
# As of Python 3.14, the line contains the thread's name.
_THREAD = re.compile(
    r"(?P<which>Current thread|Thread|Stack)( 0x[0-9a-f]+)?( \[.*\])? \(most recent call first\):"
)
_EXTENSIONS = "Extension modules: "
_NATIVE_STACK = re.compile(r"(Current thread's C stack trace|\*\*\* Begin stack trace)\b.*")
_NATIVE = re.compile(
    # absl and glog; c10; LLVM and gdb; TensorFlow; faulthandler as of Python 3.14.
    r"\*\*\* Check failure stack trace: \*\*\*|    @ +0x[0-9a-f]+ .*|\s*frame #\d+: .*"
    r"|<omitting python frames>|\s*#\d+ +0x[0-9a-f]+ .*|\*\*\* End stack trace \*\*\*"
    r'|  Binary file ".*|  <(truncated rest of calls|cannot get C stack on this system)>'
)


class OwnFrames:
    """Removes hopsgpu's frames from the stacks that faulthandler writes, wherever chunks end."""

    def __init__(self, *, should_keep: bool = False) -> None:
        self._should_keep = should_keep
        self._rest = b""
        self._is_in_line = False
        self._is_after_own = False

    def without(self, chunk: bytes) -> bytes:
        """Return a chunk without hopsgpu's frames; hold back the start of a possible frame."""
        if self._should_keep:
            return chunk
        data = self._rest + chunk
        begin = data.rfind(b"\n") + 1
        is_line_start = begin > 0 or not self._is_in_line
        start = data[begin : begin + len(_FRAME_START)]
        may_be_frame = (
            is_line_start and _FRAME_START.startswith(start) and len(data) - begin <= _MAX_FRAME
        )
        cut = begin if may_be_frame else len(data)
        data, self._rest = data[:cut], data[cut:]
        if self._is_after_own or _FRAME_START in data:
            return b"".join(map(self._filter_line, re.findall(rb"[^\n]*\n|[^\n]+", data)))
        self._is_in_line = not data.endswith(b"\n") if data else self._is_in_line
        return data

    def rest(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._filter_line(rest) if rest else b""

    def _filter_line(self, line: bytes) -> bytes:
        is_in_line, self._is_in_line = self._is_in_line, not line.endswith(b"\n")
        if is_in_line:
            return line
        frame = _FRAME.fullmatch(line.rstrip(b"\n").decode(errors="backslashreplace"))
        self._is_after_own = frame is not None and is_own(
            frame["file"], is_after_own=self._is_after_own
        )
        return b"" if self._is_after_own else line


def is_own(file: str, *, is_after_own: bool) -> bool:
    """Return whether a frame is hopsgpu's, or runs hopsgpu's modules.

    Args:
        is_after_own: whether the frame above, which this frame called, is hopsgpu's.
    """
    return file.startswith(tracebacks.own_file_prefixes()) or (is_after_own and file == _RUNPY)


def as_shown(line: str) -> str:
    """Return about what a terminal would show: the text after the last carriage return."""
    if "\r" in line:
        line = next((state for state in reversed(line.split("\r")) if state.strip()), "")
    return _CURSOR.sub("", line) if "\x1b" in line else line


class StackSearch:
    """A search for the stacks that a process appends to its log after this search was created."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = log.stat().st_size
        self._end = b""
        self._has_found = False

    def has_found(self) -> bool:
        """Search what was appended since the last call, at most 8 MiB; call this in a thread."""
        if not self._has_found:
            with self._log.open("rb") as file:
                # A rank that opens /dev/stdout empties the file.
                self._offset = min(self._offset, self._log.stat().st_size)
                file.seek(self._offset)
                searched = self._end + file.read(_MAX_SEARCHED)
            self._offset += len(searched) - len(self._end)
            self._has_found = _STACK_MARK in searched
            self._end = searched[-len(_STACK_MARK) :]
        return self._has_found


def end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - END_BYTES, 0))
        # Bounded, because child processes may continue to write.
        return file.read(END_BYTES).decode(errors="backslashreplace")


@dataclass(frozen=True)
class _Line:
    text: str
    # Lines of a stack do not count among the last lines.
    is_of_stack: bool = False


def last_lines(text: str, *, should_keep_own: bool = False) -> tuple[str, ...]:
    """Return the last 20 lines of a log, as a terminal shows them, and the stacks among them.

    Only threads that crashed or got a signal have a stack, without hopsgpu's frames.
    """
    lines = [as_shown(line) for line in text.split("\n")]
    if lines and not lines[-1]:
        del lines[-1]
    kept = list(_condense(lines, should_keep_own))
    counted = [at for at, line in enumerate(kept) if not line.is_of_stack]
    if len(counted) > _MAX_LINES:
        kept = kept[counted[-_MAX_LINES] :]
    return _last_characters([line.text for line in kept])


def context_of_failure(text: str, *, should_keep_own: bool = False) -> str | None:
    """Return the part of a log that explains an exception of the rank, below a title line, or None.

    The part is an assertion that failed on a GPU, which CUDA's error does not repeat. Otherwise it
    is the last crash of a child process, with the lines before it.
    """
    lines = [as_shown(line) for line in text.split("\n")]
    if asserted := next(filter(_ON_GPU.fullmatch, lines), None):
        return f"an assertion failed on its GPU:\n{asserted}"
    kept = list(_condense(lines, should_keep_own))
    at = max((at for at, line in enumerate(kept) if line.text.startswith(_CRASHED)), default=None)
    if at is None:
        return None
    begin, end = max(at - _LINES_BEFORE, 0), at + 1
    while end < len(kept) and kept[end].is_of_stack:
        end += 1
    shown = _last_characters([line.text for line in kept[begin:end]])
    return "\n".join(["a process that it had started crashed:", *shown])


def _last_characters(lines: list[str]) -> tuple[str, ...]:
    remaining = _MAX_CHARACTERS
    kept: list[str] = []
    for line in reversed(lines):
        kept.append(line[:remaining])
        remaining -= len(line)
        if remaining <= 0:
            break
    return tuple(reversed(kept))


def _condense(lines: Iterable[str], should_keep_own: bool) -> Iterator[_Line]:
    """Yield lines without native stacks, and without Python's stacks of other threads."""
    rest = _Lines(lines)
    for line in rest:
        thread = _THREAD.fullmatch(line)
        if thread is not None:
            frames = list(_take_frames(rest, should_keep_own))
            if frames and thread["which"] != "Thread":
                yield _Line(f"{thread['which']} (most recent call first):", is_of_stack=True)
                yield from frames
        elif _NATIVE_STACK.fullmatch(line):
            for _ in rest.until("*** End stack trace ***"):
                pass
        elif line.startswith(_EXTENSIONS) or _NATIVE.fullmatch(line):
            continue
        elif line or not rest.is_before_stack():
            yield _Line(line, is_of_stack=line.startswith(_CRASHED))


def _take_frames(rest: _Lines, should_keep_own: bool) -> Iterator[_Line]:
    limit = sys.maxsize if should_keep_own else _MAX_FRAMES
    is_own_frame, count = False, 0
    for line in rest.until(""):
        frame = _FRAME.fullmatch(line)
        is_own_frame = frame is not None and is_own(frame["file"], is_after_own=is_own_frame)
        if (is_own_frame and not should_keep_own) or line == "  <no Python frame>":
            continue
        count += 1
        if count <= limit:
            yield _Line(line, is_of_stack=True)
    if count > limit:
        yield _Line(f"  ... ({count - limit} more)", is_of_stack=True)


class _Lines:
    """An iterator of lines with a lookahead."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = list(lines)
        self._at = 0
        # The next line that is not empty; a log may have half a million empty ones.
        self._filled = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._at >= len(self._lines):
            raise StopIteration
        self._at += 1
        return self._lines[self._at - 1]

    def until(self, end: str) -> Iterator[str]:
        """Yield the indented lines that follow; also consume the line `end` after them."""
        while self._at < len(self._lines) and self._lines[self._at].startswith(("  ", "\t")):
            yield next(self)
        if self._at < len(self._lines) and self._lines[self._at] == end:
            next(self)

    def is_before_stack(self) -> bool:
        """Return whether the next line that is not empty belongs to a crash's report."""
        self._filled = max(self._filled, self._at)
        while self._filled < len(self._lines) and not self._lines[self._filled]:
            self._filled += 1
        line = "".join(self._lines[self._filled : self._filled + 1])
        is_python = _THREAD.fullmatch(line) or line.startswith((_CRASHED, _EXTENSIONS))
        return bool(is_python or _NATIVE_STACK.fullmatch(line))
