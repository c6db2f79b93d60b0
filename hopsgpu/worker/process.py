"""A rank's process as its agent sees it: started, watched, stopped, and what it left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.worker import rank as rank_module
from hopsgpu.worker.context import VARIABLE, Context
from hopsgpu.worker.memory import Watch, kill_tree

STOP_SECONDS = 5.0
MOST_VALUE = 100 * 2**20
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RankEnd:
    """How a rank's process ended.

    Attributes:
        exit_code: None where a signal ended it.
        signal: its name, or None.
        peak_memory: bytes, the larger of the largest resident set of one process (wait4's
            ru_maxrss) and the most that was seen of all together (memory.Watch).
        outcome: what the rank left: "status", and "error" and "traceback" where it failed;
            "over memory" where it left nothing because we killed it for that; else empty.
        value: the pickled value, b"" where there is none.
        log_tail: the last lines of its output.
        time: seconds since the epoch, by this node's clock.
        stopped: whether we ended it.
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
    """One rank; its directory holds its home, temporary files, model and log.

    Args:
        directory: made by the caller.
        context: what the rank is told of its gang.
        environment: its variables.
        memory: bytes that the process and its descendants may use, None for no bound.
    """

    def __init__(
        self,
        directory: Path,
        context: Context,
        environment: Mapping[str, str],
        memory: int | None = None,
    ) -> None:
        self.rank = context.rank
        self.directory = directory
        self.log = directory / "log"
        self.model_dir = context.model_dir
        self._context = context
        self._environment = environment
        self._memory = memory
        self._peak = 0
        self._excess: str | None = None
        self._stopped = False
        self._gone = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, call: bytes) -> int:
        """Starts the process and returns its pid.

        Must run in the main thread: the rank's death signal follows the thread that forked.
        """
        work, home, temporary = (self.directory / name for name in ("work", "home", "tmp"))
        for path in (work, home, temporary, self.model_dir):
            path.mkdir(parents=True, mode=0o700)
        (self.directory / rank_module.CALL).write_bytes(call)
        described = self.directory / "context.json"
        self._context.dump(described)
        environment = {
            **self._environment,
            "HOME": str(home),
            "TMPDIR": str(temporary),
            VARIABLE: str(described),
        }
        command = [sys.executable, "-m", rank_module.__name__]
        # Append mode: what C and Python write comes in the order in which it was written.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.directory), str(os.getpid())],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._process.pid

    async def wait(self) -> RankEnd:
        """Waits for the end of the process, and ends what it left in its process group.

        Meanwhile the process is killed if it uses more memory than it may.
        """
        process = self._process
        assert process is not None, "start() comes first"
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_memory(process.pid))
            await _exited(process.pid)
            watch.cancel()
        # Not reaped yet, so the group's number is still ours: no stranger can be hit.
        _signal_group(process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self._gone.set()
        code = process.returncode
        outcome, value = self._left()
        return RankEnd(
            exit_code=code if code >= 0 else None,
            signal=signal.Signals(-code).name if code < 0 else None,
            peak_memory=max(usage.ru_maxrss * 1024, self._peak),
            outcome=outcome,
            value=value,
            log_tail=tail(self.log),
            time=time.time(),
            stopped=self._stopped,
        )

    async def _watch_memory(self, pid: int) -> None:
        if self._memory is None:
            return
        watch = Watch(pid, self._memory)
        # In a thread: a look takes 6 ms for 2 GB.
        while self._excess is None:
            await asyncio.sleep(watch.pause)
            self._excess = await asyncio.to_thread(watch.look)
            self._peak = watch.peak
        kill_tree(pid)

    def _left(self) -> tuple[dict[str, str], bytes]:
        """The outcome and the pickled value that the process left."""
        outcome = self.directory / rank_module.OUTCOME
        value = self.directory / rank_module.VALUE
        left: dict[str, str] = json.loads(outcome.read_text()) if outcome.exists() else {}
        if value.exists() and (size := value.stat().st_size) > MOST_VALUE:
            error = f"{size} bytes pickled; at most {MOST_VALUE} are accepted"
            left = {"status": "too large", "error": error}
            value.unlink()
        pickled = value.read_bytes() if "status" in left and value.exists() else b""
        if self._excess is not None:
            # A function that had come to its end by then has told more than we know.
            left = {"status": "over memory", "error": self._excess, **left}
        return left, pickled

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after 5 s, to the rank's process group."""
        process = self._process
        if process is None or self._gone.is_set():
            return
        if self._excess is None:
            self._stopped = True
        _signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


async def _exited(pid: int) -> None:
    """Waits until the process has exited, without reaping it."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def tail(log: Path) -> tuple[str, ...]:
    """The last 20 lines of a log."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
        text = file.read().decode(errors="backslashreplace")
    return tuple(text.splitlines()[-_TAIL_LINES:])
