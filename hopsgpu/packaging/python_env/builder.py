"""Puts the environment that a user requests on the lake; each environment is built once."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

from hopsgpu.artifacts import python_environments
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.archives import read_entries
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.inspection import (
    DriverPython,
    inspect_archive,
    other_python,
    should_peek,
)
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.python_env.packing import digest_of_file
from hopsgpu.packaging.python_env.recipes import Recipe, StoredArchive
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.identity import hadoop_user, own_name
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# A PythonEnv is on the lake already, as that of a held gang.
RequestedEnv = Recipe | StoredArchive | PythonEnv


def ensure_built(requested: RequestedEnv, root: LakePath, stop: threading.Event) -> PythonEnv:
    """Return an environment on the lake; build and upload it if it does not exist.

    Raises:
        ConfigError: it cannot be built, or ranks could not run with it.
        StoreError: the lake refuses.
        Cancelled: `stop` was set.
    """
    if isinstance(requested, PythonEnv):
        return requested
    if isinstance(requested, StoredArchive):
        return _find_stored(requested)
    return _find_or_build(requested, root, stop)


def put_on_lake(python_env: object, root: LakePath, stop: threading.Event) -> str:
    """Put an environment on the lake before the driver starts; return its URL.

    With the property `spark.hopsgpu.python_env` set to the URL, launches without `python_env=` use
    the environment.

    Raises:
        ConfigError, StoreError, Cancelled: as in `ensure_built` and `recipe_for`.
    """
    return ensure_built(recipe_for(python_env), root, stop).url.rpartition("/")[0]


def url_on_lake(python_env: object, root: LakePath, stop: threading.Event) -> str:
    """Return the URL that `put_on_lake` would return, without access to the lake.

    Raises:
        ConfigError, Cancelled: as in `recipe_for` and `Recipe.key`.
    """
    requested = recipe_for(python_env)
    if isinstance(requested, StoredArchive):
        return f"{requested.root}/{python_environments.DIRECTORY}/{requested.key}"
    return (root / python_environments.DIRECTORY / _key(requested, root, stop)).url


def warnings_of(requested: RequestedEnv | None) -> tuple[str, ...]:
    return requested.warnings() if isinstance(requested, Recipe) else ()


def _find_stored(requested: StoredArchive) -> PythonEnv:
    root = LakePath(requested.root)
    description = python_environments.find(root, requested.key)
    if description is None:
        raise ConfigError(
            f"python_env={requested.name!r}: there is no such environment (hopsgpu removes an"
            " environment that has not been used for a month): pass what it was built from"
        )
    env, driver = _as_python_env(description, root, requested.key), driver_python()
    if env.python not in (None, driver.python):
        raise other_python(f"python_env={requested.name}", f"Python {env.python}", driver.python)
    log.info("Python environment %s: reused from its URL, %d bytes", requested.key, env.bytes)
    return env


def _find_or_build(recipe: Recipe, root: LakePath, stop: threading.Event) -> PythonEnv:
    driver, began = driver_python(), time.monotonic()
    key = _key(recipe, root, stop)
    description = python_environments.find(root, key)
    if description is None:
        log.info("Python environment %s (%s): built, as the lake has none", key, recipe.name)
        with tempfile.TemporaryDirectory(prefix="hopsgpu-environment-") as directory:
            archive = recipe.make_archive(Path(directory), stop)
            size, built = archive.stat().st_size, time.monotonic() - began
            log.info("Python environment %s: built in %.1f s, %d bytes", key, built, size)
            description = _upload(recipe.name, archive, driver, root, key, stop)
    else:
        log.info(
            "Python environment %s (%s): reused, as what it is built from has not changed; %d"
            " bytes, looked up in %.1f s",
            key,
            recipe.name,
            description["bytes"],
            time.monotonic() - began,
        )
    return dataclasses.replace(_as_python_env(description, root, key), name=recipe.name)


def _key(recipe: Recipe, root: LakePath, stop: threading.Event) -> str:
    return owned_key(root, recipe.key(driver_python(), stop))


def owned_key(root: LakePath, content: str) -> str:
    """Return the name on the lake of an archive; each user of a shared root has others.

    An archive of another user is refused, so that equal names would be of no use.

    Args:
        content: digest of what the archive is made from.
    """
    user = (
        own_name()
        if root.is_local
        else hadoop_user(HadoopConf.load_hdfs(os.environ).get, os.environ)
    )
    return hashlib.sha256(json.dumps([user, content]).encode()).hexdigest()


def _upload(
    name: str, archive: Path, driver: DriverPython, root: LakePath, key: str, stop: threading.Event
) -> python_environments.Description:
    contents = inspect_archive(read_entries(archive, should_peek), f"python_env={name}", driver)
    fields = {
        **dataclasses.asdict(contents),
        "name": name,
        "digest": digest_of_file(archive, stop),
        "bytes": archive.stat().st_size,
    }
    return python_environments.upload(root, key, archive, fields, stop)


def _as_python_env(
    description: python_environments.Description, root: LakePath, key: str
) -> PythonEnv:
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
    major, minor = sys.version_info[:2]
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return DriverPython(f"{major}.{minor}", platform.machine(), suffixes)
