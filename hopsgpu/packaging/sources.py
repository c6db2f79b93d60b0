"""Sources of scripts and notebooks for ranks and their tracebacks, where the files are missing."""

from __future__ import annotations

import inspect
import io
import linecache
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

# A frame in the format of Python's own tracebacks, and of faulthandler's.
_FRAME = re.compile(r'  File "(.+)", line (\d+),? in .+')
# Limit of the characters of all sources of a call; sources beyond it are left out.
MAX_SOURCES = 4 * 2**20
_MAIN_MODULE = "__main__"


def sources_of(
    files: Iterable[str], classes: Mapping[str, type], main: Mapping[str, Any]
) -> dict[str, str]:
    """Return the sources of code that is pickled by value, by file name.

    Sources of Python and of installed packages are left out. `classes` are those of `__main__`, by
    qualified name.
    """
    source_files = dict.fromkeys(files)
    script = main.get("__file__")
    if classes and script is not None:
        source_files.setdefault(script)
    elif classes:
        cell_files = [file for file, entry in list(linecache.cache.items()) if len(entry) > 1][::-1]
        source_files |= dict.fromkeys(
            file for name, cls in classes.items() if (file := _file_of(name, cls, cell_files))
        )
    paths = sysconfig.get_paths()
    installed = tuple(f"{paths[key]}/" for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    sources, space = {}, MAX_SOURCES
    for file in source_files:
        if not file.startswith(installed):
            source = "".join(linecache.getlines(file, dict(main) if file == script else None))
            if source and len(source) <= space:
                sources[file] = source
                space -= len(source)
    return sources


def add_sources(sources: Mapping[str, str], has_file: bool) -> None:
    """Give `linecache`, and thus `inspect`, sources whose files are not here.

    If `__main__` has a file, `inspect` looks for its classes there.
    """
    for file, source in sources.items():
        # Without a time, `linecache` does not check whether the file has changed.
        linecache.cache[file] = (len(source), None, io.StringIO(source).readlines(), file)
    if sources and not has_file:
        _find_classes_in([*sources][::-1])


class ScriptLoader:
    """A `__loader__` of `__main__` that returns the script's source, whose file is not here.

    `linecache` needs it, for example when AutoGraph clears the cache.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, name: str) -> str:
        return self._source


def _find_classes_in(files: list[str]) -> None:
    # `inspect` looks for a class in the file of its module, which a notebook's `__main__` lacks.
    find: Any = inspect.getfile

    def getfile(object: Any) -> str:  # noqa: A002 - as inspect has it
        try:
            path: str = find(object)
            return path
        except (TypeError, OSError):
            if isinstance(object, type) and object.__module__ == _MAIN_MODULE:
                file = _file_of(object.__qualname__, object, files)
                if file is not None:
                    return file
            raise

    inspect.getfile = getfile


def _file_of(name: str, cls: type, files: Sequence[str]) -> str | None:
    """Return the file of a class's functions, or the first that defines such a name, or None."""
    for member in vars(cls).values():
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        elif isinstance(member, property):
            member = member.fget
        while isinstance(member, FunctionType) and hasattr(member, "__wrapped__"):
            member = member.__wrapped__
        if isinstance(member, FunctionType) and member.__qualname__.startswith(f"{name}."):
            # Functions that dataclasses generate have the file "<string>".
            file = member.__code__.co_filename
            if file in files:
                return file
    definition = re.compile(rf"^\s*class\s+{re.escape(name.rpartition('.')[2])}\b", re.MULTILINE)
    for file in files:
        if definition.search("".join(linecache.getlines(file))):
            return file
    return None


def add_source_lines(traceback: str) -> str:
    """Return a traceback with the source lines that it lacks, as far as the driver has them.

    A node has neither the script nor the notebook. The driver has both: IPython adds cells to
    `linecache`. The format is that of Python's `traceback` module or of faulthandler.
    """
    lines = traceback.splitlines()
    shown = []
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        shown.append(line)
        frame = _FRAME.fullmatch(line)
        if frame is not None and not next_line.startswith("    "):
            source = linecache.getline(frame[1], int(frame[2])).strip()
            shown += [f"    {source}"] if source else []
    return "\n".join(shown)
