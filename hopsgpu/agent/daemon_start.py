"""Start a container's process daemon.

Who starts one has the lock of its directory until it answers, so that another task, which finds
none yet, waits for that one rather than start another.

A task that will need one begins its start before it imports what it needs itself (`begin`): both
take some 0.1 s, and a gang waits for both.
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
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.agent import process_daemon
from hopsgpu.agent.rank_environment import ServerSpec, package_path
from hopsgpu.core.own_log import level
from hopsgpu.linux import ancestor
from hopsgpu.tracebacks import VARIABLE

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
# Another task's start is polled: a lock that is let go wakes nobody who may also be cancelled.
_LOOK_SECONDS = 0.005
_LOCK = "lock"


async def start_process_daemon(directory: Path, watched: int) -> None:
    """Start a daemon, unless another task has or does; return when there is one.

    Args:
        directory: the daemon's.
        watched: pid of the process with which it ends.

    Raises:
        OSError: the daemon did not start.
    """
    with (directory / _LOCK).open("w") as lock:
        async with asyncio.timeout(_START_SECONDS):
            while not _take(lock.fileno()):
                await asyncio.sleep(_LOOK_SECONDS)
        if not answers(directory):
            await _start(directory, watched, lock.fileno(), None, level()).done()


def begin(
    directory: Path, watched: int, warm: ServerSpec | None, log_level: str
) -> Starting | None:
    """Begin to start a daemon, unless there is one or another task starts one.

    Args:
        directory, watched: as for `start_process_daemon`.
        warm: spec of a fork server that the daemon starts at once, or None.
        log_level: level of the daemon's own log.

    Returns:
        The start, or None.

    Raises:
        OSError: the daemon cannot be started.
    """
    with (directory / _LOCK).open("w") as lock:
        if not _take(lock.fileno()) or answers(directory):
            return None
        return _start(directory, watched, lock.fileno(), warm, log_level)


def _take(lock: int) -> bool:
    """Take a lock if nobody has it; return whether that succeeded."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def container_process() -> int:
    """Return the pid of the process that a container ends with: a JVM above this process, or it."""
    return ancestor("java") or os.getpid()


def daemon_directory(parent: Path, watched: int) -> Path:
    """Return the directory of the daemon that ends with a process; it is made if it is missing."""
    directory = (parent / f"process-daemon-{watched}").absolute()
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    return directory


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
    return f"/proc/self/fd/{directory}/{process_daemon.SOCKET}"


@dataclass(frozen=True)
class Starting:
    """A start of a daemon, which goes on whether or not somebody waits for it.

    Attributes:
        process: becomes the daemon's parent, and exits once the daemon answers.
        directory: the daemon's.
        began: the clock's reading when it was started.
    """

    process: subprocess.Popen[bytes]
    directory: Path
    began: float

    async def done(self) -> None:
        """Wait until the daemon answers.

        Raises:
            ChildProcessError: the daemon did not start.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                await exited(self.process.pid)
        except TimeoutError:
            self.process.kill()
        # Its child, the daemon, has left it by now.
        code, seconds = self.process.wait(), time.monotonic() - self.began
        log.info("process daemon started (exit code %d) in %.2f s", code, seconds)
        if code != 0:
            said = (self.directory / process_daemon.LOG).read_text(errors="backslashreplace")
            raise ChildProcessError(
                f"the process daemon did not start (exit code {code}): {said[-1000:]}"
            )


def _start(
    directory: Path, watched: int, lock: int, warm: ServerSpec | None, log_level: str
) -> Starting:
    began = time.monotonic()
    path = os.pathsep.join(filter(None, (package_path(), os.environ.get("PYTHONPATH"))))
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((directory / process_daemon.LOG).open("ab"))
        pidfd = os.pidfd_open(watched)
        stack.callback(os.close, pidfd)
        # In memory, because variables may hold secrets.
        file = stack.enter_context(os.fdopen(os.memfd_create("warm"), "w+b"))
        file.write(json.dumps(None if warm is None else warm.as_fields()).encode())
        file.seek(0)
        passed = [pidfd, lock, file.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-m", process_daemon.__name__, str(directory), *map(str, passed)],
            env={**os.environ, "PYTHONPATH": path, VARIABLE: log_level},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            start_new_session=True,
        )
    return Starting(process, directory, began)


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
