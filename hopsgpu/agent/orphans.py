"""Find the processes of ranks by a variable, after their process daemon was killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

from hopsgpu.agent.shared_memory import await_cleaners, cleaners

# Set for every fork server and rank: the token of the daemon that they belong to.
VARIABLE = "HOPSGPU_PROCESS_DAEMON"
# Where all cores are busy, what was killed may not run to its end for seconds.
_LOOK_AGAIN_MILLISECONDS = 5000
# include/linux/sched.h
_PF_EXITING = 0x4


def marked(token: str) -> list[int]:
    """Return living processes that were started with a daemon's token in their environment.

    Processes that have cleared their environment at an exec are not found.
    """
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_marked(entry, token)]


def _is_marked(process: Path, token: str) -> bool:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # ended, or another user's
    return f"{VARIABLE}={token}".encode() in variables


def sweep(token: str) -> int:
    """Kill all processes with a daemon's token and wait for their end; return their number."""
    count = 0
    cleaned = False
    while pids := marked(token):
        cleaning = cleaners(pids)
        if not cleaned and cleaning.issuperset(pids):
            # What they clean up after has ended.
            await_cleaners(cleaning)
            cleaned = True
            continue
        with contextlib.ExitStack() as stack:
            killed = []
            for pid in pids:
                if pid in cleaning and not cleaned:
                    continue
                descriptor = _opened(pid, stack)
                # Looked at again, for the number may have become a stranger's meanwhile.
                if descriptor is not None and _is_marked(Path(f"/proc/{pid}"), token):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed.append(descriptor)
            count += len(killed)
            _await_ends(killed)
    # What is about to end has no environment any more, but its files (a GPU's, for one) still.
    with contextlib.ExitStack() as stack:
        opened = [_opened(pid, stack) for pid in _ending()]
        _await_ends(descriptor for descriptor in opened if descriptor is not None)
    return count


def _opened(pid: int, stack: contextlib.ExitStack) -> int | None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _await_ends(descriptors: Iterable[int]) -> None:
    """Wait for processes to end, for as long as one ends every five seconds."""
    poll = select.poll()
    waiting = 0
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
        waiting += 1
    while waiting and (ended := poll.poll(_LOOK_AGAIN_MILLISECONDS)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            waiting -= 1


def _ending() -> list[int]:
    """Return this user's processes that are ending; their token can no longer be read."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_ending(entry)]


def _is_ending(process: Path) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        # Behind the command's name, which may have blanks and parentheses: proc(5), field 9.
        flags = int((process / "stat").read_text().rpartition(")")[2].split()[6])
    except OSError:
        return False
    return bool(flags & _PF_EXITING)
