"""The keepers: two small processes that hold an executor's leases until the executor has ended.

The discovery script cannot hold the leases: it ends before the executor starts to work. The keepers
share each lock, and the kernel drops a lock when the last of them ends. The keepers watch each
other: if one is killed, the other forks a new one.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import (
    Callable,
    Collection,
    FrozenSet,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
)

from hopsgpu.gpu.node.leases import Leases

_SYS_PIDFD_OPEN = 434  # the same number on all architectures that YARN runs on
_POLL_SECONDS = 0.5
_REFRESH_SECONDS = 10.0
# Between tries to fork the other keeper, if the process limit does not allow it.
_RETRY_SECONDS = 0.1
# In /proc/PID/stat after the command: the state, the parent, the number of threads, the start time.
_STATE, _PARENT, _THREADS, _START = 0, 1, 17, 19
_READY, _GO = b"?", b"!"


class WatchedProcess:
    """A process whose end is watched, through a pidfd if the kernel has them (from Linux 5.3).

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int, should_use_pidfd: bool = True) -> None:
        self.pid = pid
        self._pidfd = _pidfd_open(pid) if should_use_pidfd else None
        self._started = _start_time(pid)
        if self._pidfd is None and self._has_ended():
            raise ProcessLookupError(f"process {pid} has ended")

    def __enter__(self) -> "WatchedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    @property
    def descriptors(self) -> List[int]:
        """The pidfd, if there is one."""
        return [] if self._pidfd is None else [self._pidfd]

    def has_ended(self) -> bool:
        if self._pidfd is not None:
            return bool(select.select([self._pidfd], [], [], 0.0)[0])
        return self._has_ended()

    def _has_ended(self) -> bool:
        if self._started is not None:
            # The pid may have been reused.
            return _start_time(self.pid) != self._started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def wait_for_any(processes: Sequence[WatchedProcess], seconds: float) -> List[WatchedProcess]:
    """Return the processes that have ended, once there are any or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        ended_processes = [process for process in processes if process.has_ended()]
        seconds_left = deadline - time.monotonic()
        if ended_processes or seconds_left <= 0:
            return ended_processes
        descriptors = [fd for process in processes for fd in process.descriptors]
        if len(descriptors) == len(processes):
            select.select(descriptors, [], [], seconds_left)
        else:
            # Without pidfds nothing reports the end of a process that is not a child.
            time.sleep(min(seconds_left, _POLL_SECONDS))


def _pidfd_open(pid: int) -> Optional[int]:
    """Return a descriptor that is readable once a process has ended, or None if unsupported."""
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        # Python 3.8 and older have no os.pidfd_open; some Pythons were built without ctypes.
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = int(libc.syscall(_SYS_PIDFD_OPEN, pid, 0))
        if descriptor >= 0:
            return descriptor
        raise OSError(ctypes.get_errno(), "pidfd_open")
    except ProcessLookupError:
        raise
    except (ImportError, OSError):
        return None  # an older kernel, or a container that filters system calls


class _ProcessStat(NamedTuple):
    """The name of a process's program, and the fields of /proc/PID/stat that follow it."""

    name: str
    fields: List[bytes]


def _process_stat(pid: int) -> Optional[_ProcessStat]:
    try:
        # The name, in parentheses, may contain parentheses and spaces.
        begin, _, end = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    except OSError:
        return None
    return _ProcessStat(os.fsdecode(begin.partition(b"(")[2]), end.split())


def _start_time(pid: int) -> Optional[str]:
    """Return a process's start time as the kernel writes it, or None if the process has ended."""
    status = _process_stat(pid)
    if status is None:
        return None
    # In a zombie with several threads, only the first thread has ended.
    if status.fields[_STATE] in (b"Z", b"X") and int(status.fields[_THREADS]) <= 1:
        return None
    return status.fields[_START].decode()


class Ancestor(NamedTuple):
    """An ancestor of this process, with the visible names of its script and program."""

    pid: int
    names: FrozenSet[str]


