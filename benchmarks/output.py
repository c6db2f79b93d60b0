"""The path of a rank's output: lines per second, its delay, and the driver's memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TextIO

from benchmarks.table import heading, row
from hopsgpu.agent.rank_logs import follow
from hopsgpu.attempts.rank_output import RankOutput
from hopsgpu.control.channel import Message, new_secret
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.core.run_values import RunStatus
from hopsgpu.display.progress import RunLines

_MIB = 2**20
_MIBS = 200
_ROUNDS = 3
_SLOW_LINES = 40
_EVENT_SECONDS = 30.0
# Neither this process's memory nor its modules are to count.
_SPAWN = multiprocessing.get_context("spawn")

_PREPARED = "from hopsgpu.rank.entry import prepare_output; prepare_output()\n"
# Lines of 64 bytes, each printed by itself, and what a rank notices of it.
_FAST_RANK = (
    _PREPARED
    + """
import pathlib, sys, time
longest, began = 0.0, time.monotonic()
for number in range(int(sys.argv[1])):
    before = time.monotonic()
    print(f"{number:063d}")
    longest = max(longest, time.monotonic() - before)
pathlib.Path(sys.argv[2]).write_text(f"{time.monotonic() - began} {longest}")
"""
)
# Each line says when it was printed.
_SLOW_RANK = (
    _PREPARED
    + """
import sys, time
for number in range(int(sys.argv[1])):
    print(time.time())
    time.sleep(0.037)
"""
)


def measure(mibs: int = _MIBS, rounds: int = _ROUNDS) -> dict[str, list[float]]:
    """Measure a rank that prints, an agent that follows, and a driver that shows and stores all.

    Args:
        mibs: that the rank prints, in lines of 64 bytes.
        rounds: how often.

    Returns:
        One figure of each round: "rank" (seconds of the rank for its printing), "longest write"
        (of the rank, ms), "behind" (seconds from the rank's end to the last line at the driver),
        "lines" (millions per second of the path, over a log that is there already), "memory"
        (growth of the driver's, MiB), "delay" (median of a slow rank's lines, s) and "longest
        delay".
    """
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        with ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
            for name, figure in pool.submit(_drive, mibs).result().items():
                figures.setdefault(name, []).append(figure)
    heading(f"a rank prints {mibs} MiB in lines of 64 bytes")
    row("the rank prints, s", figures["rank"])
    row("its longest write, ms", figures["longest write"])
    row("the driver is behind at its end, s", figures["behind"])
    row("path alone, million lines/s", figures["lines"])
    row("the driver's memory grows, MiB", figures["memory"])
    row("delay of a line, s", figures["delay"])
    row("longest delay of a line, s", figures["longest delay"])
    return figures


def _drive(mibs: int) -> dict[str, float]:
    """Run the driver's process."""
    lines = mibs * _MIB // 64
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        log, told, slow_log = (directory / name for name in ("log", "told", "slow"))
        before = _peak()
        printed = _shown(nowhere, log, _FAST_RANK, [str(lines), str(told)])
        read = _shown(nowhere, log, None, [])
        grown = _peak() - before
        slow = _shown(nowhere, slow_log, _SLOW_RANK, [str(_SLOW_LINES)])
        seconds, longest = map(float, told.read_text().split())
    for show in (printed, read):
        if show.lines != lines:
            raise RuntimeError(f"{show.lines} lines of {lines} came")
    return {
        "rank": seconds,
        "longest write": 1000 * longest,
        "behind": printed.over - printed.ended,
        "lines": lines / (read.over - read.began) / 1e6,
        "memory": grown,
        "delay": statistics.median(slow.delays),
        "longest delay": max(slow.delays),
    }


class _Timed:
    """Shows lines as `RunLines` does, and notes when, in seconds since the epoch.

    Attributes:
        lines: shown so far.
        delays: seconds of the lines that say when they were printed.
        began: the first message came.
        ended: the rank had, by its agent.
        over: the last line had been shown.
    """

    def __init__(self, out: TextIO) -> None:
        self._shown = RunLines(out=out)
        self.lines = 0
        self.delays: list[float] = []
        self.began = self.ended = self.over = 0.0

    def status(self, status: RunStatus) -> None:
        self._shown.status(status)

    def line(self, rank: int, host: str, *texts: str) -> None:
        self._shown.line(rank, host, *texts)
        self.lines += len(texts)
        if "." in texts[0]:
            self.delays += [time.time() - float(text) for text in texts]


def _shown(nowhere: TextIO, log: Path, code: str | None, arguments: list[str]) -> _Timed:
    """Has an agent follow a rank, or a log that is there, and shows what comes."""
    show = _Timed(nowhere)
    output = RankOutput(0, "node1", show)
    secret = new_secret()
    with serve(secret, "127.0.0.1") as server, contextlib.closing(output.spool):
        driver = DriverEndpoint("127.0.0.1", server.port, secret, None)
        agent = _SPAWN.Process(target=_agent, args=(driver, log, code, arguments))
        agent.start()
        try:
            while (message := _next(server)).kind != "ended":
                show.began = show.began or time.time()
                if message.kind == "output":
                    output.add(message.payload)
            output.finish()
            show.over, show.ended = time.time(), message["time"]
        finally:
            agent.kill()
            agent.join()
    return show


def _next(server: ControlServer) -> Message:
    event = server.next_event(_EVENT_SECONDS)
    if event is None or event.message is None:
        raise RuntimeError(f"{event} where a message was awaited")
    return event.message


def _agent(driver: DriverEndpoint, log: Path, code: str | None, arguments: list[str]) -> None:
    """The agent's process."""
    asyncio.run(_follow(driver, log, code, arguments))


async def _follow(
    driver: DriverEndpoint, log: Path, code: str | None, arguments: list[str]
) -> None:
    channel = await connect_to_driver(driver)
    ended = asyncio.Event()
    log.touch()
    following = asyncio.create_task(follow(log, ended, functools.partial(channel.send, "output")))
    if code is not None:
        with log.open("ab") as file:
            command = [sys.executable, "-c", code, *arguments]
            rank = subprocess.Popen(command, stdout=file, stderr=file)
        await asyncio.to_thread(rank.wait)
    when = time.time()
    ended.set()
    await following
    await channel.send("ended", time=when)
    await channel.receive()


def _peak() -> float:
    """Return the peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
