"""A program that downloads, checks and unpacks an environment once for all containers of a node.

The process daemon of a container starts it as
`python -m hopsgpu.packaging.python_env.unpacker DAEMON_PID`, with JSON on its standard input: the
environment's fields, the directories that it may be in, and the file for the answer ({"home": ...},
or {"problem": ..., "configured": whether the environment is to blame}).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hopsgpu import linux
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.packaging.python_env import archives
from hopsgpu.packaging.python_env.environment import DRIVER_PACKAGES, PythonEnv
from hopsgpu.storage.error_messages import DAMAGED
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.node_copies import ensure_copy

_CONDA_UNPACK = "bin/conda-unpack"
_RUN_SECONDS = 300.0
_MAX_CHARACTERS = 1000


def ensure_unpacked(env: PythonEnv, places: Sequence[Path]) -> Path:
    """Return the directory with the whole environment; download and unpack it if there is none.

    One of `places`, directories on different disks, is chosen; the first has the lock.

    Raises:
        ConfigError: the environment cannot run here, or is not an archive.
        StoreError: the archive is missing on the lake, or has changed there.
        OSError: the directory cannot be written.
    """

    def fill(home: Path) -> None:
        if env.machine not in (None, platform.machine()):
            raise ConfigError(
                f"python_env={env.name} is compiled for {env.machine}, and this node is"
                f" {platform.machine()}: build it on a machine like the nodes"
            )
        with _downloaded_archive(env, home.parent) as archive:
            archives.unpack(archive, env.below, home, DRIVER_PACKAGES)
        if env.interpreter is not None:
            _relocate(env, home)

    return ensure_copy(places, env.digest, fill)


@contextlib.contextmanager
def _downloaded_archive(env: PythonEnv, place: Path) -> Iterator[Path]:
    """Download the archive and check its digest; remove the file at the end."""
    archive = place / f"{env.digest}-{env.url.rpartition('/')[2]}"
    try:
        LakePath(env.url).download(archive)
        with archive.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != env.digest:
            raise StoreError(
                f"{env.url} has changed: SHA-256 mismatch: expected {env.digest}, found"
                f" {digest}: remove its directory, and hopsgpu builds it again",
                DAMAGED,
            )
        yield archive
    finally:
        archive.unlink(missing_ok=True)


def _relocate(env: PythonEnv, home: Path) -> None:
    """Fix the paths in an environment; raise ConfigError if its interpreter does not run here."""
    assert env.interpreter is not None, "only an environment with an interpreter is relocated"
    python = str(home / env.interpreter)
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    version_text = _run_python([python, "-I", "-c", version], env)
    if version_text.strip() != env.python:
        raise ConfigError(
            f"python_env={env.name} is Python {version_text.strip()}, not {env.python}"
        )
    if (home / _CONDA_UNPACK).exists():
        # conda-unpack replaces the environment's old prefix by the new one.
        _run_python([python, str(home / _CONDA_UNPACK)], env)


def _run_python(command: list[str], env: PythonEnv) -> str:
    variables = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            env=variables,
            timeout=_RUN_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"the Python of python_env={env.name} does not run on this node: {error}"
        ) from error
    if process.returncode:
        raise ConfigError(
            f"the Python of python_env={env.name} does not run on this node (exit code"
            f" {process.returncode}): {process.stderr.strip()[-_MAX_CHARACTERS:]}"
        )
    return process.stdout


def main(daemon: int) -> None:
    linux.die_with(daemon)
    request = json.load(sys.stdin)
    try:
        env = PythonEnv.from_fields(request["env"])
        answer: dict[str, object] = {
            "home": str(ensure_unpacked(env, [Path(place) for place in request["places"]]))
        }
    except (HopsGpuError, OSError) as error:
        answer = {
            "problem": str(error) or repr(error),
            "configured": isinstance(error, ConfigError),
        }
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
