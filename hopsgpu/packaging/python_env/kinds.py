"""The kinds of values that `python_env=` accepts, told apart without making anything."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.archives import SUFFIXES
from hopsgpu.packaging.python_env.conda import CondaEnvironment
from hopsgpu.packaging.python_env.inspection import other_python
from hopsgpu.packaging.python_env.recipes import (
    Archive,
    Directory,
    Packages,
    Recipe,
    StoredArchive,
    on_lake,
)
from hopsgpu.packaging.python_env.requirements import check_lines, read_lines

_ACCEPTED = (
    "a list of packages (['humanize==4.9'], or as a text humanize==4.9,numpy), or the path of a"
    f" requirements file (*.txt), of a wheel, of a packed archive ({', '.join(SUFFIXES)}) or of a"
    " directory (modules, a virtual or a conda environment), or a conda environment's name is"
    " wanted"
)
_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
_VERSION = re.compile(r"python3\.\d+")
_NAME = re.compile(r"\w[\w.+-]*")
# Versions and packages as in PEP 508, without URLs and markers.
_VERSIONED = r"(===|[~=!<>]=|[<>])\s*[\w.*+!-]+"
_PACKAGE = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(\[[\w.,\s-]*\])?\s*"
    rf"(?P<versions>{_VERSIONED}(\s*,\s*{_VERSIONED})*)?"
)
# A comma between packages, not between a package's versions (a>=1,<2) or its extras (a[b,c]).
_BETWEEN = re.compile(r",\s*(?=[A-Za-z0-9])(?![^\[]*\])")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_MOST_NAMED = 3


def recipe_for(given: object) -> Recipe | StoredArchive:
    """Return how to make the environment that a user asks for, or where it is on the lake.

    Raises:
        ConfigError: the value is of no kind that is accepted, or cannot travel.
    """
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        return on_lake(path) if isinstance(path, str) and "://" in path else _of_path(path)
    if isinstance(given, Sequence) and not isinstance(given, (bytes, bytearray)):
        return _of_list(given)
    raise ConfigError(f"python_env={given!r}: {_ACCEPTED}")


def _of_list(given: Sequence[object]) -> Packages:
    for one in given:
        if not isinstance(one, str) or not one.strip() or "\n" in one or "\r" in one:
            raise ConfigError(f"python_env has {one!r}: {_ACCEPTED}")
    lines = check_lines([str(one) for one in given], "the list")
    # Options may contain passwords, and do not say what is installed.
    named = [_CREDENTIALS.sub("://…@", line) for line in lines if not line.startswith("-")]
    if not named:
        raise ConfigError(f"python_env={list(given)!r}: it names no package; {_ACCEPTED}")
    more = len(named) - _MOST_NAMED
    return Packages(", ".join(named[:_MOST_NAMED]) + (f" and {more} more" * (more > 0)), lines)


def _of_path(given: str | bytes) -> Recipe:
    if not isinstance(given, str) or not given:
        raise ConfigError(f"python_env={given!r}: {_ACCEPTED}")
    path = Path(given).expanduser()
    if path.is_dir():
        return _of_directory(given, path)
    if path.is_file():
        return _of_file(given, path)
    if "/" not in given and _NAME.fullmatch(given) and not given.endswith((".txt", *SUFFIXES)):
        return CondaEnvironment(given)
    if packages := _packages_in(given):
        return _of_list(packages)
    raise ConfigError(f"python_env={given!r}: there is no such file or directory; {_ACCEPTED}")


def _packages_in(text: str) -> list[str]:
    """Return the packages that a text lists, with or without versions; none if it is no list."""
    parts = [part.strip() for part in _BETWEEN.split(text)]
    found = [_PACKAGE.fullmatch(part) for part in parts]
    if any(match is None or match["name"].endswith((".txt", *SUFFIXES)) for match in found):
        return []
    return parts


def _of_directory(given: str, path: Path) -> Recipe:
    path = path.resolve()
    if (path / "conda-meta").is_dir():
        _check_python(given, {file.name for file in path.glob("bin/python3.*")})
        return CondaEnvironment(given, path)
    if not (path / "pyvenv.cfg").is_file():
        return Directory(given, path)
    packages = sorted(path.glob("lib/python3.*/site-packages"))
    _check_python(given, {found.parent.name for found in packages})
    return Directory(given, path / "lib" / _PYTHON / "site-packages")


def _check_python(given: str, there: set[str]) -> None:
    if _PYTHON not in there:
        found = ", ".join(sorted(name for name in there if _VERSION.fullmatch(name)))
        raise other_python(
            f"python_env={given!r}", found or "no Python", _PYTHON.removeprefix("python")
        )


def _of_file(given: str, path: Path) -> Recipe:
    path = path.resolve()
    if path.name.endswith(SUFFIXES):
        return Archive(given, path)
    if path.suffix == ".txt":
        lines = read_lines(path)
        if not lines:
            raise ConfigError(f"python_env={given!r}: it names no package")
        return Packages(given, lines, path)
    if path.suffix == ".whl":
        return _of_list([given])
    if path.suffix in (".yml", ".yaml"):
        raise ConfigError(
            f"python_env={given!r}: make the environment first (conda env create --file {given}),"
            " and give its name"
        )
    raise ConfigError(f"python_env={given!r}: {_ACCEPTED}")
