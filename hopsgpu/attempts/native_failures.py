"""Why native code aborted, from the messages of C++, glibc, absl, OpenMP and others."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST = 500
_THROWN = re.compile(r"terminate called after throwing an instance of '(?P<kind>.+)'")
_WHAT = re.compile(r"  what\(\): +(?P<why>.+)")
_FATAL = "Fatal Python error: "
# faulthandler's names of signals, which say no more than the signal itself.
_SIGNALS = ("Aborted", "Segmentation fault", "Bus error", "Illegal instruction", "Floating-point")
# The most specific first; if several lines match a pattern, the last one counts.
_PATTERNS = (
    # absl and glog, of TensorFlow, JAX and others: F0000 00:00:00.0  123 file.cc:80] why
    re.compile(r"F\d{4}(?:\d{4})? [\d:.]+ +\d+ (?P<why>\S+:\d+\] .+)"),
    re.compile(r"(?P<why>\[libprotobuf FATAL .+)"),
    re.compile(r"(?P<why>.*\bCHECK failed: .+|.*\bCheck failed: .+)"),
    re.compile(r"(?P<why>.*: Assertion [`'].+' failed\.?)"),
    re.compile(r"(?P<why>libc\+\+abi: .+|terminating (?:due to|with) .+)"),
    re.compile(
        r"(?P<why>(?:free|malloc|realloc|calloc|munmap_chunk|malloc_consolidate)\(\): .+"
        r"|double free or corruption.*|corrupted (?:size|double).*"
        r"|\*\*\* .+ \*\*\*: .*(?:terminated|unknown).*)"
    ),
    re.compile(r"(?P<why>OMP: Error #\d+: .+|.*\bMKL (?:FATAL )?ERROR: .+|LLVM ERROR: .+)"),
    re.compile(r"(?P<why>fatal runtime error: .+|thread '.*' panicked at .+)"),
    re.compile(r"(?P<why>terminate called without an active exception|pure virtual method called)"),
)


def why_aborted(lines: Sequence[str]) -> str:
    """Return why a signal ended a process, from the last lines of its log; "" if unknown."""
    at = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    before = list(lines[: at[-1]] if at else lines)
    if exception := _uncaught_exception(before):
        return _short(exception)
    for pattern in _PATTERNS:
        reasons = [match["why"] for line in before if (match := pattern.fullmatch(line.strip()))]
        if reasons:
            return _short(reasons[-1])
    message = lines[at[-1]].removeprefix(_FATAL) if at else ""
    return "" if message.startswith(_SIGNALS) else _short(message)


def _uncaught_exception(lines: Sequence[str]) -> str:
    """Return the class and the message of an uncaught C++ exception; "" if there is none."""
    kind = [match["kind"] for line in lines if (match := _THROWN.fullmatch(line))]
    why = [match["why"] for line in lines if (match := _WHAT.fullmatch(line))]
    return ": ".join([*kind[-1:], *why[-1:]]) if kind else ""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
