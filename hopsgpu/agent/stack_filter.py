"""A filter of stacks in a rank's output: it removes hopsgpu's frames and keeps what precedes them.

Python's faulthandler writes stacks when native code crashes, and for `run_timeout`; the C++ code of
torch, TensorFlow and JAX writes its own. The reason for the end of the process precedes both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hopsgpu import tracebacks

# ECMA-48 control sequences, but for colours: nested bars move the cursor, and it is the driver's.
_CURSOR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]")
# More than the stacks of the hundred threads that faulthandler shows at most mostly take.
_END_BYTES = 512 * 1024
_MOST_LINES = 20
_MOST_FRAMES = 12
_MOST_CHARACTERS = 64 * 1024
# Of a crash of what a rank had started: what stands before its stack.
_LINES_BEFORE = 5

# As CUDA prints it, once for each thread.
_ON_GPU = re.compile(r".*: block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion .+ failed\.?")
_CRASHED = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?:\d+|\?\?\?) in .*')
# What runs hopsgpu's own modules.
_RUNPY = "<frozen runpy>"
# As of Python 3.14 threads have names there.
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
    """Removes hopsgpu's frames from the stacks that faulthandler writes, wherever chunks end.

    Args:
        keep: whether to keep them.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._begins = tuple(f'  File "{home}'.encode() for home in tracebacks.own_file_prefixes())
        self._longest = max(map(len, self._begins))
        self._keep = keep
        self._rest = b""
        self._in_line = False
        self._after_own = False

    def without(self, chunk: bytes) -> bytes:
        """Return what is left of a chunk; the begin of a line that may be such a frame is kept
        back.
        """
        if self._keep:
            return chunk
        data = self._rest + chunk
        if not self._after_own and b'  File "' not in data:
            # Nearly always.
            cut = self._undecided(data)
            data, self._rest = data[:cut], data[cut:]
            self._in_line = not data.endswith(b"\n") if data else self._in_line
            return data
        left = bytearray()
        *whole, last = data.split(b"\n")
        for line in whole:
            left += self._line(line + b"\n")
        cut = 0 if self._may_be_own(last) else len(last)
        self._rest = last[cut:]
        if last[:cut]:
            left += last[:cut]
            self._in_line, self._after_own = True, False
        return bytes(left)

    def rest(self) -> bytes:
        """Return what was held back, at the end."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def _undecided(self, data: bytes) -> int:
        """Return where the last line begins, if that may become a frame of hopsgpu; else the
        end.
        """
        begin = data.rfind(b"\n") + 1
        if begin == 0 and self._in_line:
            return len(data)
        return begin if self._may_be_own(data[begin:]) else len(data)

    def _may_be_own(self, part: bytes) -> bool:
        """Return whether a part of a line, its begin or more, may be of a frame that is left
        out.
        """
        if self._in_line or not part:
            return False
        begins = self._begins
        if self._after_own:
            begins = (*begins, f'  File "{_RUNPY}'.encode())
        return any(part.startswith(one) or one.startswith(part) for one in begins)

    def _line(self, line: bytes) -> bytes:
        in_line, self._in_line = self._in_line, not line.endswith(b"\n")
        if in_line:
            return line
        frame = _FRAME.fullmatch(line.rstrip(b"\n").decode(errors="backslashreplace"))
        own = frame is not None and is_own(frame["file"], after_own=self._after_own)
        self._after_own = own
        return b"" if own else line


def is_own(file: str, *, after_own: bool) -> bool:
    """Return whether a frame is hopsgpu's, or runs its modules.

    Args:
        file: file of its code.
        after_own: whether the frame that it called is hopsgpu's.
    """
    return file.startswith(tracebacks.own_file_prefixes()) or (after_own and file == _RUNPY)


def as_shown(line: str) -> str:
    """Return what a terminal would show of a line, roughly: what follows the last carriage
    return.
    """
    if "\r" in line:
        line = next((state for state in reversed(line.split("\r")) if state.strip()), "")
    return _CURSOR.sub("", line) if "\x1b" in line else line


def end_of(log: Path) -> str:
    """Return the end of a log, for `last_lines` and `context_of_failure`."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - _END_BYTES, 0))
        return file.read().decode(errors="backslashreplace")


@dataclass(frozen=True)
class _Line:
    text: str
    # Whether it is of a stack; such lines do not push others out.
    of_stack: bool = False


