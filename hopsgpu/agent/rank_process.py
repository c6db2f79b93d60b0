"""A rank's process as its agent sees it: started, watched, stopped, and what it left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.agent.daemon_client import DaemonClient, StartedRank
from hopsgpu.agent.memory import MemoryWatch
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.stack_filter import context_of_failure, end_of, last_lines
from hopsgpu.linux import has_unhandled_signal
from hopsgpu.rank import files
from hopsgpu.rank.context import VARIABLE, Context
from hopsgpu.rank.entry import WELL, entry_time
from hopsgpu.tracebacks import should_show_all

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
_FAILED_LOOK_SECONDS = 1.0
MOST_VALUE = 100 * 2**20
# Of a process that gets no core meanwhile, the signal would overtake the stacks.
_DUMP_SECONDS = 4.0
_LOOK_SECONDS = 0.01
# A look for a file takes some microseconds.
_ENTRY_SECONDS = 0.1


@dataclass(frozen=True)
class RankProcessExit:
    """How a rank's process ended.

    Attributes:
        exit_code: exit code, None if a signal ended it.
        signal: name of the signal, or None.
        peak_memory: bytes, the larger of the largest resident set of one process (wait4's
            ru_maxrss) and the largest total that was seen (memory.Watch).
        outcome: what the rank left: "status", and "error" and "traceback" if it failed; "besides"
            with what its log contains besides the exception; "over memory" if it left nothing
            because we killed it for exceeding its memory; else empty.
        value: the pickled value, or b"".
        log_tail: the last lines of its output, as returned by `stack_filter.last_lines`.
        time: when it failed or, if unknown, when it had ended; seconds since the epoch by this
            node's clock.
        stopped: whether hopsgpu ended it.
    """

    exit_code: int | None
    signal: str | None
    peak_memory: int
    outcome: Mapping[str, str]
    value: bytes
    log_tail: tuple[str, ...]
    time: float
    stopped: bool


class RankProcess:
    """One rank; its directory contains its home, temporary files, model and log.

    Attributes:
        rank: in [0, world_size).
        directory, log, model_dir: its own paths.
        context: description of the gang for the rank.
        stopped: whether hopsgpu has ended it, or prevented its start.

    Args:
        daemon: process daemon that starts it.
        directory: created by the caller.
        context: description of the gang for the rank.
        spec: spec of the fork server: what the rank shares with others.
        environment: the rank's own variables.
        memory: bytes that the process and its descendants may use, None for no limit.
    """

    def __init__(
        self,
        daemon: DaemonClient,
        directory: Path,
        context: Context,
        spec: ServerSpec,
        environment: Mapping[str, str],
        memory: int | None = None,
    ) -> None:
        self.rank = context.rank
        self.directory = directory
        self.log = directory / files.LOG
        self.model_dir = context.model_dir
        self._daemon = daemon
        self.context = context
        self._spec = spec
        self._environment = environment
        self._memory = memory
        self._peak = 0
        self._excess: str | None = None
        self._excess_at: float | None = None
        self.stopped = False
        self._spawning: asyncio.Future[StartedRank] | None = None
        self._gone = asyncio.Event()

    async def start(self, call: bytes) -> StartedRank:
        """Start the process.

        Raises:
            OSError: it cannot be started, or was stopped before.
        """
        if self.stopped:
            raise InterruptedError("the rank was stopped before it started")
        work = self.directory / files.WORK
        home = self.directory / "home"
        for path in (work, home, self.model_dir):
            path.mkdir(parents=True, mode=0o700)
        (self.directory / files.CALL).write_bytes(call)
        self.log.touch(mode=0o600)
        described = self.directory / "context.json"
        self.context.dump(described)
        environment = {
            **self._environment,
            "HOME": str(home),
            VARIABLE: str(described),
        }
        self._spawning = asyncio.ensure_future(
            self._daemon.spawn(self._spec, self.directory, environment)
        )
        await asyncio.wait([self._spawning])
        if self._spawning.cancelled():
            raise InterruptedError("the rank was stopped before it started")
        return self._spawning.result()

    @property
    def shows_all_frames(self) -> bool:
        """Whether stacks in its output keep hopsgpu's own frames."""
        return should_show_all({**self._spec.environment, **self._environment})

    @property
    def _pid(self) -> int | None:
        """The process's pid, None before the start."""
        spawning = self._spawning
        if spawning is None or not spawning.done() or spawning.cancelled():
            return None
        return None if spawning.exception() else spawning.result().pid

    async def entered(self, ended: asyncio.Event) -> float | None:
        """Wait until the function runs; return since when, in seconds since the epoch.

        Args:
            ended: event, set once the process has ended; the result is None if the function never
                ran.
        """
        while (at := entry_time(self.directory)) is None and not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENTRY_SECONDS):
                    await ended.wait()
        return at

    async def wait(self) -> RankProcessExit:
        """Wait for the end of the process and of its process group.

        The process is killed if it exceeds its memory limit meanwhile.
        """
        pid = self._pid
        assert pid is not None, "call start() first"
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._watch_memory(pid)),
                tasks.create_task(self._end_failed(pid)),
            ]
            ended = await self._daemon.ended(pid)
            for watch in watches:
                watch.cancel()
        self._gone.set()
        code = os.waitstatus_to_exitcode(ended.status)
        outcome, value, told_at = self._left()
        wrote, keep_own = end_of(self.log), self.shows_all_frames
        besides = (
            context_of_failure(wrote, keep_own=keep_own)
            if outcome.get("status") == "raised"
            else None
        )
        if besides is not None:
            outcome["besides"] = besides
        return RankProcessExit(
            exit_code=code if code >= 0 else None,
            signal=_signal_name(-code) if code < 0 else None,
            peak_memory=max(ended.peak_memory, self._peak),
            outcome=outcome,
            value=value,
            log_tail=last_lines(wrote, keep_own=keep_own),
            time=told_at or ended.time,
            stopped=self.stopped,
        )

    async def _watch_memory(self, pid: int) -> None:
        if self._memory is None:
            return
        watch = MemoryWatch(pid, self._memory)
        # In a thread: a look takes 6 ms for 2 GB.
        while self._excess is None:
            await asyncio.sleep(watch.pause)
            self._excess = await asyncio.to_thread(watch.look)
            self._peak = watch.peak
        self._excess_at = time.time()
        log.info("rank %d exceeds its memory limit: kills it", self.rank)
        self._daemon.signal(pid, signal.SIGKILL, "tree")

    async def _end_failed(self, pid: int) -> None:
        """Kill a rank that has failed but does not end, for example because its threads wait."""
        outcome = self.directory / files.OUTCOME
        while not outcome.exists():
            await asyncio.sleep(_FAILED_LOOK_SECONDS)
        if json.loads(outcome.read_text())["status"] not in WELL:
            await asyncio.sleep(STOP_SECONDS)
            log.info("rank %d has failed, but does not end: kills it", self.rank)
            self._daemon.signal(pid, signal.SIGKILL, "tree")

    def _left(self) -> tuple[dict[str, str], bytes, float | None]:
        """Return the outcome and the pickled value that the process left, and when it told of
        it.
        """
        outcome = self.directory / files.OUTCOME
        value = self.directory / files.VALUE
        left: dict[str, Any] = json.loads(outcome.read_text()) if outcome.exists() else {}
        told_at = left.pop("time", self._excess_at)
        if value.exists() and (size := value.stat().st_size) > MOST_VALUE:
            error = f"{size} bytes pickled; at most {MOST_VALUE} are accepted"
            left = {"status": "too large", "error": error}
            value.unlink()
        pickled = value.read_bytes() if "status" in left and value.exists() else b""
        if self._excess is not None:
            # A function that had come to its end by then has told more than we know.
            left = {"status": "over memory", "error": self._excess, **left}
        return left, pickled, told_at

    async def stop(self, *, dump_stacks: bool = False) -> None:
        """Send SIGTERM to the rank's process group, and SIGKILL to all descendants after 5 s.

        Return when the process is gone.

        Args:
            dump_stacks: whether to write the stacks of all threads to its log first.
        """
        if self._gone.is_set():
            return
        # One that had come to its end by itself has told how.
        if self._excess is None and not (self.directory / files.OUTCOME).exists():
            self.stopped = True
        if self._spawning is not None and not self._spawning.done():
            self._spawning.cancel()
        pid = self._pid
        if pid is None:
            return
        if dump_stacks:
            await self._dump_stacks(pid)
        log.debug("rank %d: SIGTERM; waits %g s for its end", self.rank, STOP_SECONDS)
        self._daemon.signal(pid, signal.SIGTERM, "group")
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            log.debug("rank %d: SIGKILL", self.rank)
            self._daemon.signal(pid, signal.SIGKILL, "tree")
            await self._gone.wait()

    def kill(self) -> None:
        """Send SIGKILL to the rank and all its descendants, as a failure of the rank."""
        if self._pid is not None and not self._gone.is_set():
            self._daemon.signal(self._pid, signal.SIGKILL, "tree")

    async def _dump_stacks(self, pid: int) -> None:
        before = self.log.stat().st_size
        self._daemon.signal(pid, signal.SIGUSR1, "process")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DUMP_SECONDS):
                # The next signal would end the process before the handler does; it tells nobody.
                while not self._gone.is_set() and (
                    not self._dumped(before) or has_unhandled_signal(pid, signal.SIGUSR1)
                ):
                    await asyncio.sleep(_LOOK_SECONDS)

    def _dumped(self, offset: int) -> bool:
        with self.log.open("rb") as file:
            file.seek(offset)
            return b"(most recent call first)" in file.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
