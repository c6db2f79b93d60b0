"""Start a container's process daemon from a task's event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from hopsgpu.agent import process_daemon as keeper_module
from hopsgpu.agent.rank_environment import package_path
from hopsgpu.core.own_log import level
from hopsgpu.tracebacks import VARIABLE

log = logging.getLogger(__name__)

_START_SECONDS = 60.0


async def start_keeper(directory: Path, watched: int) -> None:
    """Start a daemon, unless another task does at the same time; return when there is one.

    Args:
        directory: the daemon's.
        watched: pid of the process with which it ends.

    Raises:
        OSError: the daemon did not start.
    """
    path = os.pathsep.join(filter(None, (package_path(), os.environ.get("PYTHONPATH"))))
    began, pidfd = time.monotonic(), os.pidfd_open(watched)
    try:
        with (directory / keeper_module.LOG).open("ab") as output:
            starting = subprocess.Popen(
                [sys.executable, "-m", keeper_module.__name__, str(directory), str(pidfd)],
                env={**os.environ, "PYTHONPATH": path, VARIABLE: level()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[pidfd],
                start_new_session=True,
            )
    finally:
        os.close(pidfd)
    try:
        async with asyncio.timeout(_START_SECONDS):
            await exited(starting.pid)
    finally:
        # Its child, the keeper, has left it by then.
        starting.kill()
        code = starting.wait()
    log.info("process daemon started (exit code %d) in %.2f s", code, time.monotonic() - began)
    if code != 0:
        said = (directory / keeper_module.LOG).read_text(errors="backslashreplace")
        raise ChildProcessError(
            f"the process daemon did not start (exit code {code}): {said[-1000:]}"
        )


async def exited(pid: int) -> None:
    """Wait until a process has exited, without reaping it."""
    descriptor = os.pidfd_open(pid)
    try:
        await readable(descriptor)
    finally:
        os.close(descriptor)


async def readable(descriptor: int) -> None:
    """Wait until a descriptor is readable; a pidfd is when its process has exited."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_reader(descriptor, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(descriptor)
