"""Processes that remove what others have left in shared memory, once these have ended.

What a rank leaves in /dev/shm takes the node's memory until somebody removes it. Python's resource
tracker, joblib's and torch's manager do so when the last process that talks to them has ended. They
are below the rank, and are not killed before they have done it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterable
from pathlib import Path

# Resource trackers take some milliseconds, torch's manager waits for three seconds first.
CLEANING_SECONDS = 6.0
# Command lines of multiprocessing's resource tracker, of loky's, and of torch's manager.
_CLEANER = re.compile(rb"\.resource_tracker import main|^([^\0]*/)?torch_shm_manager\0")


def cleaners(pids: Iterable[int]) -> frozenset[int]:
    """Return those of some processes that clean up after others."""
    return frozenset(pid for pid in pids if _CLEANER.search(_command_line(pid)))


def await_cleaners(pids: Iterable[int]) -> None:
    """Wait for processes to end by themselves, six seconds at most for all of them."""
    deadline = time.monotonic() + CLEANING_SECONDS
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        waiting = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                waiting += 1
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                waiting -= 1


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended
