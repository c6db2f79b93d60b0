"""Which frames a stack shows: the user's and their libraries', not hopsgpu's own.

HOPSGPU_LOG=debug shows all of them.
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
# They run cells.
_NOTEBOOK = ("IPython", "ipykernel")
_PYSPARK = ("pyspark", "py4j")
_INSTALLED = ("site-packages", "dist-packages")


def shows_all(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether stacks are to have hopsgpu's own frames too, by a process's variables."""
    return environ.get(VARIABLE, "").strip().lower() == _DEBUG


def inherited() -> dict[str, str]:
    """The variable for ranks, where it is set here so that it counts."""
    return {VARIABLE: _DEBUG} if shows_all() else {}


def homes() -> tuple[str, ...]:
    """What the names of hopsgpu's source files begin with, in this process or another one here.

    Of bytecode that travels to the nodes they are relative to its archive.
    """
    return f"{_PACKAGE}/", f"{Path(__file__).absolute().parent}/"


def trim(error: BaseException, *, on_purpose: bool = False) -> None:
    """Leaves hopsgpu's frames out of an exception, and of those that it is linked to.

    Of an error that hopsgpu raises on purpose the libraries' frames below its own go too: the
    message says all. Of any other that its own code raised, frames stay: it is a fault to be found.
    Has no effect where HOPSGPU_LOG=debug.

    Args:
        error: its traceback is changed.
        on_purpose: whether hopsgpu raised it so; always true of an error that
            `_hides_library_frames`.
    """
    if not shows_all():
        _trim(error, on_purpose, set(), within=False)


def text_of(error: BaseException) -> str:
    """A traceback, without hopsgpu's frames; of other processes' too, that are texts in it.

    Args:
        error: as of `trim`, which it is given to.
    """
    trim(error)
    text = "".join(traceback.format_exception(error))
    is_own_fault = any(_is_own(entry.tb_frame) for entry in _walk(error.__traceback__))
    return text if is_own_fault else without_own(text)


def without_own(text: str) -> str:
    """A text without the frames of hopsgpu that it has, as Python's `traceback` writes them."""
    if shows_all():
        return text
    # Errors in a group are drawn with a frame on their left.
    names = "|".join(map(re.escape, homes()))
    own = rf'^([ |+]*)  File "(?:{names})[^"\n]*", line \d+, in .*\n(?:\1    .*\n)*'
    return re.sub(own, "", text, flags=re.MULTILINE)


def _trim(error: BaseException, on_purpose: bool, seen: set[int], *, within: bool) -> None:
    """As `trim`.

    Args:
        error: to be changed.
        on_purpose: as of `trim`.
        seen: the ids of those that were changed; links may make a circle.
        within: whether it led to an error that hopsgpu raised on purpose.
    """
    if id(error) in seen:
        return
    seen.add(id(error))
    on_purpose = on_purpose or getattr(error, "_hides_library_frames", False) is True
    kept = _shown(list(_walk(error.__traceback__)), on_purpose)
    if within and not any(_is_users(entry.tb_frame) for entry in kept):
        # It was raised, and caught, within a call of hopsgpu.
        kept = []
        BaseException.__setattr__(error, "__suppress_context__", True)
    # Not by assignment: an exception may be a frozen dataclass.
    error.with_traceback(_linked(kept))
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
    """A traceback of these entries."""
    trace: TracebackType | None = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _shown(entries: list[TracebackType], on_purpose: bool) -> list[TracebackType]:
    """What is shown of a traceback, the outermost frame first."""
    if on_purpose:
        return list(_outside(entries))
    own = [_is_own(entry.tb_frame) for entry in entries]
    if not own or not own[-1]:
        return [entry for entry, hidden in zip(entries, own, strict=True) if not hidden]
    # Who called it is no part of the fault.
    begin = own.index(False) if False in own else len(own)
    return entries[begin:]


def _outside(entries: Sequence[TracebackType]) -> Iterator[TracebackType]:
    """What is neither hopsgpu's nor called by it, but for the user's own code."""
    within = False
    for entry in entries:
        frame = entry.tb_frame
        within = _is_own(frame) or (within and not _is_users(frame))
        if not within:
            yield entry


def _is_own(frame: FrameType) -> bool:
    # A dataclass's methods are in no file.
    return _package(frame) == _PACKAGE or frame.f_code.co_filename.startswith(homes())


def _is_users(frame: FrameType) -> bool:
    """Whether it is neither hopsgpu's nor a library's."""
    file = frame.f_code.co_filename
    installed = any(part in Path(file).parts for part in _INSTALLED)
    library = installed or file.startswith((sysconfig.get_path("stdlib"), "<frozen "))
    return not (library or _is_own(frame) or _package(frame) in _PYSPARK)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def in_notebook(error: BaseException) -> list[str]:
    """An error as IPython is to show it: lines of the cell, and of what it called, and the error.

    Args:
        error: raised by hopsgpu on purpose.
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
    said = [re.sub(r'File "([^"]+)"', lambda m: _place(m[1]), line) for line in in_words(error)]
    return [*lines, *([""] if lines else []), *said]


def in_words(error: BaseException) -> list[str]:
    """An error without any place, with its notes."""
    said = "\n".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    return f"{type(error).__name__}: {said}".splitlines()


def _place(file: str) -> str:
    """What a person calls a file; of a cell "Cell In[3]", as IPython has it."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = None if get_shell is None else get_shell()
    name = None if shell is None else shell.compile.format_code_name(file)
    return f'File "{file}"' if name is None else " ".join(name)
