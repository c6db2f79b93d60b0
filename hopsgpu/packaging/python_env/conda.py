"""A conda environment, which conda-pack makes relocatable."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env import commands
from hopsgpu.packaging.python_env.inspection import DriverPython
from hopsgpu.packaging.python_env.packing import ARCHIVE, digest_of, files_of
from hopsgpu.packaging.python_env.recipes import Recipe

_PROGRAMS = ("conda", "mamba", "micromamba")
# Caches, and other environments inside the base environment.
_EXCLUDED_DIRECTORIES = ("pkgs", "envs")


@dataclass(frozen=True)
class CondaEnvironment(Recipe):
    """A conda environment, which has its own interpreter.

    Attributes:
        prefix: its directory; None to ask conda for the environment `name`.
    """

    prefix: Path | None = None

    def key(self, driver: DriverPython, stop: threading.Event) -> str:
        files = files_of(self._prefix(stop))
        kept = {n: f for n, f in files.items() if n.partition("/")[0] not in _EXCLUDED_DIRECTORIES}
        return digest_of(kept, stop)

    def make_archive(self, directory: Path, stop: threading.Event) -> Path:
        if importlib.util.find_spec("conda_pack") is None:
            raise ConfigError(
                f"python_env={self.name}: hopsgpu packs a conda environment with conda-pack, which"
                " is not installed here: pip install 'hopsgpu[conda]', or pack it with `conda pack`"
                " and pass the archive"
            )
        prefix, target = self._prefix(stop), directory / ARCHIVE
        what = f"python_env={self.name}: conda-pack"
        command = [sys.executable, "-P", "-m", "conda_pack.cli", "--quiet", "--prefix", str(prefix)]
        commands.run([*command, "--output", str(target), "--compress-level", "1"], what, stop)
        return target

    def _prefix(self, stop: threading.Event) -> Path:
        return self.prefix if self.prefix is not None else prefix_of(self.name, stop)


def conda_program() -> str | None:
    named = os.environ.get("CONDA_EXE") or os.environ.get("MAMBA_EXE")
    return named or next(filter(None, map(shutil.which, _PROGRAMS)), None)


def prefix_of(name: str, stop: threading.Event) -> Path:
    """Return the directory of a conda environment.

    Raises:
        ConfigError: there is no conda, its answer is not JSON, or it has no environment of that
            name.
        Cancelled: `stop` was set.
    """
    program = conda_program()
    if program is None:
        raise ConfigError(
            f"python_env={name!r}: there is no such file or directory, and no conda ("
            f"{', '.join(_PROGRAMS)}) on the PATH to ask for an environment of that name."
            f" {_package_advice(name)}"
        )
    output = commands.run([program, "env", "list", "--json"], f"{program} env list", stop)
    try:
        # conda may write warnings before the JSON.
        prefixes = [Path(p) for p in json.loads(output[output.index("{") :])["envs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{program} env list --json did not write JSON: {error}") from error
    for prefix in prefixes:
        if prefix.name == name or (name == "base" and prefix == prefixes[0]):
            return prefix
    names = ", ".join(sorted(prefix.name for prefix in prefixes)) or "none"
    raise ConfigError(
        f"python_env={name!r}: there is no such file or directory, and conda has no environment of"
        f" that name (it has {names}). {_package_advice(name)}"
    )


def _package_advice(name: str) -> str:
    return (
        f"To name a package, pass a list, python_env=[{name!r}], or a text with a version,"
        f" --python-env '{name}>=0'"
    )
