"""From what a user gave to an environment on the lake: made once, and found there afterwards."""

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
from hopsgpu.packaging.python_env.inspection import Here, is_peeked, look, other_python
from hopsgpu.packaging.python_env.kinds import wanted_of
from hopsgpu.packaging.python_env.packing import digest_of_file
from hopsgpu.packaging.python_env.recipes import OnLake, Recipe
from hopsgpu.storage.lake import Lake

# What a launch wants; of a gang that is held the environment is there already.
Wanted = Recipe | OnLake | PythonEnv


def ready(wanted: Wanted, root: Lake, stop: threading.Event) -> PythonEnv:
    """An environment on the lake; made, if it is not there.

    Args:
        wanted: how it is made, or where it is.
        root: of the lake, where runs and models go too.
        stop: set when it is no longer wanted.

    Raises:
        ConfigError: it cannot be made, or ranks could not run with it.
        StoreError: the lake refused.
        Cancelled: `stop` was set.
    """
    if isinstance(wanted, PythonEnv):
        return wanted
    if isinstance(wanted, OnLake):
        return _there(wanted)
    return _made(wanted, root, stop)


def put_on_lake(given: object, root: Lake, stop: threading.Event) -> str:
    """Has an environment on the lake before there is a driver; its URL.

    As the property `spark.hopsgpu.python_env` that is the environment of the application's launches
    that name none.

    Args:
        given: as `python_env=`.
        root: of the lake.
        stop: set when it is no longer wanted.

    Raises:
        ConfigError, StoreError, Cancelled: as `ready`, and where it is nothing that is accepted.
    """
    return ready(wanted_of(given), root, stop).url.rpartition("/")[0]


def url_on_lake(given: object, root: Lake, stop: threading.Event) -> str:
    """The URL that `put_on_lake` would give; nothing is made, and the lake is not asked.

    Args:
        given: as `python_env=`.
        root: of the lake.
        stop: set when it is no longer wanted.

    Raises:
        ConfigError: it is nothing that is accepted, or what it is made of cannot be read.
        Cancelled: `stop` was set.
    """
    wanted = wanted_of(given)
    if isinstance(wanted, OnLake):
        return f"{wanted.root}/{python_environments.DIRECTORY}/{wanted.key}"
    return (root / python_environments.DIRECTORY / wanted.key(this_python(), stop)).url


def warnings_of(wanted: Wanted | None) -> tuple[str, ...]:
    """What a person should know of an environment that is to be made."""
    if wanted is None or isinstance(wanted, PythonEnv):
        return ()
    return wanted.warnings()


def _there(wanted: OnLake) -> PythonEnv:
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
    name: str, archive: Path, here: Here, root: Lake, key: str, stop: threading.Event
) -> python_environments.Description:
    held = look(entries(archive, is_peeked), f"python_env={name}", here)
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


def this_python() -> Here:
    """The driver's Python."""
    major, minor = sys.version_info[:2]
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return Here(f"{major}.{minor}", platform.machine(), suffixes)