def ancestors() -> List[Ancestor]:
    """Return the ancestors of this process, the nearest first, as far as they are visible.

    If /proc is mounted with hidepid, the first process of another user hides all further ancestors.
    """
    result: List[Ancestor] = []
    pid = os.getppid()
    while pid > 0:
        status = _process_stat(pid)
        if status is None:
            break
        names = {status.name}
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            names.add(Path(os.readlink(f"/proc/{pid}/exe")).name)
        result.append(Ancestor(pid, frozenset(names)))
        pid = int(status.fields[_PARENT])
    return result or [Ancestor(os.getppid(), frozenset())]


@contextlib.contextmanager
def start_keepers(leases: Leases, executor: WatchedProcess) -> Iterator[Callable[[], object]]:
    """Start two processes that hold the leases until the executor has ended.

    Yield a function that makes the processes stay. Without its call, the processes end with this
    context: a script that was killed leaves no processes behind.

    Raises:
        OSError: the processes cannot be started, or were killed.
    """
    # The first keeper writes when both are ready; each keeper reads from `order` whether to stay.
    is_ready, says_ready = os.pipe()
    order, orders = os.pipe()
    with os.fdopen(is_ready, "rb", 0) as ready, os.fdopen(orders, "wb", 0) as commands:
        try:
            if os.fork() == 0:
                ready.close()
                commands.close()
                _run_keeper(leases, executor, says_ready, order)
        finally:
            os.close(says_ready)
            os.close(order)
        if ready.read(1) != _READY:
            raise ChildProcessError("the process that keeps the leases was killed")
        yield lambda: commands.write(_GO + _GO)  # one byte for each keeper


def _run_keeper(leases: Leases, executor: WatchedProcess, says_ready: int, order: int) -> None:
    """Run a keeper until it ends; the keeper forks the other keeper, which continues from there."""
    try:
        # Leave the container's process group, whose members YARN kills one after another: the
        # leases must outlive the executor.
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # YARN must be able to remove the container's directory; Spark waits until stdout is closed.
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        _close_all_but([says_ready, order, *executor.descriptors, *leases.descriptors])
        first = os.getpid()
        other = _other_keeper()
        if os.getpid() == first:
            os.write(says_ready, _READY)
        os.close(says_ready)
        stays = os.read(order, 1) == _GO
        os.close(order)
        if stays:
            _hold_leases(leases, executor, other)
    finally:
        os._exit(0)


def _hold_leases(leases: Leases, executor: WatchedProcess, other: Optional[WatchedProcess]) -> None:
    """Hold the leases until the executor has ended, and replace the other keeper if it ends."""
    while True:
        watched = [executor] if other is None else [executor, other]
        ended_processes = wait_for_any(
            watched, _RETRY_SECONDS if other is None else _REFRESH_SECONDS
        )
        if executor in ended_processes:
            return
        if other is None or other in ended_processes:
            if other is not None:
                other.close()
            with contextlib.suppress(ChildProcessError):  # this keeper did not fork it
                os.waitpid(-1, os.WNOHANG)
            other = _other_keeper()
        leases.refresh()


def _other_keeper() -> Optional[WatchedProcess]:
    """Fork; return, in each of the two processes, the other one, or None if it fails for now."""
    me = os.getpid()
    try:
        child = os.fork()
    except OSError:
        return None  # the process limit is reached, which must not end the lease
    if child == 0:
        os.setsid()  # so that killing the session of one keeper spares the other
    try:
        other = WatchedProcess(child or me)
    except ProcessLookupError:
        return None
    if child == 0 and os.getppid() != me:
        other.close()  # the parent has ended, and its pid may be another process's
        return None
    return other


def _close_all_but(descriptors: Collection[int]) -> None:
    """Close the other descriptors, which were inherited from the executor."""
    with contextlib.suppress(OSError):  # without /proc the descriptors stay open
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in descriptors:
                with contextlib.suppress(OSError):  # the descriptor of this directory is closed
                    os.close(descriptor)
