"""Find and kill the processes of ranks by a variable, after their process daemon was killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

from hopsgpu import linux
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
        if not (variables := (process / "environ").read_bytes()):
            linux.await_exec(int(process.name))
            variables = (process / "environ").read_bytes()
    except OSError:
        return False  # the process has ended, or belongs to another user
    return f"{VARIABLE}={token}".encode() in variables.split(b"\0")


def sweep(token: str) -> int:
    """Kill all processes with a daemon's token, and wait for their exit; return their number."""
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
    # The token of an exiting process can no longer be read, but the process still holds files such
    # as GPU devices.
    with contextlib.ExitStack() as stack:
        exiting = (entry for entry in Path("/proc").glob("[0-9]*") if _is_exiting(entry))
        opened = [_open_pidfd(int(entry.name), stack) for entry in exiting]
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
    """Wait for the exit of processes, but at most 5 s for the next exit."""
    poll = select.poll()
    waiting = 0
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
        waiting += 1
    while waiting and (ended := poll.poll(_EXIT_MILLISECONDS)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            waiting -= 1


def _is_exiting(process: Path) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        return bool(linux.process_flags(int(process.name)) & _PF_EXITING)
    except OSError:
        return False