def last_lines(text: str, *, keep_own: bool = False) -> tuple[str, ...]:
    """Return the last 20 lines of a log, as a terminal shows them.

    Of stacks, only the frames of the thread that crashed or was asked are added, without hopsgpu's
    frames.

    Args:
        text: the log, or its end.
        keep_own: whether to keep hopsgpu's frames.
    """
    lines = [as_shown(line) for line in text.split("\n")]
    if lines and not lines[-1]:
        del lines[-1]
    kept = list(_condensed(lines, keep_own))
    counted = [at for at, line in enumerate(kept) if not line.of_stack]
    if len(counted) > _MOST_LINES:
        kept = kept[counted[-_MOST_LINES] :]
    return _bounded([line.text for line in kept])


def context_of_failure(text: str, *, keep_own: bool = False) -> str | None:
    """Return what a log tells besides the exception that its process raised, below a line that
    says what.

    It is the last crash of a child process, with the lines just before it, or an assertion that
    failed on a GPU, which CUDA's error does not repeat; None if there is neither.

    Args:
        text, keep_own: as for `last_lines`.
    """
    lines = [as_shown(line) for line in text.split("\n")]
    if asserted := next(filter(_ON_GPU.fullmatch, lines), None):
        return f"an assertion failed on its GPU:\n{asserted}"
    kept = list(_condensed(lines, keep_own))
    at = max((at for at, line in enumerate(kept) if line.text.startswith(_CRASHED)), default=None)
    if at is None:
        return None
    begin, end = max(at - _LINES_BEFORE, 0), at + 1
    while end < len(kept) and kept[end].of_stack:
        end += 1
    shown = _bounded([line.text for line in kept[begin:end]])
    return "\n".join(["a process that it had started crashed:", *shown])


def _bounded(lines: list[str]) -> tuple[str, ...]:
    """Return the last lines that are not too much together."""
    left = _MOST_CHARACTERS
    kept: list[str] = []
    for line in reversed(lines):
        kept.append(line[:left])
        left -= len(line)
        if left <= 0:
            break
    return tuple(reversed(kept))


def _condensed(lines: Iterable[str], keep_own: bool) -> Iterator[_Line]:
    """Yield lines, with less of stacks: of Python's those of one thread, without hopsgpu's
    frames.
    """
    rest = _Lines(lines)
    for line in rest:
        thread = _THREAD.fullmatch(line)
        if thread is not None:
            found = list(_frames(rest, keep_own))
            if found and thread["which"] != "Thread":
                yield _Line(f"{thread['which']} (most recent call first):", of_stack=True)
                yield from found
        elif _NATIVE_STACK.fullmatch(line):
            for _ in rest.until("*** End stack trace ***"):
                pass
        elif line.startswith(_EXTENSIONS) or _NATIVE.fullmatch(line):
            continue
        elif line or not rest.is_before_stack():
            yield _Line(line, of_stack=line.startswith(_CRASHED))


def _frames(rest: _Lines, keep_own: bool) -> Iterator[_Line]:
    """Take the frames of a thread, and yield those to show."""
    most = sys.maxsize if keep_own else _MOST_FRAMES
    own, shown = False, 0
    for line in rest.until(""):
        frame = _FRAME.fullmatch(line)
        own = frame is not None and is_own(frame["file"], after_own=own)
        if (own and not keep_own) or line == "  <no Python frame>":
            continue
        shown += 1
        if shown <= most:
            yield _Line(line, of_stack=True)
    if shown > most:
        yield _Line(f"  ... ({shown - most} more)", of_stack=True)


class _Lines:
    """Lines to take one after the other, with a lookahead."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = list(lines)
        self._at = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._at >= len(self._lines):
            raise StopIteration
        self._at += 1
        return self._lines[self._at - 1]

    def until(self, end: str) -> Iterator[str]:
        """Take the indented lines that follow, and the one that ends them."""
        while self._at < len(self._lines) and self._lines[self._at].startswith(("  ", "\t")):
            yield next(self)
        if self._at < len(self._lines) and self._lines[self._at] == end:
            next(self)

    def is_before_stack(self) -> bool:
        """Return whether the next line that is not empty starts a stack, or lists modules."""
        for line in self._lines[self._at :]:
            if line:
                begins = _THREAD.fullmatch(line) or line.startswith((_CRASHED, _EXTENSIONS))
                return bool(begins or _NATIVE_STACK.fullmatch(line))
        return False
