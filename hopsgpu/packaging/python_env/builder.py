"""The step from what a user gives to an environment on the lake, which is made only once."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import platform
import sys
import tempfile
import threading
from pathlib import Path

from hopsgpu.artifacts import python_environments
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.archives import entries
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.inspection import (
    DriverPython,
    inspect_archive,
    is_peeked,
    other_python,
)
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.python_env.packing import digest_of_file
from hopsgpu.packaging.python_env.recipes import Recipe, StoredArchive
from hopsgpu.storage.lake import Lake

# What a launch wants; the environment of a held gang is on the lake already.
Wanted = Recipe | StoredArchive | PythonEnv


def ready(wanted: Wanted, root: Lake, stop: threading.Event) -> PythonEnv:
    """Return an environment on the lake; make it if it is not there.

    Args:
        wanted: how to make it, or where it is.
        root: root of the lake, which runs and models share.
        stop: is set when the environment is no longer wanted.

    Raises:
        ConfigError: it cannot be made, or ranks could not run with it.
        StoreError: the lake refuses.
        Cancelled: `stop` was set.
    """
    if isinstance(wanted, PythonEnv):
        return wanted
    if isinstance(wanted, StoredArchive):
        return _there(wanted)
    return _made(wanted, root, stop)


def put_on_lake(given: object, root: Lake, stop: threading.Event) -> str:
    """Put an environment on the lake before there is a driver; return its URL.

    As the property `spark.hopsgpu.python_env`, the URL sets the environment of those launches of
    the application that name none.

    Args:
        given: the same as `python_env=`.
        root: root of the lake.
        stop: is set when the environment is no longer wanted.

    Raises:
        ConfigError, StoreError, Cancelled: as in `ready`; ConfigError also if `given` is of no kind
            that is accepted.
    """
    return ready(recipe_for(given), root, stop).url.rpartition("/")[0]


def url_on_lake(given: object, root: Lake, stop: threading.Event) -> str:
    """Return the URL that `put_on_lake` would return; make nothing, and do not ask the lake.

    Args:
        given: the same as `python_env=`.
        root: root of the lake.
        stop: is set when the environment is no longer wanted.

    Raises:
        ConfigError: `given` is of no kind that is accepted, or what it consists of cannot be read.
        Cancelled: `stop` was set.
    """
    wanted = recipe_for(given)
    if isinstance(wanted, StoredArchive):
        return f"{wanted.root}/{python_environments.DIRECTORY}/{wanted.key}"
    return (root / python_environments.DIRECTORY / wanted.key(this_python(), stop)).url


def warnings_of(wanted: Wanted | None) -> tuple[str, ...]:
    """Return warnings for the user about an environment that is to be made."""
    if wanted is None or isinstance(wanted, PythonEnv):
        return ()
    return wanted.warnings()


def _there(wanted: StoredArchive) -> PythonEnv:
    root = Lake(wanted.root)
    found = python_environments.find(root, wanted.key)
    if found is None:
        raise ConfigError(
            f"python_env={wanted.name!r}: there is no such environment (those that nobody has used"
            " for a month are removed): give what it was made of"
        )
    env, here = _read(found, root, wanted.key), this_python()
    if env.python not in (None, here.python):
        raise other_python(f"python_env={wanted.name}", f"Python {env.python}", here.python)
    return env


def _made(recipe: Recipe, root: Lake, stop: threading.Event) -> PythonEnv:
    here = this_python()
    key = recipe.key(here, stop)
    found = python_environments.find(root, key)
    if found is None:
        with tempfile.TemporaryDirectory(prefix="hopsgpu-environment-") as directory:
            archive = recipe.archive(Path(directory), stop)
            found = _put(recipe.name, archive, here, root, key, stop)
    return dataclasses.replace(_read(found, root, key), name=recipe.name)


def _put(
    name: str, archive: Path, here: DriverPython, root: Lake, key: str, stop: threading.Event
) -> python_environments.Description:
    held = inspect_archive(entries(archive, is_peeked), f"python_env={name}", here)
    described = {
        **dataclasses.asdict(held),
        "name": name,
        "digest": digest_of_file(archive, stop),
        "bytes": archive.stat().st_size,
    }
    return python_environments.put(root, key, archive, described, stop)


def _read(found: python_environments.Description, root: Lake, key: str) -> PythonEnv:
    url = python_environments.archive_of(root, key, found).url
    fields = {name: value for name, value in found.items() if name in _FIELDS}
    try:
        return PythonEnv.from_fields({**fields, "url": url})
    except TypeError as error:
        raise ConfigError(
            f"{url} was described by another version of hopsgpu ({error}): remove its directory,"
            " and it is made anew"
        ) from error


_FIELDS = frozenset(field.name for field in dataclasses.fields(PythonEnv)) - {"url"}


def this_python() -> DriverPython:
    """Return the driver's Python."""
    major, minor = sys.version_info[:2]
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return DriverPython(f"{major}.{minor}", platform.machine(), suffixes)
