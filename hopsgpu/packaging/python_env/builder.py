"""The step from what a user gives to an environment on the lake, which is built only once."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import logging
import platform
import sys
import tempfile
import threading
import time
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
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# What a launch wants; the environment of a held gang is on the lake already.
RequestedEnv = Recipe | StoredArchive | PythonEnv


def ensure_built(wanted: RequestedEnv, root: LakePath, stop: threading.Event) -> PythonEnv:
    """Return an environment on the lake; build it if it is not there.

    Args:
        wanted: how to build it, or where it is.
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
        return _stored(wanted)
    return _built(wanted, root, stop)


def put_on_lake(python_env: object, root: LakePath, stop: threading.Event) -> str:
    """Put an environment on the lake before there is a driver; return its URL.

    As the property `spark.hopsgpu.python_env`, the URL sets the environment of those launches of
    the application that name none.

    Args:
        python_env: as for a launch.
        root: root of the lake.
        stop: is set when the environment is no longer wanted.

    Raises:
        ConfigError, StoreError, Cancelled: as in `ensure_built`; ConfigError also if `python_env`
            is of no accepted kind.
    """
    return ensure_built(recipe_for(python_env), root, stop).url.rpartition("/")[0]


def url_on_lake(python_env: object, root: LakePath, stop: threading.Event) -> str:
    """Return the URL that `put_on_lake` would return; make nothing, and do not ask the lake.

    Args:
        python_env: as for a launch.
        root: root of the lake.
        stop: is set when the environment is no longer wanted.

    Raises:
        ConfigError: `python_env` is of no accepted kind, or what it consists of cannot be read.
        Cancelled: `stop` was set.
    """
    wanted = recipe_for(python_env)
    if isinstance(wanted, StoredArchive):
        return f"{wanted.root}/{python_environments.DIRECTORY}/{wanted.key}"
    return (root / python_environments.DIRECTORY / wanted.key(driver_python(), stop)).url


def warnings_of(wanted: RequestedEnv | None) -> tuple[str, ...]:
    """Return warnings for the user about an environment that is to be built."""
    if wanted is None or isinstance(wanted, PythonEnv):
        return ()
    return wanted.warnings()


def _stored(wanted: StoredArchive) -> PythonEnv:
    root = LakePath(wanted.root)
    description = python_environments.find(root, wanted.key)
    if description is None:
        raise ConfigError(
            f"python_env={wanted.name!r}: there is no such environment (hopsgpu removes an"
            " environment that has not been used for a month): pass what it was built from"
        )
    env, driver = _read(description, root, wanted.key), driver_python()
    if env.python not in (None, driver.python):
        raise other_python(f"python_env={wanted.name}", f"Python {env.python}", driver.python)
    log.info("Python environment %s: reused from its URL, %d bytes", wanted.key, env.bytes)
    return env


def _built(recipe: Recipe, root: LakePath, stop: threading.Event) -> PythonEnv:
    driver, began = driver_python(), time.monotonic()
    key = recipe.key(driver, stop)
    description = python_environments.find(root, key)
    if description is None:
        log.info("Python environment %s (%s): built, as the lake has none", key, recipe.name)
        with tempfile.TemporaryDirectory(prefix="hopsgpu-environment-") as directory:
            archive = recipe.archive(Path(directory), stop)
            size, built = archive.stat().st_size, time.monotonic() - began
            log.info("Python environment %s: built in %.1f s, %d bytes", key, built, size)
            description = _put(recipe.name, archive, driver, root, key, stop)
    else:
        log.info(
            "Python environment %s (%s): reused, as what it is built from has not changed; %d"
            " bytes, looked up in %.1f s",
            key,
            recipe.name,
            description["bytes"],
            time.monotonic() - began,
        )
    return dataclasses.replace(_read(description, root, key), name=recipe.name)


def _put(
    name: str, archive: Path, driver: DriverPython, root: LakePath, key: str, stop: threading.Event
) -> python_environments.Description:
    contents = inspect_archive(entries(archive, is_peeked), f"python_env={name}", driver)
    described = {
        **dataclasses.asdict(contents),
        "name": name,
        "digest": digest_of_file(archive, stop),
        "bytes": archive.stat().st_size,
    }
    return python_environments.put(root, key, archive, described, stop)


def _read(description: python_environments.Description, root: LakePath, key: str) -> PythonEnv:
    url = python_environments.archive_of(root, key, description).url
    fields = {name: value for name, value in description.items() if name in _FIELDS}
    try:
        return PythonEnv.from_fields({**fields, "url": url})
    except TypeError as error:
        raise ConfigError(
            f"another version of hopsgpu described {url} ({error}): remove its directory, and"
            " hopsgpu builds it again"
        ) from error


_FIELDS = frozenset(field.name for field in dataclasses.fields(PythonEnv)) - {"url"}


def driver_python() -> DriverPython:
    """Return the driver's Python."""
    major, minor = sys.version_info[:2]
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return DriverPython(f"{major}.{minor}", platform.machine(), suffixes)
