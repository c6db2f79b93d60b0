"""Find the processes of ranks by a variable, after their process daemon was killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

from hopsgpu.agent.shared_memory import await_cleaners, cleaners

# Set for every fork server and rank: the token of its daemon.
VARIABLE = "HOPSGPU_PROCESS_DAEMON"
# On busy cores, a killed process may take seconds to exit.
_EXIT_MILLISECONDS = 5000
# include/linux/sched.h
_PF_EXITING = 0x4


def find_marked(token: str) -> list[int]:
    """Return pids of living processes with a daemon's token in their environment.

    A process that cleared its environment at an exec is not found.
    """
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_marked(entry, token)]


def _is_marked(process: Path, token: str) -> bool:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # the process has ended, or belongs to another user
    return f"{VARIABLE}={token}".encode() in variables


def sweep(token: str) -> int:
    """Kill all processes with a daemon's token and wait for their end; return their number."""
    count = 0
    has_cleaned = False
    while pids := find_marked(token):
        cleaning = cleaners(pids)
        if not has_cleaned and cleaning.issuperset(pids):
            # The processes whose shared memory the cleaners remove have ended.
            await_cleaners(cleaning)
            has_cleaned = True
            continue
        with contextlib.ExitStack() as stack:
            killed = []
            for pid in pids:
                if pid in cleaning and not has_cleaned:
                    continue
                descriptor = _open_pidfd(pid, stack)
                # Check again: the pid may have been reused.
                if descriptor is not None and _is_marked(Path(f"/proc/{pid}"), token):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed.append(descriptor)
            count += len(killed)
            _await_exits(killed)
    # An exiting process has no readable environment, but still holds files such as GPU devices.
    # Wait for it.
    with contextlib.ExitStack() as stack:
        opened = [_open_pidfd(pid, stack) for pid in _exiting_pids()]
        _await_exits(descriptor for descriptor in opened if descriptor is not None)
    return count


def _open_pidfd(pid: int, stack: contextlib.ExitStack) -> int | None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _await_exits(descriptors: Iterable[int]) -> None:
    """Wait for processes to exit, for as long as one exits every five seconds."""
    poll = select.poll()
    waiting = 0
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
        waiting += 1
    while waiting and (ended := poll.poll(_EXIT_MILLISECONDS)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            waiting -= 1


def _exiting_pids() -> list[int]:
    """Return this user's processes that are exiting; their token can no longer be read."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_exiting(entry)]


def _is_exiting(process: Path) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        # proc(5), field 9; the command's name before it may contain blanks and parentheses.
        flags = int((process / "stat").read_text().rpartition(")")[2].split()[6])
    except OSError:
        return False
    return bool(flags & _PF_EXITING)
