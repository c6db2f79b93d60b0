"""Sources of scripts and notebooks where these are not: in ranks, and in tracebacks from there."""

from __future__ import annotations

import inspect
import io
import linecache
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

# As Python's own tracebacks have it, and as faulthandler does.
_FRAME = re.compile(r'  File "(.+)", line (\d+),? in .+')
# Characters of all sources of a call; what is over is left out.
MOST_SOURCES = 4 * 2**20
_MAIN = "__main__"


def sources_of(
    files: Iterable[str], classes: Mapping[str, type], main: Mapping[str, Any]
) -> dict[str, str]:
    """The sources of what travels by value, by the names of their files.

    Those of Python and of installed packages are left out.

    Args:
        files: in which its code stands.
        classes: of `__main__` that travel by value, by their qualified names.
        main: the namespace of `__main__`.
    """
    wanted = dict.fromkeys(files)
    script = main.get("__file__")
    if classes and script is not None:
        wanted.setdefault(script)
    elif classes:
        known = [file for file, entry in list(linecache.cache.items()) if len(entry) > 1][::-1]
        wanted |= dict.fromkeys(
            file for name, cls in classes.items() if (file := _file_of(name, cls, known))
        )
    paths = sysconfig.get_paths()
    installed = tuple(f"{paths[key]}/" for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    found, room = {}, MOST_SOURCES
    for file in wanted:
        if not file.startswith(installed):
            source = "".join(linecache.getlines(file, dict(main) if file == script else None))
            if source and len(source) <= room:
                found[file] = source
                room -= len(source)
    return found


def add_sources(sources: Mapping[str, str], has_file: bool) -> None:
    """Has `linecache`, and with it `inspect`, know sources of which there are no files here.

    Args:
        sources: by the names of their files.
        has_file: whether `__main__` has a file, in which `inspect` looks for its classes.
    """
    for file, source in sources.items():
        # Without a time, so that none looks whether the file has changed.
        linecache.cache[file] = (len(source), None, io.StringIO(source).readlines(), file)
    if sources and not has_file:
        _find_classes_in([*sources][::-1])


class ScriptLoader:
    """As `__loader__` of `__main__`: gives the script's source where there is no file of it.

    AutoGraph, say, has `linecache` forget a script's lines and look for them again.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, name: str) -> str:
        """As PEP 302 has it."""
        return self._source


def _find_classes_in(files: list[str]) -> None:
    """Has `inspect` find the classes of a notebook, whose `__main__` has no file.

    It looks for a function in the file that its code names, but for a class in its module's.
    """
    find: Any = inspect.getfile

    def getfile(object: Any) -> str:  # noqa: A002 - as inspect has it
        try:
            found: str = find(object)
            return found
        except (TypeError, OSError):
            if isinstance(object, type) and object.__module__ == _MAIN:
                file = _file_of(object.__qualname__, object, files)
                if file is not None:
                    return file
            raise

    inspect.getfile = getfile


def _file_of(name: str, cls: type, files: Sequence[str]) -> str | None:
    """The file in which a class stands: its functions', or one of these that defines such a class.

    Args:
        name: qualified.
        cls: the class.
        files: that `linecache` knows, the likeliest first.
    """
    for member in vars(cls).values():
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        elif isinstance(member, property):
            member = member.fget
        while isinstance(member, FunctionType) and hasattr(member, "__wrapped__"):
            member = member.__wrapped__
        if isinstance(member, FunctionType) and member.__qualname__.startswith(f"{name}."):
            # Not "<string>", of which dataclasses make theirs.
            file = member.__code__.co_filename
            if file in files:
                return file
    definition = re.compile(rf"^\s*class\s+{re.escape(name.rpartition('.')[2])}\b", re.MULTILINE)
    for file in files:
        if definition.search("".join(linecache.getlines(file))):
            return file
    return None


def with_sources(traceback: str) -> str:
    """A traceback with the lines of source that it lacks, as far as they are known here.

    On a node there is no script and no notebook, of which a rank could show lines. Here they are,
    cells too: IPython has `linecache` know them.

    Args:
        traceback: as Python's module of that name formats it, or as faulthandler does.
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
