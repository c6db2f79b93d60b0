"""What ranks and their keepers ask of the kernel that Python has no name for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_OTHERS_FILES = 1024


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent's main thread ends (prctl(2)).

    Args:
        parent: pid of the process that forked this one, from its main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before the call above could take effect.
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Makes descendants whose parents end this process's children (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def rename(command: str) -> None:
    """Gives this process, whose main thread calls it, another command: see `comm` (prctl(2)).

    Args:
        command: of which the kernel takes 15 bytes.
    """
    _prctl(_PR_SET_NAME, command.encode())


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def allow_descriptors(number: int) -> None:
    """Raises this process's soft limit of open files for so many, as far as the hard one lets.

    Others of the process may open 1024 beside them, which is the usual soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def flush_c() -> None:
    """Writes out what C's streams have buffered."""
    ctypes.CDLL(None).fflush(None)


def default_signals() -> None:
    """Every signal as a fresh interpreter has it: default actions, none blocked."""
    handlers: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGPIPE: signal.SIG_IGN,
        signal.SIGXFSZ: signal.SIG_IGN,
    }
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, handlers.get(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextlib.contextmanager
def arrivals(numbers: Iterable[signal.Signals]) -> Iterator[int]:
    """A descriptor that becomes readable when one of some signals arrives: a byte for each.

    Must run in the main thread, and alone: a process has one such descriptor.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.signal(number, _noted) for number in numbers}
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _noted(number: int, frame: object) -> None:
    """Python writes a signal's number to the descriptor only where it has a handler."""


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a signal is still to be delivered in a process, or a thread runs its handler."""
    bit = 1 << (number - 1)
    for thread in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = thread.read_text()
        except OSError:
            continue  # it has ended
        masks = re.findall(r"^(?:SigPnd|ShdPnd|SigBlk):\t(\w+)$", text, re.MULTILINE)
        if any(int(mask, 16) & bit for mask in masks):
            return True
    return False


def ancestor(command: str) -> int | None:
    """The nearest ancestor of this process with a command (proc(5), comm), or None."""
    pid = os.getppid()
    while pid > 0:
        if comm(pid) == command:
            return pid
        pid = parent_of(pid)
    return None


def comm(pid: int) -> str:
    """The command of a process, "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").rstrip("\n")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """The pid of a process's parent, 0 where it has ended."""
    try:
        # The command, in parentheses, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
