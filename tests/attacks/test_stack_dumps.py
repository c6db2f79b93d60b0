"""A rank prints without end while its agent asks for its stacks, or searches its log for stacks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hopsgpu.agent.daemon_client import DaemonClient, StartedRank
from hopsgpu.agent.rank_process import RankProcess
from hopsgpu.agent.reaper import ExitStatus
from hopsgpu.agent.stack_filter import OwnFrames, context_of_failure, last_lines

MIB = 2**20
# Prints much at once and then without end, and never shows its stacks.
PRINTING = """
import os, signal
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
line = b"x" * 63 + b"\\n"
for _ in range(256):
    os.write(1, line * 2**12)
os.write(2, b"!")
while True:
    os.write(1, line * 16)
"""


class Daemon:
    """Starts a process that prints to the log of a rank; stands in for the process daemon."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PRINTING], stdout=out, stderr=subprocess.PIPE
            )

    async def spawn(self, *_: object) -> StartedRank:
        return StartedRank(self.process.pid, None)

    def signal(self, pid: int, number: signal.Signals, _: str) -> None:
        os.kill(pid, number)

    async def wait_exit(self, _: int) -> ExitStatus:
        status = await asyncio.to_thread(self.process.wait)
        return ExitStatus(self.process.pid, -status, 0, 0.0)


def bytes_read(thread: int | None = None) -> int:
    """Return the bytes that this process, or one of its threads, has read so far."""
    task = "" if thread is None else f"task/{thread}/"
    text = Path(f"/proc/self/{task}io").read_text()
    return int(text.partition("rchar: ")[2].split()[0])


def test_a_dump_of_stacks_reads_new_output_once_and_not_on_the_event_loop(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    daemon = Daemon(log)
    context = SimpleNamespace(rank=0, model_dir=tmp_path / "model", dump=lambda _: None)
    spec = SimpleNamespace(environment={})
    rank = RankProcess(
        cast("DaemonClient", daemon), tmp_path, cast("Any", context), cast("Any", spec), {}
    )
    rank.log = log

    async def stop() -> tuple[int, int]:
        await rank.start(b"")
        waiting = asyncio.create_task(rank.wait())
        stderr = daemon.process.stderr
        assert stderr is not None
        await asyncio.to_thread(stderr.read, 1)
        size = log.stat().st_size
        before = bytes_read(), bytes_read(threading.get_native_id())
        await rank.stop(should_dump_stacks=True)
        after = bytes_read(), bytes_read(threading.get_native_id())
        await waiting
        assert after[0] - before[0] < log.stat().st_size - size + 2 * MIB
        return after[1] - before[1], log.stat().st_size

    try:
        in_event_loop, size = asyncio.run(stop())
    finally:
        daemon.process.kill()
        daemon.process.wait()
    assert size > 64 * MIB
    assert in_event_loop < MIB


def test_the_end_of_a_log_is_searched_in_linear_time() -> None:
    """At the rate of the old search, this takes hours."""
    log = "\n" * (512 * 1024 - 1)
    assert len(last_lines(log)) == 20
    assert context_of_failure(log) is None
    stacks = "\nThread 0x00007f68f0860b80 (most recent call first):\n\n" * 4000
    assert last_lines(stacks) == ()


def test_a_line_that_begins_like_a_frame_and_never_ends_is_not_held_back() -> None:
    frames = OwnFrames()
    sent = frames.without(b'  File "')
    for _ in range(64):
        sent += frames.without(b"x" * 2**18)
    assert len(sent) >= 63 * 2**18
    assert (sent + frames.rest()).startswith(b'  File "xxx')
