"""Cleaners: processes that remove a rank's shared memory after its exit.

Files in /dev/shm use the node's memory until a process removes them. The managers of joblib and
torch and Python's resource tracker do so when the last process that uses a file has ended. They are
descendants of the rank, and may finish before they are killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterable
from pathlib import Path

from hopsgpu import linux

# Resource trackers take some milliseconds; torch's manager first waits for three seconds.
CLEANING_SECONDS = 6.0
# Command lines of multiprocessing's resource tracker, of loky's, and of torch's manager.
_CLEANER = re.compile(rb"\.resource_tracker import main|^([^\0]*/)?torch_shm_manager\0")


def cleaners(pids: Iterable[int]) -> frozenset[int]:
    return frozenset(pid for pid in pids if _CLEANER.search(_command_line(pid)))


def await_cleaners(pids: Iterable[int], seconds: float = CLEANING_SECONDS) -> None:
    """Wait until the processes have exited by themselves, at most `seconds` for all."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        waiting = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                waiting += 1
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(remaining * 1000):
                poll.unregister(descriptor)
                waiting -= 1


def _command_line(pid: int) -> bytes:
    try:
        # The rank that started the cleaner may exit before the exec has ended.
        linux.await_exec(pid)
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has exited
