"""Linux calls that Python does not offer, for ranks and the processes that supervise them."""

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
    """Have the kernel kill this process when its parent's main thread ends (prctl(2)).

    Args:
        parent: pid of the process that forked this one, from its main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before the call above could take effect.
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Make descendants whose parents end children of this process (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(command: str) -> None:
    """Change this process's command, its `comm` (prctl(2)); call this in the main thread.

    Args:
        command: the new command, of which the kernel keeps 15 bytes.
    """
    _prctl(_PR_SET_NAME, command.encode())


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def allow_descriptors(number: int) -> None:
    """Raise this process's soft limit of open files to fit `number`, at most to the hard limit.

    1024 more, the usual soft limit, are added for the other files of the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def flush_c() -> None:
    """Flush the buffers of C's output streams."""
    ctypes.CDLL(None).fflush(None)


def reset_signals() -> None:
    """Set all signals as in a fresh interpreter: default actions, none blocked."""
    handlers: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGPIPE: signal.SIG_IGN,
        signal.SIGXFSZ: signal.SIG_IGN,
    }
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, handlers.get(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextlib.contextmanager
def signal_descriptor(numbers: Iterable[signal.Signals]) -> Iterator[int]:
    """Yield a descriptor from which one byte can be read for each signal that arrives.

    Must run in the main thread, and must not be nested: a process has one such descriptor.
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
    """Do nothing: Python reports a signal on the descriptor only if the signal has a handler."""


def has_unhandled_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process still has to handle a signal, or a thread is in its handler.

    A thread blocks the signal while it runs the handler.
    """
    bit = 1 << (number - 1)
    for thread in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = thread.read_text()
        except OSError:
            continue  # the thread has ended
        masks = re.findall(r"^(?:SigPnd|ShdPnd|SigBlk):\t(\w+)$", text, re.MULTILINE)
        if any(int(mask, 16) & bit for mask in masks):
            return True
    return False


def ancestor(command: str) -> int | None:
    """Return the pid of the nearest ancestor that has a command (proc(5), comm), or None."""
    pid = os.getppid()
    while pid > 0:
        if comm(pid) == command:
            return pid
        pid = parent_of(pid)
    return None


def comm(pid: int) -> str:
    """Return the command of a process, or "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").rstrip("\n")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent, or 0 if the process has ended."""
    try:
        # The command is in parentheses, and may contain any character.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
