"""The keeper: a small process that has an executor's leases until the executor has ended.

The discovery script cannot have them: it ends before the executor starts to work.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Callable, Collection, Iterator, List, Optional

from hopsgpu.discovery.leases import Leases

_SYS_PIDFD_OPEN = 434  # the same number on all architectures that YARN runs on
_POLL_SECONDS = 0.5
_REFRESH_SECONDS = 10.0
# In /proc/PID/stat after the command: the state, the number of threads, the start time.
_STATE, _THREADS, _START = 0, 17, 19
_GO = b"!"


class Watched:
    """A process whose end is watched, by a pidfd where the kernel has them (from Linux 5.3).

    Args:
        pid: of the process.
        with_pidfd: whether to use one.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int, with_pidfd: bool = True) -> None:
        self.pid = pid
        self._pidfd = _pidfd_open(pid) if with_pidfd else None
        self._started = _start_time(pid)
        if self._pidfd is None and self._ended():
            raise ProcessLookupError(f"process {pid} has ended")

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    @property
    def descriptors(self) -> List[int]:
        """What it is watched by."""
        return [] if self._pidfd is None else [self._pidfd]

    def ends(self, seconds: float) -> bool:
        """Whether it has ended, or ends within some seconds."""
        if self._pidfd is not None:
            return bool(select.select([self._pidfd], [], [], seconds)[0])
        # Nobody tells of the end of a process that is not a child.
        until = time.monotonic() + seconds
        while not self._ended():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _ended(self) -> bool:
        if self._started is not None:
            # also where the number is another process's by now
            return _start_time(self.pid) != self._started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def _pidfd_open(pid: int) -> Optional[int]:
    """A descriptor that is readable once a process has ended; None where there is none."""
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        # Python 3.8 and older; there are some that were built without this.
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = int(libc.syscall(_SYS_PIDFD_OPEN, pid, 0))
        if descriptor >= 0:
            return descriptor
        raise OSError(ctypes.get_errno(), "pidfd_open")
    except ProcessLookupError:
        raise
    except (ImportError, OSError):
        return None  # an older kernel, or a container's filter of system calls


def _start_time(pid: int) -> Optional[str]:
    """The start of a process that has not ended, in the kernel's words; None of another."""
    try:
        # The command, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # A zombie with threads is a process whose first thread alone has ended.
    if fields[_STATE] in (b"Z", b"X") and int(fields[_THREADS]) <= 1:
        return None
    return fields[_START].decode()


@contextlib.contextmanager
def keeping(leases: Leases, executor: Watched) -> Iterator[Callable[[], None]]:
    """Has a process keep the leases until the executor has ended.

    Gives a call that makes it stay. Without that call it ends with this context: an executor
    that never learned of its GPUs, or a script that was killed, leaves nothing behind.
    """
    reading, writing = os.pipe()
    try:
        try:
            if os.fork() == 0:
                os.close(writing)
                _keep(leases, executor, reading)
        finally:
            os.close(reading)
        yield lambda: _tell(writing)
    finally:
        os.close(writing)


def _tell(writing: int) -> None:
    os.write(writing, _GO)


def _keep(leases: Leases, executor: Watched, reading: int) -> None:
    """The keeper's whole life."""
    try:
        # Out of the container's process group, whose members YARN ends one after the other: the
        # leases outlive the executor, not the other way round. It ends right after.
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # YARN removes the container's directory, and Spark waits for the end of our stdout.
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        _close_all_but([reading, *executor.descriptors, *leases.descriptors])
        stays = os.read(reading, 1) == _GO
        os.close(reading)
        if stays:
            while not executor.ends(_REFRESH_SECONDS):
                leases.refresh()
    finally:
        os._exit(0)


def _close_all_but(kept: Collection[int]) -> None:
    """Whatever else the executor has handed down is its own."""
    with contextlib.suppress(OSError):  # no /proc: then it stays
        for descriptor in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):  # that of this very list
                    os.close(descriptor)
