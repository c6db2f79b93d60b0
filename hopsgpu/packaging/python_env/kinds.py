"""The kinds of values that `python_env=` accepts; nothing is built here."""

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
    ModuleDirectory,
    Packages,
    PackedArchive,
    Recipe,
    StoredArchive,
    stored_archive_at,
)
from hopsgpu.packaging.python_env.requirements import check_lines, read_lines

_MUST_BE = (
    "must be a list of packages (['humanize==4.9'], or as a text humanize==4.9,numpy), the path of"
    f" a requirements file (*.txt), of a wheel, of a packed archive ({', '.join(SUFFIXES)}) or of a"
    " directory (modules, a virtual or a conda environment), or the name of a conda environment"
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
_SEPARATOR = re.compile(r",\s*(?=[A-Za-z0-9])(?![^\[]*\])")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_MAX_NAMED = 3


def recipe_for(python_env: object) -> Recipe | StoredArchive:
    """Return how to build the environment that a user requests, or where it is on the lake.

    Raises:
        ConfigError: the value is of no accepted kind, or cannot be sent to ranks.
    """
    if isinstance(python_env, (str, os.PathLike)):
        path = os.fspath(python_env)
        return (
            stored_archive_at(path)
            if isinstance(path, str) and "://" in path
            else _recipe_for_path(path)
        )
    if isinstance(python_env, Sequence) and not isinstance(python_env, (bytes, bytearray)):
        return _packages_of(python_env)
    raise ConfigError(f"python_env={python_env!r}: {_MUST_BE}")


def _packages_of(packages: Sequence[object]) -> Packages:
    for line in packages:
        if not isinstance(line, str) or not line.strip() or "\n" in line or "\r" in line:
            raise ConfigError(f"python_env has {line!r} in its list: {_MUST_BE}")
    lines = check_lines([str(line) for line in packages], "the list")
    # Options may contain passwords, and do not say what is installed.
    named = [_CREDENTIALS.sub("://…@", line) for line in lines if not line.startswith("-")]
    if not named:
        raise ConfigError(f"python_env={list(packages)!r} names no package: {_MUST_BE}")
    more = len(named) - _MAX_NAMED
    return Packages(", ".join(named[:_MAX_NAMED]) + (f" and {more} more" * (more > 0)), lines)


def _recipe_for_path(text: str | bytes) -> Recipe:
    if not isinstance(text, str) or not text:
        raise ConfigError(f"python_env={text!r}: {_MUST_BE}")
    path = Path(text).expanduser()
    if path.is_dir():
        return _recipe_for_directory(text, path)
    if path.is_file():
        return _recipe_for_file(text, path)
    if "/" not in text and _NAME.fullmatch(text) and not text.endswith((".txt", *SUFFIXES)):
        return CondaEnvironment(text)
    if packages := _packages_in(text):
        return _packages_of(packages)
    raise ConfigError(f"python_env={text!r}: there is no such file or directory: {_MUST_BE}")


def _packages_in(text: str) -> list[str]:
    """Return the packages in a comma-separated list, with or without versions; else nothing."""
    parts = [part.strip() for part in _SEPARATOR.split(text)]
    matches = [_PACKAGE.fullmatch(part) for part in parts]
    if any(match is None or match["name"].endswith((".txt", *SUFFIXES)) for match in matches):
        return []
    return parts


def _recipe_for_directory(name: str, path: Path) -> Recipe:
    path = path.resolve()
    if (path / "conda-meta").is_dir():
        _check_python(name, {file.name for file in path.glob("bin/python3.*")})
        return CondaEnvironment(name, path)
    if not (path / "pyvenv.cfg").is_file():
        return ModuleDirectory(name, path)
    packages = sorted(path.glob("lib/python3.*/site-packages"))
    _check_python(name, {directory.parent.name for directory in packages})
    return ModuleDirectory(name, path / "lib" / _PYTHON / "site-packages")


def _check_python(name: str, pythons: set[str]) -> None:
    if _PYTHON not in pythons:
        versions = ", ".join(sorted(python for python in pythons if _VERSION.fullmatch(python)))
        raise other_python(
            f"python_env={name!r}", versions or "no Python", _PYTHON.removeprefix("python")
        )


def _recipe_for_file(name: str, path: Path) -> Recipe:
    path = path.resolve()
    if path.name.endswith(SUFFIXES):
        return PackedArchive(name, path)
    if path.suffix == ".txt":
        lines = read_lines(path)
        if not lines:
            raise ConfigError(f"python_env={name!r}: the file names no package")
        return Packages(name, lines, path)
    if path.suffix == ".whl":
        return _packages_of([name])
    if path.suffix in (".yml", ".yaml"):
        raise ConfigError(
            f"python_env={name!r}: create the environment first (conda env create --file {name}),"
            " and pass its name"
        )
    raise ConfigError(f"python_env={name!r}: {_MUST_BE}")
