"""What the driver adds to a run's record, and the writing of the record."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.artifacts.runs import RECORD
from hopsgpu.core.run_record import (
    CallRecord,
    DataRecord,
    EnvironmentRecord,
    RunRecord,
    ScoreRecord,
    SearchRecord,
    encode,
)
from hopsgpu.core.version import __version__
from hopsgpu.errors import StoreError
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.storage.lake import LakePath

if TYPE_CHECKING:
    from hopsgpu.backends.gang_application import GangApplication

log = logging.getLogger(__name__)

# A repository on a slow file system must not delay the record for long.
_GIT_SECONDS = 3.0
# The monitor of files is a program that the repository may name.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2")
_COMMIT = "# branch.oid "


@dataclass(frozen=True)
class RunDetails:
    """The part of a run's record that only the run itself knows.

    Attributes:
        call: the function and its arguments; None for a held gang.
        data: the data that the ranks read, by name; None without data.
        python_env: the Python environment of the ranks, once it is on the lake; or None.
    """

    call: CallRecord | None = None
    data: Mapping[str, DataRecord] | None = None
    python_env: PythonEnv | None = None
    search: SearchRecord | None = None
    score: ScoreRecord | None = None


def environment(application: GangApplication) -> EnvironmentRecord:
    """Return the environment in which a run was started: the driver's host, versions, packages.

    The first call in a process reads the metadata of all installed packages, which takes some
    hundred milliseconds, and asks the JVM. Each call starts Git, for at most 3 s.
    """
    commit, has_changes = _git_state()
    return EnvironmentRecord(
        hopsgpu=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        spark=application.versions.get("spark", ""),
        hadoop=application.versions.get("hadoop", ""),
        driver={"host": socket.gethostname(), "system": platform.platform(), **_own_container()},
        packages=packages(),
        commit=commit,
        has_changes=has_changes,
    )


def _own_container() -> dict[str, str]:
    """Return the id of this process's YARN container as "container"; nothing outside of one."""
    container = os.environ.get("CONTAINER_ID")
    return {} if container is None else {"container": container}


def _git_state() -> tuple[str, bool]:
    """Return the commit of the working directory ("" for none), and whether files differ."""
    command = [*_GIT, "--branch", "--untracked-files=no", "--ignore-submodules=dirty"]
    try:
        git = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("Git does not know the working directory's commit: %s", error)
        return "", False
    lines = git.stdout.splitlines()
    commits = [line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)]
    # Before its first commit, a repository has "(initial)".
    commit = next((text for text in commits if text.isalnum()), "")
    return commit, any(not line.startswith("#") for line in lines)


@functools.cache
def packages() -> dict[str, str]:
    """Return the versions of the packages that are installed at the driver, by name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # An incompletely removed package has no name.
        name = distribution.metadata["Name"] if distribution.metadata is not None else None
        if name is not None:
            # Python imports the first of several distributions with one name.
            versions.setdefault(name, distribution.version)
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def write(directory: LakePath, record: RunRecord) -> None:
    """Write a record into a run's directory; a concurrent reader gets the previous record.

    Raises:
        StoreError: the lake refused.
    """
    try:
        (directory / RECORD).replace(encode(record))
    except StoreError as error:
        raise StoreError(f"the run's record was not written to the lake: {error}") from error
