"""Finds the processes of a container's ranks by a variable, when their keeper was killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

# Set for every fork server and rank: the token of the keeper that they belong to.
VARIABLE = "HOPSGPU_KEEPER"
_LOOK_AGAIN_MILLISECONDS = 1000


def marked(token: str) -> list[int]:
    """Living processes that were started with a keeper's token in their environment.

    Those that have cleared their environment at an exec are not found.
    """
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_marked(entry, token)]


def _is_marked(process: Path, token: str) -> bool:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # ended, or another user's
    return f"{VARIABLE}={token}".encode() in variables


def sweep(token: str) -> int:
    """Kills all processes with a keeper's token and waits for their end; how many there were."""
    count = 0
    while pids := marked(token):
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            waiting = 0
            for pid in pids:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                stack.callback(os.close, descriptor)
                # Looked at again, for the number may have become a stranger's meanwhile.
                if _is_marked(Path(f"/proc/{pid}"), token):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    poll.register(descriptor, select.POLLIN)
                    waiting += 1
            count += waiting
            while waiting and (ended := poll.poll(_LOOK_AGAIN_MILLISECONDS)):
                for descriptor, _ in ended:
                    poll.unregister(descriptor)
                    waiting -= 1
    return count
