"""Tracebacks without hopsgpu's own frames, unless HOPSGPU_LOG=debug."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

VARIABLE = "HOPSGPU_LOG"
_DEBUG = "debug"
_PACKAGE = __name__.partition(".")[0]
# Packages that run the cells of a notebook.
_NOTEBOOK_PACKAGES = ("IPython", "ipykernel")
_PYSPARK_PACKAGES = ("pyspark", "py4j")
_INSTALLED_DIRECTORIES = ("site-packages", "dist-packages")


def should_show_all(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(VARIABLE, "").strip().lower() == _DEBUG


def inherited_variables() -> dict[str, str]:
    """Return HOPSGPU_LOG for the ranks if it is "debug" here, else no variable."""
    return {VARIABLE: _DEBUG} if should_show_all() else {}


def own_file_prefixes() -> tuple[str, ...]:
    """Return the prefixes of hopsgpu's source files.

    File names in bytecode that is sent to nodes are relative to its archive.
    """
    return f"{_PACKAGE}/", f"{Path(__file__).absolute().parent}/"


def trim(error: BaseException, *, is_deliberate: bool = False) -> None:
    """Remove hopsgpu's frames from an exception, and from its causes and contexts.

    - If hopsgpu raised the error on purpose (`is_deliberate`, or `_hides_library_frames` of the
      error), frames of libraries that hopsgpu called are removed too.
    - If hopsgpu's code raised any other error, which is a bug, all frames from the first one
      outside hopsgpu are kept.
    - With HOPSGPU_LOG=debug, this function does nothing.
    """
    if not should_show_all():
        _trim(error, is_deliberate, set(), is_within=False)


def text_of(error: BaseException) -> str:
    """Return an exception's traceback as text, without hopsgpu's frames.

    Tracebacks of other processes in its message are trimmed too, unless it is a bug of hopsgpu's.
    """
    trim(error)
    text = "".join(traceback.format_exception(error))
    is_own_fault = any(_is_own(entry.tb_frame) for entry in _walk(error.__traceback__))
    return text if is_own_fault else strip_own_frames(text)


def strip_own_frames(text: str) -> str:
    """Return a text without hopsgpu's frames in the format of Python's `traceback`."""
    if should_show_all():
        return text
    # Python draws a border to the left of the exceptions of a group.
    names = "|".join(map(re.escape, own_file_prefixes()))
    pattern = rf'^([ |+]*)  File "(?:{names})[^"\n]*", line \d+, in .*\n(?:\1    .*\n)*'
    return re.sub(pattern, "", text, flags=re.MULTILINE)


def _trim(error: BaseException, is_deliberate: bool, seen: set[int], *, is_within: bool) -> None:
    """Trim an exception and related ones.

    Args:
        seen: ids of trimmed exceptions; causes may form a circle.
        is_within: whether this exception led to an error that hopsgpu raised on purpose.
    """
    if id(error) in seen:
        return
    seen.add(id(error))
    is_deliberate = is_deliberate or getattr(error, "_hides_library_frames", False) is True
    visible = _visible_entries(list(_walk(error.__traceback__)), is_deliberate)
    if is_within and not any(_is_users(entry.tb_frame) for entry in visible):
        # The exception was raised and caught within one call of hopsgpu.
        visible = []
        BaseException.__setattr__(error, "__suppress_context__", True)
    # No assignment: the exception may be a frozen dataclass.
    error.with_traceback(_link_entries(visible))
    is_within = is_within or is_deliberate
    related = [error.__cause__, None if error.__suppress_context__ else error.__context__]
    for other in filter(None, related):
        _trim(other, False, seen, is_within=is_within)
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        _trim(inner, False, seen, is_within=is_within)


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _link_entries(entries: Sequence[TracebackType]) -> TracebackType | None:
    trace: TracebackType | None = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _visible_entries(entries: list[TracebackType], is_deliberate: bool) -> list[TracebackType]:
    if is_deliberate:
        return list(_entries_outside(entries))
    is_own = [_is_own(entry.tb_frame) for entry in entries]
    if not is_own or not is_own[-1]:
        return [entry for entry, hidden in zip(entries, is_own, strict=True) if not hidden]
    # Frames of hopsgpu that called the user's code are not part of the bug.
    begin = is_own.index(False) if False in is_own else len(is_own)
    return entries[begin:]


def _entries_outside(entries: Sequence[TracebackType]) -> Iterator[TracebackType]:
    """Yield the entries of users' code, and of libraries that hopsgpu did not call."""
    is_within = False
    for entry in entries:
        frame = entry.tb_frame
        is_within = _is_own(frame) or (is_within and not _is_users(frame))
        if not is_within:
            yield entry


def _is_own(frame: FrameType) -> bool:
    # Generated methods of a dataclass have a module, but no file.
    return _package(frame) == _PACKAGE or frame.f_code.co_filename.startswith(own_file_prefixes())


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame belongs neither to hopsgpu nor to a library."""
    file = frame.f_code.co_filename
    installed = any(part in Path(file).parts for part in _INSTALLED_DIRECTORIES)
    library = installed or file.startswith((sysconfig.get_path("stdlib"), "<frozen "))
    return not (library or _is_own(frame) or _package(frame) in _PYSPARK_PACKAGES)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def notebook_lines(error: BaseException) -> list[str]:
    """Return the lines that IPython shows for a deliberate error: frames, then the error."""
    entries = list(_walk(error.__traceback__))
    while entries and _package(entries[0].tb_frame) in _NOTEBOOK_PACKAGES:
        del entries[0]
    lines = []
    for entry in _entries_outside(entries):
        code = entry.tb_frame.f_code
        source = linecache.getline(code.co_filename, entry.tb_lineno).strip()
        function = "" if code.co_name.startswith("<") else f", in {code.co_name}"
        lines.append(f"{_place(code.co_filename)}, line {entry.tb_lineno}{function}")
        lines += [f"    {source}"] if source else []
    lines_of_error = [
        re.sub(r'File "([^"]+)"', lambda m: _place(m[1]), line) for line in format_error(error)
    ]
    return [*lines, *([""] if lines else []), *lines_of_error]


def format_error(error: BaseException) -> list[str]:
    text = "\n".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    return f"{type(error).__name__}: {text}".splitlines()


def _place(file: str) -> str:
    # IPython's name of a cell is "Cell In[3]".
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = None if get_shell is None else get_shell()
    name = None if shell is None else shell.compile.format_code_name(file)
    return f'File "{file}"' if name is None else " ".join(name)
