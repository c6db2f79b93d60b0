"""Start a container's process daemon from a task's event loop.

Who starts one has the lock of its directory until it answers, so that another task, which finds
none yet, waits for that one rather than start another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from hopsgpu.agent import process_daemon as keeper_module
from hopsgpu.agent.rank_environment import ServerSpec, package_path
from hopsgpu.core.own_log import level
from hopsgpu.tracebacks import VARIABLE

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
# Another task's start is polled: a lock that is let go wakes nobody who may also be cancelled.
_LOOK_SECONDS = 0.005
_LOCK = "lock"


async def start_keeper(directory: Path, watched: int, warm: ServerSpec | None = None) -> None:
    """Start a daemon, unless another task has or does; return when there is one.

    If this is cancelled, the daemon starts all the same.

    Args:
        directory: the daemon's.
        watched: pid of the process with which it ends.
        warm: spec of a fork server that it starts at once, or None.

    Raises:
        OSError: the daemon did not start.
    """
    began = time.monotonic()
    with (directory / _LOCK).open("w") as lock:
        async with asyncio.timeout(_START_SECONDS):
            await _take(lock.fileno())
        if not answers(directory):
            starting = _start(directory, watched, lock.fileno(), warm)
            await _started(starting, directory, began)


async def _take(lock: int) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            return


def answers(directory: Path) -> bool:
    """Return whether a daemon listens in a directory."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, at)
        try:
            connection.connect(socket_in(at))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def socket_in(directory: int) -> str:
    """Return the path of the socket in an open directory.

    The directory's own path may be longer than the name of a socket may be.
    """
    return f"/proc/self/fd/{directory}/{keeper_module.SOCKET}"


def _start(
    directory: Path, watched: int, lock: int, warm: ServerSpec | None
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (package_path(), os.environ.get("PYTHONPATH"))))
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((directory / keeper_module.LOG).open("ab"))
        pidfd = os.pidfd_open(watched)
        stack.callback(os.close, pidfd)
        # In memory, because variables may hold secrets.
        file = stack.enter_context(os.fdopen(os.memfd_create("warm"), "w+b"))
        file.write(json.dumps(None if warm is None else warm.as_fields()).encode())
        file.seek(0)
        passed = [pidfd, lock, file.fileno()]
        return subprocess.Popen(
            [sys.executable, "-m", keeper_module.__name__, str(directory), *map(str, passed)],
            env={**os.environ, "PYTHONPATH": path, VARIABLE: level()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            start_new_session=True,
        )


async def _started(starting: subprocess.Popen[bytes], directory: Path, began: float) -> None:
    try:
        async with asyncio.timeout(_START_SECONDS):
            await exited(starting.pid)
    except TimeoutError:
        starting.kill()
    # Its child, the keeper, has left it by now.
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
