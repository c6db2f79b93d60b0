"""What a killed daemon leaves is waited for until it has let go of its files."""

from __future__ import annotations

import concurrent.futures
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.agent import orphans
from tests.bounds import HANG_SECONDS
from tests.conftest import until

# The main thread ends and takes its view of the memory along, as that of a killed process does
# before its files are closed; the other one keeps the process until it is told.
SLOW_TO_END = """
import ctypes, os, sys, threading
def stay():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=stay).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_sweep_waits_for_a_process_that_has_lost_its_environment_and_not_its_files() -> None:
    command, mark = [sys.executable, "-c", SLOW_TO_END], {orphans.VARIABLE: "t"}
    with (
        subprocess.Popen(command, env=mark, stdin=subprocess.PIPE) as slow,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        descriptor = os.pidfd_open(slow.pid)
        try:
            assert until(lambda: orphans._is_exiting(Path(f"/proc/{slow.pid}")))
            assert orphans.find_marked("t") == [] and not select.select([descriptor], [], [], 0)[0]
            sweeping = threads.submit(orphans.sweep, "t")
            with pytest.raises(TimeoutError):
                sweeping.result(0.3)
            assert slow.stdin is not None
            slow.stdin.close()
            assert sweeping.result(HANG_SECONDS) == 0
            assert select.select([descriptor], [], [], 0)[0]
        finally:
            os.close(descriptor)


def test_a_sweep_does_not_wait_for_what_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert orphans.sweep("nobody's") == 0
        assert other.poll() is None
        other.communicate(b"\n")
