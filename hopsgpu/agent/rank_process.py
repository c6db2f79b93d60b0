"""A rank's process as its agent sees it: start, supervision, stop and outcome."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.agent.daemon_client import DaemonClient, StartedRank
from hopsgpu.agent.memory import MemoryWatch
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.reaper import ExitStatus
from hopsgpu.agent.stack_filter import StackSearch, context_of_failure, end_of, last_lines
from hopsgpu.linux import has_unhandled_signal
from hopsgpu.rank import files
from hopsgpu.rank.context import VARIABLE, Context
from hopsgpu.rank.entry import SUCCESSFUL, entry_time
from hopsgpu.rank.rank_script import SUCCESS
from hopsgpu.tracebacks import should_show_all

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
_OUTCOME_POLL_SECONDS = 1.0
MAX_VALUE = 100 * 2**20
# A process that gets no core may take seconds to write its stacks, before SIGTERM.
_DUMP_SECONDS = 4.0
_DUMP_POLL_SECONDS = 0.01
# A poll for a file takes some microseconds.
_ENTRY_SECONDS = 0.1


@dataclass(frozen=True)
class RankProcessExit:
    """How a rank's process exited.

    Attributes:
        exit_code: None after a signal.
        signal: name of the signal, or None.
        peak_memory: bytes: the larger of one process's resident set (ru_maxrss of wait4) and
            `MemoryWatch.peak`.
        outcome: content of the rank's outcome file, or {}: "status", and "error" and "traceback" of
            a failure. The agent adds "besides", the log's context of an exception. Without a file,
            the status is "over memory" if the agent killed the rank for its memory.
        value: pickled, or b"".
        log_tail: as returned by `stack_filter.last_lines`.
        time: time of the failure or, if unknown, of the exit: seconds since the epoch by this
            node's clock.
        was_stopped: whether hopsgpu stopped the rank.
    """

    exit_code: int | None
    signal: str | None
    peak_memory: int
    outcome: Mapping[str, str]
    value: bytes
    log_tail: tuple[str, ...]
    time: float
    was_stopped: bool


class RankProcess:
    """One rank, whose directory contains its home, temporary files, model and log.

    Attributes:
        was_stopped: whether hopsgpu has stopped the rank, or prevented its start.

    Args:
        directory: an existing directory.
        environment: the variables that differ from the spec's.
        memory: bytes that the process and its descendants may use, None for no limit.
        is_script: whether the rank runs a script, which may replace its process by another program
            (`os.execv`): exit code 0 is then its success.
    """

    def __init__(
        self,
        daemon: DaemonClient,
        directory: Path,
        context: Context,
        spec: ServerSpec,
        environment: Mapping[str, str],
        memory: int | None = None,
        is_script: bool = False,
    ) -> None:
        self._is_script = is_script
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
        self.was_stopped = False
        self._spawning: asyncio.Future[StartedRank] | None = None
        self._exited = asyncio.Event()

    async def start(self, call: bytes) -> StartedRank:
        """Start the process.

        Raises:
            OSError: the process cannot be started, or was stopped before.
        """
        if self.was_stopped:
            raise InterruptedError("the rank was stopped before it started")
        work = self.directory / files.WORK
        home = self.directory / "home"
        for path in (work, home):
            # A script's files are in its working directory already.
            path.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not self.model_dir.is_relative_to(work):
            # A script creates its directories itself, and may expect that they do not exist.
            self.model_dir.mkdir(parents=True, mode=0o700)
        (self.directory / files.CALL).write_bytes(call)
        self.log.touch(mode=0o600)
        context_file = self.directory / "context.json"
        self.context.dump(context_file)
        environment = {**self._environment, "HOME": str(home), VARIABLE: str(context_file)}
        spawn = self._daemon.spawn(self._spec, self.directory, environment)
        self._spawning = asyncio.ensure_future(spawn)
        await asyncio.wait([self._spawning])
        if self._spawning.cancelled():
            raise InterruptedError("the rank was stopped before it started")
        return self._spawning.result()

    @property
    def should_show_all_frames(self) -> bool:
        """Whether stacks in the output should keep hopsgpu's own frames."""
        return should_show_all({**self._spec.environment, **self._environment})

    @property
    def _pid(self) -> int | None:
        spawning = self._spawning
        if spawning is None or not spawning.done() or spawning.cancelled():
            return None
        return None if spawning.exception() else spawning.result().pid

    async def wait_entry(self, ended: asyncio.Event) -> float | None:
        """Wait until the function runs, and return its start in seconds since the epoch.

        Return None if it does not run until `ended` is set.
        """
        while (entered_at := entry_time(self.directory)) is None and not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENTRY_SECONDS):
                    await ended.wait()
        return entered_at

    async def wait(self) -> RankProcessExit:
        """Wait for the exit; kill a rank that exceeds its memory limit, or fails but stays."""
        pid = self._pid
        assert pid is not None, "call start() first"
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._watch_memory(pid)),
                tasks.create_task(self._kill_failed(pid)),
            ]
            status = await self._daemon.wait_exit(pid)
            for watch in watches:
                watch.cancel()
        self._exited.set()
        # Run in a thread: a value has up to 100 MB, and the search of a log's end takes a while.
        return await asyncio.to_thread(self._read_exit, status)

    def _read_exit(self, status: ExitStatus) -> RankProcessExit:
        code = os.waitstatus_to_exitcode(status.status)
        outcome, value, failed_at = self._read_outcome()
        if self._is_script and code == 0 and not outcome:
            outcome, value = {"status": "returned"}, pickle.dumps(SUCCESS)
        log_end, should_keep_own = end_of(self.log), self.should_show_all_frames
        if outcome.get("status") == "raised":
            context = context_of_failure(log_end, should_keep_own=should_keep_own)
            outcome |= {} if context is None else {"besides": context}
        return RankProcessExit(
            exit_code=code if code >= 0 else None,
            signal=_signal_name(-code) if code < 0 else None,
            peak_memory=max(status.peak_memory, self._peak),
            outcome=outcome,
            value=value,
            log_tail=last_lines(log_end, should_keep_own=should_keep_own),
            time=failed_at or status.time,
            was_stopped=self.was_stopped,
        )

    async def _watch_memory(self, pid: int) -> None:
        if self._memory is None:
            return
        watch = MemoryWatch(pid, self._memory)
        # Run in a thread: a measurement takes 6 ms for 2 GB.
        while self._excess is None:
            await asyncio.sleep(watch.pause)
            self._excess = await asyncio.to_thread(watch.poll)
            self._peak = watch.peak
        self._excess_at = time.time()
        log.info("rank %d exceeds its memory limit: kills it", self.rank)
        self._daemon.signal(pid, signal.SIGKILL, "tree")

    async def _kill_failed(self, pid: int) -> None:
        # The threads of a rank that has failed may wait forever.
        outcome = self.directory / files.OUTCOME
        while not outcome.exists():
            await asyncio.sleep(_OUTCOME_POLL_SECONDS)
        if json.loads(outcome.read_text())["status"] not in SUCCESSFUL:
            await asyncio.sleep(STOP_SECONDS)
            log.info("rank %d has failed, but does not end: kills it", self.rank)
            self._daemon.signal(pid, signal.SIGKILL, "tree")

    def _read_outcome(self) -> tuple[dict[str, str], bytes, float | None]:
        file = self.directory / files.OUTCOME
        value = self.directory / files.VALUE
        outcome: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        failed_at = outcome.pop("time", self._excess_at)
        if value.exists() and (size := value.stat().st_size) > MAX_VALUE:
            error = f"{size} bytes pickled; at most {MAX_VALUE} are accepted"
            outcome = {"status": "too large", "error": error}
            value.unlink()
        pickled = value.read_bytes() if "status" in outcome and value.exists() else b""
        if self._excess is not None:
            # If the function finished first, its own outcome is more precise than this one.
            outcome = {"status": "over memory", "error": self._excess, **outcome}
        return outcome, pickled, failed_at

    async def stop(self, *, should_dump_stacks: bool = False) -> None:
        """Send SIGTERM to the process group, and SIGKILL to all descendants after 5 s.

        Return when the process has exited.

        Args:
            should_dump_stacks: whether the rank first writes the stacks of its threads to its log.
        """
        if self._exited.is_set():
            return
        # If the rank ended by itself, its outcome file says how: do not count it as stopped.
        if self._excess is None and not (self.directory / files.OUTCOME).exists():
            self.was_stopped = True
        if self._spawning is not None and not self._spawning.done():
            self._spawning.cancel()
        pid = self._pid
        if pid is None:
            return
        if should_dump_stacks:
            await self._dump_stacks(pid)
        log.debug("rank %d: SIGTERM; waits %g s for its end", self.rank, STOP_SECONDS)
        self._daemon.signal(pid, signal.SIGTERM, "group")
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._exited.wait()
        except TimeoutError:
            log.debug("rank %d: SIGKILL", self.rank)
            self._daemon.signal(pid, signal.SIGKILL, "tree")
            await self._exited.wait()

    def kill(self) -> None:
        """Send SIGKILL to the rank and its descendants; the exit counts as the rank's failure."""
        if self._pid is not None and not self._exited.is_set():
            self._daemon.signal(self._pid, signal.SIGKILL, "tree")

    async def _dump_stacks(self, pid: int) -> None:
        search = StackSearch(self.log)

        def has_dumped() -> bool:
            return search.has_found() and not has_unhandled_signal(pid, signal.SIGUSR1)

        self._daemon.signal(pid, signal.SIGUSR1, "process")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DUMP_SECONDS):
                # Poll: the handler does not notify anybody when it has written the stacks, and
                # SIGTERM must not end the process before.
                while not self._exited.is_set() and not await asyncio.to_thread(has_dumped):
                    await asyncio.sleep(_DUMP_POLL_SECONDS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
