"""The first step of a task: outside of YARN, it makes of the executor what YARN provides.

YARN starts an executor in a container of its own, with variables that name it, and removes its
directory at its end. It runs the discovery script before the first task. A standalone worker starts
an executor in a directory that stays, and assigns GPUs to it that another worker of the machine may
assign, too. `enter_container` sets the same variables, provides a directory that goes with the
executor, and leases the assigned GPUs. A pod of Kubernetes goes with its directory, but a variable
CONTAINER_ID would make Spark's executor expect YARN's directories; so it is set here, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hopsgpu.agent.rank_environment import package_path
from hopsgpu.core.bounded_reads import read_file
from hopsgpu.core.container_ids import (
    NAMESPACE,
    NODE,
    POD,
    pod_container,
    standalone_container,
)
from hopsgpu.core.own_log import CONTAINER_LOGS
from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS
from hopsgpu.linux import ancestor
from hopsgpu.storage.node_copies import LOCAL_DIRS

log = logging.getLogger(__name__)

CONTAINER, HOST = "CONTAINER_ID", "NM_HOST"
# Names the directory that the process daemon removes at its end.
SCRATCH = "HOPSGPU_SCRATCH"
# The archive with the driver's configuration of HDFS.
HADOOP_CONF = "__hopsgpu_hadoop_conf__"
# Where Spark puts the driver's configuration of Hadoop on YARN.
_SHIPPED_CONF = Path("__spark_conf__/__hadoop_conf__")
# The directory of the ranks, below the executor's.
_RANKS = Path("hopsgpu")
# The options of the executor's program (org.apache.spark.executor.CoarseGrainedExecutorBackend).
_OPTIONS = ("--executor-id", "--hostname", "--app-id")
# The waits of the discovery script for the driver's answer and for leases are shorter.
_CLAIM_SECONDS = 180.0


def enter_container(addresses: Sequence[str]) -> None:
    """Prepare the executor of this task; do nothing if YARN has prepared it.

    Args:
        addresses: the GPUs that Spark assigned to the task.
    """
    is_in_pod = bool(os.environ.get(POD))
    if is_in_pod:
        os.environ.update(variables_of_pod(os.environ))
    elif not os.environ.get(CONTAINER):
        jvm = ancestor("java")
        if jvm is None:
            return
        line = read_file(Path(f"/proc/{jvm}/cmdline"))
        arguments = line.decode(errors="replace").split("\0")
        os.environ.update(variables_of(arguments, os.environ, Path.cwd()))
    scratch = os.environ.get(SCRATCH)
    if scratch:
        # The agent of an earlier task may have removed it.
        _link_scratch(Path.cwd(), Path(scratch))
    if scratch or is_in_pod:
        _link_hadoop_conf(Path.cwd())
        if addresses and not Path(CONTAINER_GPUS).exists():
            _claim(addresses)


def variables_of(
    arguments: Sequence[str], environ: Mapping[str, str], directory: Path
) -> dict[str, str]:
    """Return the variables that describe an executor of a standalone worker as a container.

    Args:
        arguments: the command line of the executor's JVM.
        environ: its environment. The worker removes the directories that it names at the end of
            the application.
        directory: the executor's working directory, which has its log.
    """
    values = dict(zip(arguments, arguments[1:], strict=False))
    executor, host, application = (values[option] for option in _OPTIONS)
    local = environ.get("SPARK_EXECUTOR_DIRS", "").split(os.pathsep)
    shared = [part for part in local if part] or [str(directory)]
    return {
        CONTAINER: standalone_container(application, int(re.sub(r"\D", "", executor))),
        HOST: host,
        LOCAL_DIRS: ",".join(shared),
        CONTAINER_LOGS: str(directory),
        SCRATCH: str(Path(shared[0], f"hopsgpu-executor-{executor}")),
    }


def variables_of_pod(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that describe an executor's pod as a container."""
    local = environ.get("SPARK_LOCAL_DIRS", "")
    return {
        CONTAINER: pod_container(environ.get(NAMESPACE, ""), environ[POD]),
        HOST: environ.get(NODE, ""),
        **({LOCAL_DIRS: local} if local else {}),
    }


def container_directory(environ: Mapping[str, str]) -> Path:
    """Return the working directory of the executor, by its variables.

    YARN's launch script sets PWD. A standalone worker passes its own PWD on.
    """
    name = CONTAINER_LOGS if environ.get(SCRATCH) else "PWD"
    return Path(environ.get(name, "."))


def _link_scratch(directory: Path, scratch: Path) -> None:
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (directory / _RANKS).symlink_to(scratch)


def _link_hadoop_conf(directory: Path) -> None:
    shipped = directory / HADOOP_CONF
    if shipped.is_dir():
        with contextlib.suppress(FileExistsError):
            (directory / _SHIPPED_CONF).parent.mkdir()
            (directory / _SHIPPED_CONF).symlink_to(shipped)


def _claim(addresses: Sequence[str]) -> None:
    """Lease the GPUs until the executor ends; a GPU that cannot be leased is described as bad."""
    subprocess.run(
        [sys.executable, "-P", "-m", "hopsgpu.agent.assigned_gpus", *addresses],
        env={**os.environ, "PYTHONPATH": package_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=_CLAIM_SECONDS,
        check=True,
    )
