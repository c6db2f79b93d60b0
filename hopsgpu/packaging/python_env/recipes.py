"""The ways to build an environment; each has a key that identifies the result."""

from __future__ import annotations

import abc
import hashlib
import importlib.util
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.artifacts.python_environments import DIRECTORY
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env import commands, requirements
from hopsgpu.packaging.python_env.environment import DRIVER_PACKAGES
from hopsgpu.packaging.python_env.inspection import DriverPython
from hopsgpu.packaging.python_env.packing import ARCHIVE, digest_of, digest_of_file, files_of, pack
from hopsgpu.storage.lake import LakePath


@dataclass(frozen=True)
class Recipe(abc.ABC):
    """A way to build an environment; `name` is the user's name for it."""

    name: str

    @abc.abstractmethod
    def key(self, driver: DriverPython, stop: threading.Event) -> str:
        """Return a digest of the environment's sources; equal inputs give equal keys.

        Raises:
            ConfigError: an input cannot be read.
            Cancelled: `stop` was set.
        """

    @abc.abstractmethod
    def make_archive(self, directory: Path, stop: threading.Event) -> Path:
        """Make the archive; return its path. `directory` is empty, for files of this call.

        Raises:
            ConfigError: the archive cannot be made.
            Cancelled: `stop` was set.
        """

    def warnings(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Packages(Recipe):
    """Packages that pip installs into a directory, for the driver's minor version and platform.

    Attributes:
        file: the requirements file that has the lines, or None.
    """

    lines: tuple[str, ...]
    file: Path | None = None

    def key(self, driver: DriverPython, stop: threading.Event) -> str:
        base = Path.cwd() if self.file is None else self.file.resolve().parent
        recipe = requirements.pip_inputs(self.lines, base, os.environ, stop)
        return _key("packages", driver.python, driver.machine, *recipe)

    def make_archive(self, directory: Path, stop: threading.Event) -> Path:
        if importlib.util.find_spec("pip") is None:
            raise ConfigError(
                f"python_env={self.name}: {sys.executable} has no pip to install packages with:"
                " run `python -m ensurepip`, or pass a directory or an archive"
            )
        requirements_file, target = self.file, directory / "packages"
        if requirements_file is None:
            # A line may contain a password, which must not be on a command line.
            requirements_file = directory / "requirements.txt"
            requirements_file.touch(mode=0o600)
            requirements_file.write_text("\n".join(self.lines) + "\n")
        command = [sys.executable, "-P", "-m", "pip", "install", "--target", str(target)]
        command += requirements.PIP_OPTIONS
        what = f"python_env={self.name}: pip install"
        variables = requirements.pip_variables(os.environ)
        commands.run([*command, "--requirement", str(requirements_file)], what, stop, variables)
        return _pack_directory(target, directory / ARCHIVE, self.name, stop)


@dataclass(frozen=True)
class ModuleDirectory(Recipe):
    """A directory of modules, or the site-packages of a virtual environment."""

    root: Path

    def key(self, driver: DriverPython, stop: threading.Event) -> str:
        return _key("directory", digest_of(files_of(self.root), stop))

    def make_archive(self, directory: Path, stop: threading.Event) -> Path:
        return _pack_directory(self.root, directory / ARCHIVE, self.name, stop)

    def warnings(self) -> tuple[str, ...]:
        editable = sorted(
            {f.name for f in self.root.glob("__editable__*.pth")}
            | {f.name for f in self.root.glob("*.egg-link")}
        )
        if not editable:
            return ()
        return (
            f"python_env={self.name}: ranks cannot import the packages that are installed there as"
            f" editable, because these stay in their directories: {', '.join(editable)}",
        )


@dataclass(frozen=True)
class PackedArchive(Recipe):
    """An archive of the user's, made by conda-pack, venv-pack, tar or zip."""

    file: Path

    def key(self, driver: DriverPython, stop: threading.Event) -> str:
        return _key("archive", digest_of_file(self.file, stop), driver.python, driver.machine)

    def make_archive(self, directory: Path, stop: threading.Event) -> Path:
        return self.file


@dataclass(frozen=True)
class StoredArchive:
    """An environment that is on the lake already, for example by `hopsgpu submit --python-env`.

    Attributes:
        name: its URL, as the user passed it.
        root: URL of the lake's root.
        key: its name on the lake.
    """

    name: str
    root: str
    key: str


def stored_archive_at(url: str) -> StoredArchive:
    """Return the environment at a URL; raise ConfigError if no environment has such a URL."""
    root, directory, key = url.rstrip("/").rpartition(f"/{DIRECTORY}/")
    if not directory or "/" in key or not key:
        raise ConfigError(
            f"python_env={url!r}: a URL must be <root>/{DIRECTORY}/<key>, of an environment that"
            " hopsgpu has built; download an archive from elsewhere, and pass its path"
        )
    return StoredArchive(url, LakePath(f"{root}/").url, key)


def _pack_directory(root: Path, archive: Path, name: str, stop: threading.Event) -> Path:
    files = files_of(root)
    if not files:
        raise ConfigError(
            f"python_env={name}: it contains nothing for ranks to import"
            f" (hopsgpu sends {' and '.join(DRIVER_PACKAGES)} to the ranks anyway)"
        )
    pack(files, archive, stop)
    return archive


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
