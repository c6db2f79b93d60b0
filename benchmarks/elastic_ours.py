"""hopsgpu's elastic gang, as the benchmark of elastic training has its rivals.

The ranks make the steps of the rivals' ranks, and save their checkpoints where hopsgpu has them: on
HDFS, with `context().save_checkpoint`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import hopsgpu
from benchmarks.elastic_ranks import SAVED, Event, is_due, train_in
from benchmarks.elastic_rivals import WAIT_SECONDS, EventFile, wait_for
from hopsgpu import devcluster
from hopsgpu.runs.run import Run

_MEMORY = "768m"
# As often as it can: what the rivals do.
_INTERVAL = "500ms"


def train(events: str, seconds: float, saved: int) -> None:
    """Train as a rank of an elastic gang, as `elastic_ranks.train` does."""
    from torch import distributed

    distributed.init_process_group("gloo")
    ctx = hopsgpu.context()
    local = Path(tempfile.gettempdir()) / "state"

    def saves(step: int) -> bool:
        # Every rank asks, whichever saves.
        due = ctx.should_checkpoint(step) or is_due(step, saved)
        return due and ctx.rank == 0

    train_in(Path(events), seconds, ctx.latest_checkpoint(), local, saves, ctx.save_checkpoint)


@contextlib.contextmanager
def on_cluster() -> Iterator[None]:
    """Have a development cluster, and a session on it, meanwhile."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="hopsgpu-bench-") as directory:
        state = Path(directory) / "cluster"
        try:
            devcluster.up(state, keep_classes=True)
            os.environ.update(devcluster.environment(state))
            spark = hopsgpu.session("bench")
            try:
                yield
            finally:
                spark.stop()
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
            devcluster.down(state)


class _Told(logging.Handler):
    """Keeps when the driver learned of executors: by a message, in seconds since the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.moments.append((record.created, record.getMessage()))

    def first(self, words: str, since: float) -> float | None:
        """Return when a message with these words first came after a time."""
        return next((at for at, text in list(self.moments) if at > since and words in text), None)


class GangWorld:
    """A run of an elastic gang."""

    def __init__(self, run: Run, events: EventFile, told: _Told) -> None:
        self._run = run
        self._events = events
        self._told = told
        self._removed = 0.0

    @property
    def events(self) -> Sequence[Event]:
        return self._events.read()

    def remove(self) -> float:
        """Kill the executor of the last rank of the present world with all its processes."""
        latest = self.events[-1].world
        steps = (event for event in self.events if event.world == latest)
        last = max(steps, key=lambda event: (event.rank, event.time))
        container = _environment(last.pid)["CONTAINER_ID"]
        killed = time.time()
        for process in Path("/proc").glob("[0-9]*"):
            if _environment(int(process.name)).get("CONTAINER_ID") == container:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
        self._removed = killed
        return killed

    def add(self) -> float:
        """Wait for the executor that hopsgpu has asked for; return when it was ready."""
        return wait_for(
            lambda: self._told.first("is warm", self._removed), "warm executor", self.told
        )

    def held_seconds(self) -> float:
        """Return the GPU seconds so far, of executors from their arrival on."""
        return self._run.status().gpu_seconds.held

    def noticed(self, since: float) -> float | None:
        return self._told.first("executor lost", since)

    def told(self) -> str:
        return "\n".join(text for _, text in self._told.moments[-20:])


@dataclass(frozen=True)
class Elastic:
    """`hopsgpu.launch` with two sizes.

    Attributes:
        saved: steps between two checkpoints; 0 for none.
    """

    saved: int = SAVED
    name: ClassVar[str] = "hopsgpu"

    @contextlib.contextmanager
    def world(self, least: int, most: int) -> Iterator[GangWorld]:
        told, log = _Told(), logging.getLogger("hopsgpu")
        level = log.level
        os.environ["HOPSGPU_ELASTIC_INTERVAL"] = _INTERVAL
        log.addHandler(told)
        log.setLevel(logging.DEBUG)
        try:
            with tempfile.TemporaryDirectory(prefix="hopsgpu-bench-") as directory:
                path = Path(directory) / "events"
                events = EventFile(path)
                path.chmod(0o666)
                run = hopsgpu.submit(
                    train,
                    args=(str(path), 10 * WAIT_SECONDS, self.saved),
                    workers=(least, most),
                    memory_per_worker=_MEMORY,
                    progress="off",
                )
                try:
                    yield GangWorld(run, events, told)
                finally:
                    run.cancel()
                    run.wait()
        finally:
            log.setLevel(level)
            log.removeHandler(told)
            del os.environ["HOPSGPU_ELASTIC_INTERVAL"]


def _environment(pid: int) -> dict[str, str]:
    """Return a process's environment; empty for one that is gone, or that is not ours."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}
