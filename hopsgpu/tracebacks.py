"""Tracebacks that show the frames of users and of their libraries, and hide hopsgpu's own.

With HOPSGPU_LOG=debug, they show all frames.
"""

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
_NOTEBOOK = ("IPython", "ipykernel")
_PYSPARK = ("pyspark", "py4j")
_INSTALLED = ("site-packages", "dist-packages")


def should_show_all(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether tracebacks show hopsgpu's own frames too, by a process's variables."""
    return environ.get(VARIABLE, "").strip().lower() == _DEBUG


def inherited_variables() -> dict[str, str]:
    """Return HOPSGPU_LOG for the ranks if it is "debug" here, else no variable."""
    return {VARIABLE: _DEBUG} if should_show_all() else {}


def own_file_prefixes() -> tuple[str, ...]:
    """Return how the names of hopsgpu's source files begin, in all processes of this machine.

    File names in bytecode that travels to the nodes are relative to its archive.
    """
    return f"{_PACKAGE}/", f"{Path(__file__).absolute().parent}/"


def trim(error: BaseException, *, on_purpose: bool = False) -> None:
    """Remove hopsgpu's frames from an exception, and from the exceptions that it is linked to.

    If hopsgpu raises the error on purpose, the frames of libraries below its own go too, because
    the message is complete. If hopsgpu's own code raised any other error, all frames from the first
    one outside hopsgpu on stay, because it is a bug that must be found. With HOPSGPU_LOG=debug this
    function does nothing.

    Args:
        error: the exception, whose traceback is changed.
        on_purpose: whether hopsgpu raised it on purpose; always true of an error that
            `_hides_library_frames`.
    """
    if not should_show_all():
        _trim(error, on_purpose, set(), within=False)


def text_of(error: BaseException) -> str:
    """Return an exception's traceback as text, without hopsgpu's frames.

    Tracebacks of other processes that are part of the text lose them too, unless the exception
    is a bug in hopsgpu's own code.

    Args:
        error: the exception; `trim` changes its traceback.
    """
    trim(error)
    text = "".join(traceback.format_exception(error))
    is_own_fault = any(_is_own(entry.tb_frame) for entry in _walk(error.__traceback__))
    return text if is_own_fault else strip_own_frames(text)


def strip_own_frames(text: str) -> str:
    """Return a text without the frames of hopsgpu in it, as Python's `traceback` writes them."""
    if should_show_all():
        return text
    # Python draws a border to the left of the exceptions of a group.
    names = "|".join(map(re.escape, own_file_prefixes()))
    own = rf'^([ |+]*)  File "(?:{names})[^"\n]*", line \d+, in .*\n(?:\1    .*\n)*'
    return re.sub(own, "", text, flags=re.MULTILINE)


def _trim(error: BaseException, on_purpose: bool, seen: set[int], *, within: bool) -> None:
    """Do the work of `trim`.

    Args:
        error: the exception to change.
        on_purpose: as for `trim`.
        seen: ids of the exceptions that were changed already; links may form a circle.
        within: whether this exception led to an error that hopsgpu raised on purpose.
    """
    if id(error) in seen:
        return
    seen.add(id(error))
    on_purpose = on_purpose or getattr(error, "_hides_library_frames", False) is True
    shown = _shown(list(_walk(error.__traceback__)), on_purpose)
    if within and not any(_is_users(entry.tb_frame) for entry in shown):
        # The exception was raised and caught within one call of hopsgpu.
        shown = []
        BaseException.__setattr__(error, "__suppress_context__", True)
    # A method, because an exception may be a frozen dataclass, which takes no assignment.
    error.with_traceback(_linked(shown))
    within = within or on_purpose
    linked = [error.__cause__, None if error.__suppress_context__ else error.__context__]
    for other in filter(None, linked):
        _trim(other, False, seen, within=within)
    for one in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        _trim(one, False, seen, within=within)


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(entries: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback of these entries."""
    trace: TracebackType | None = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _shown(entries: list[TracebackType], on_purpose: bool) -> list[TracebackType]:
    """Return the entries of a traceback that are shown, the outermost frame first."""
    if on_purpose:
        return list(_outside(entries))
    own = [_is_own(entry.tb_frame) for entry in entries]
    if not own or not own[-1]:
        return [entry for entry, hidden in zip(entries, own, strict=True) if not hidden]
    # The frames of hopsgpu that called the user's code are not part of the bug.
    begin = own.index(False) if False in own else len(own)
    return entries[begin:]


def _outside(entries: Sequence[TracebackType]) -> Iterator[TracebackType]:
    """Yield the entries that are not hopsgpu's, nor of libraries that hopsgpu called.

    The user's own code is always included.
    """
    within = False
    for entry in entries:
        frame = entry.tb_frame
        within = _is_own(frame) or (within and not _is_users(frame))
        if not within:
            yield entry


def _is_own(frame: FrameType) -> bool:
    # The generated methods of a dataclass have no file, but they have a module.
    return _package(frame) == _PACKAGE or frame.f_code.co_filename.startswith(own_file_prefixes())


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame belongs neither to hopsgpu nor to a library."""
    file = frame.f_code.co_filename
    installed = any(part in Path(file).parts for part in _INSTALLED)
    library = installed or file.startswith((sysconfig.get_path("stdlib"), "<frozen "))
    return not (library or _is_own(frame) or _package(frame) in _PYSPARK)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def notebook_lines(error: BaseException) -> list[str]:
    """Return the lines that IPython shows: places in the cell and what it called, then the error.

    Args:
        error: an error that hopsgpu raised on purpose.
    """
    entries = list(_walk(error.__traceback__))
    while entries and _package(entries[0].tb_frame) in _NOTEBOOK:
        del entries[0]
    lines = []
    for entry in _outside(entries):
        code = entry.tb_frame.f_code
        source = linecache.getline(code.co_filename, entry.tb_lineno).strip()
        within = "" if code.co_name.startswith("<") else f", in {code.co_name}"
        lines.append(f"{_place(code.co_filename)}, line {entry.tb_lineno}{within}")
        lines += [f"    {source}"] if source else []
    said = [re.sub(r'File "([^"]+)"', lambda m: _place(m[1]), line) for line in format_error(error)]
    return [*lines, *([""] if lines else []), *said]


def format_error(error: BaseException) -> list[str]:
    """Return the lines of an error's type, message and notes, without any traceback."""
    text = "\n".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    return f"{type(error).__name__}: {text}".splitlines()


def _place(file: str) -> str:
    """Return how users know a file; for a cell "Cell In[3]", as IPython writes it."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = None if get_shell is None else get_shell()
    name = None if shell is None else shell.compile.format_code_name(file)
    return f'File "{file}"' if name is None else " ".join(name)
