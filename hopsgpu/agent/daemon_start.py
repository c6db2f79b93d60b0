"""Start a container's process daemon.

A starter holds the lock of the daemon's directory until the daemon answers, so that other tasks of
the container do not start a second one. `start_in_background` lets a task start the daemon before
its own imports: both take about 0.1 s.
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
from hopsgpu.core.bounded_reads import read_end
from hopsgpu.core.own_log import level
from hopsgpu.linux import ancestor
from hopsgpu.tracebacks import VARIABLE

log = logging.getLogger(__name__)

_START_SECONDS = 300.0
_LOG_TAIL_BYTES = 1000
# Poll for the end of another task's start: a blocking wait for the lock could not be cancelled.
_POLL_SECONDS = 0.005
_LOCK = "lock"


async def start_process_daemon(directory: Path, watched_pid: int) -> None:
    """Wait until a daemon answers; start one unless another task does.

    Raises:
        OSError: the daemon did not start.
    """
    with (directory / _LOCK).open("w") as lock:
        async with asyncio.timeout(_START_SECONDS):
            while not _try_lock(lock.fileno()):
                await asyncio.sleep(_POLL_SECONDS)
        if not is_listening(directory):
            await _start(directory, watched_pid, lock.fileno(), None, level()).wait()


def start_in_background(
    directory: Path, watched_pid: int, warm: ServerSpec | None, log_level: str
) -> DaemonStart | None:
    """Start a daemon; return None if there is one or another task starts one.

    Args:
        warm: spec of a fork server that the daemon starts at once, or None.

    Raises:
        OSError: the daemon cannot be started.
    """
    with (directory / _LOCK).open("w") as lock:
        if not _try_lock(lock.fileno()) or is_listening(directory):
            return None
        return _start(directory, watched_pid, lock.fileno(), warm, log_level)


def _try_lock(lock: int) -> bool:
    """Take a lock, and return whether it was free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def container_process() -> int:
    """Return the pid of the JVM above this process, or of this process if there is no JVM."""
    return ancestor("java") or os.getpid()


def daemon_directory(parent: Path, watched_pid: int) -> Path:
    """Return the directory of the daemon that ends with `watched_pid`; create a missing one."""
    directory = (parent / f"process-daemon-{watched_pid}").absolute()
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    return directory


def is_listening(directory: Path) -> bool:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, descriptor)
        try:
            connection.connect(socket_in(descriptor))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def socket_in(directory: int) -> str:
    """Return the socket's path below /proc: the directory's path may exceed the limit of names."""
    return f"/proc/self/fd/{directory}/{process_daemon.SOCKET}"


@dataclass(frozen=True)
class DaemonStart:
    """A start of a daemon, which continues whether or not a task waits for it.

    Attributes:
        process: forks the daemon, and exits once the daemon answers.
        began: monotonic time of the start.
    """

    process: subprocess.Popen[bytes]
    directory: Path
    began: float

    async def wait(self) -> None:
        """Wait until the daemon answers.

        Raises:
            ChildProcessError: the daemon did not start.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                await wait_exit(self.process.pid)
        except TimeoutError:
            self.process.kill()
        # The daemon is no child of the process any more, so a kill does not affect it.
        code, seconds = self.process.wait(), time.monotonic() - self.began
        log.info("process daemon started (exit code %d) in %.2f s", code, seconds)
        if code != 0:
            output = read_end(self.directory / process_daemon.LOG, _LOG_TAIL_BYTES)
            raise ChildProcessError(
                f"the process daemon did not start (exit code {code}): {output}"
            )


def _start(
    directory: Path, watched_pid: int, lock: int, warm: ServerSpec | None, log_level: str
) -> DaemonStart:
    began = time.monotonic()
    path = os.pathsep.join(filter(None, (package_path(), os.environ.get("PYTHONPATH"))))
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((directory / process_daemon.LOG).open("ab"))
        pidfd = os.pidfd_open(watched_pid)
        stack.callback(os.close, pidfd)
        # A file in memory, because variables may contain secrets.
        file = stack.enter_context(os.fdopen(os.memfd_create("warm"), "w+b"))
        file.write(json.dumps(None if warm is None else warm.as_fields()).encode())
        file.seek(0)
        passed = [pidfd, lock, file.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", process_daemon.__name__, *map(str, (directory, *passed))],
            env={**os.environ, "PYTHONPATH": path, VARIABLE: log_level},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            start_new_session=True,
        )
    return DaemonStart(process, directory, began)


async def wait_exit(pid: int) -> None:
    """Wait until a process has exited; do not reap it."""
    descriptor = os.pidfd_open(pid)
    try:
        await wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def wait_readable(descriptor: int) -> None:
    """Wait until a descriptor is readable; a pidfd becomes readable when its process has exited."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)
