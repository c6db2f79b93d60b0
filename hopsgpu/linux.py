"""Linux calls that Python lacks, for ranks and their supervisors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import select
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# linux/falloc.h
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
# An exec takes milliseconds, unless the program lies on a mount that does not answer.
_EXEC_SECONDS = 1.0
# include/linux/sched.h
_PF_KTHREAD = 0x200000
# The usual soft limit, for the other files of a process.
_RESERVED_DESCRIPTORS = 1024


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent's main thread exits (prctl(2)).

    That thread, of the process with the pid `parent`, must have forked this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before prctl() took effect.
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of orphaned descendants (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(command: str) -> None:
    """Set this process's `comm`, of at most 15 bytes (prctl(2)); call this in the main thread."""
    _prctl(_PR_SET_NAME, command.encode())


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def allow_descriptors(number: int) -> None:
    """Raise the soft limit of open files to `number` and 1024 more, at most to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = number + _RESERVED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def punch_hole(descriptor: int, begin: int, end: int) -> None:
    """Free the disk space of a part of a file, which then reads as zeros (fallocate(2)).

    Raises:
        OSError: the file system has no such holes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    offset, length = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
    if libc.fallocate64(descriptor, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def flush_c() -> None:
    ctypes.CDLL(None).fflush(None)


def reset_signals() -> None:
    """Reset all signals to the state of a fresh interpreter: default actions, none blocked."""
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
    """Yield a descriptor that has one byte for each signal that arrives.

    Call this in the main thread. Calls cannot be nested: a process has one such descriptor.
    """
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    old_handlers = {number: signal.signal(number, _ignore_signal) for number in numbers}
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: Python reports a signal on the descriptor only if the signal has a handler."""


def has_unhandled_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal is pending, or blocked by a thread that runs its handler."""
    bit = 1 << (number - 1)
    for thread in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = thread.read_text()
        except OSError:
            continue  # the thread has exited
        masks = re.findall(r"^(?:SigPnd|ShdPnd|SigBlk):\t(\w+)$", text, re.MULTILINE)
        if any(int(mask, 16) & bit for mask in masks):
            return True
    return False


def ancestor(command: str) -> int | None:
    """Return the pid of the nearest ancestor with this `comm` (proc(5)), or None."""
    pid = os.getppid()
    while pid > 0:
        if comm(pid) == command:
            return pid
        pid = parent_of(pid)
    return None


def comm(pid: int) -> str:
    """Return the `comm` of a process, or "" if the process has exited."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").rstrip("\n")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent, or 0 if the process has exited."""
    try:
        # The command is in parentheses, and may contain any character.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def await_exec(pid: int) -> None:
    """Wait until a process is not in an exec, at most 1 s.

    Between the exec and the start of the new program, the files cmdline and environ of proc(5) are
    empty. The caller of vfork(2) may already have continued then, and even have exited.

    Raises:
        OSError: the process does not exist.
    """
    command_line = Path(f"/proc/{pid}/cmdline")
    if command_line.read_bytes() or process_flags(pid) & _PF_KTHREAD:
        return
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)  # readable once the process has exited
        deadline = time.monotonic() + _EXEC_SECONDS
        while not poll.poll(1) and not command_line.read_bytes():
            if time.monotonic() > deadline:
                return
    finally:
        os.close(descriptor)


def process_flags(pid: int) -> int:
    """Return the kernel's flags of a process (proc(5), field 9 of stat).

    Raises:
        OSError: the process does not exist.
    """
    # The command before the field is in parentheses, and may contain any character.
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[6])
