"""The ranks' output at the driver: shown line by line, kept whole for the lake, with metrics."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from hopsgpu.agent.rank_logs import LineSplitter
from hopsgpu.core.gang import RankPlacement, World
from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.core.metrics import Metrics, record_name
from hopsgpu.display.progress import Progress
from hopsgpu.errors import StoreError
from hopsgpu.linux import allow_descriptors
from hopsgpu.storage.error_messages import DAMAGED, UNSUPPORTED
from hopsgpu.storage.lake import LakePath

# Bytes of a large output that are in memory, and appended, at a time.
_CHUNK = 4 * 2**20
# A file on a lake that cannot append is written anew once this share of it would be new. So all
# writes of a log together are about five times its size, and a small log is always up to date.
_NEW_SHARE = 0.2
# Kinds of error after which a file on the lake must be rewritten: its length is not what was
# appended before, or the lake cannot append at all.
_REWRITE_KINDS = frozenset({DAMAGED, UNSUPPORTED})


class OutputSpool:
    """The whole output of a rank, in a file on the driver's disk.

    The file has no name, so nothing of it remains however the driver ends. It is created at the
    first byte. A full disk ends only the recording, not the run. One thread writes; another may
    upload to the lake at the same time.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._last = b"\n"
        self._missing = 0
        self._problem = ""
        self._size = 0
        self._there = 0
        self._is_followed = False
        self._is_rewritten = False
        # Prevents reads from the descriptor of a file that has been closed.
        self._reading = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether no output has arrived."""
        return self._file is None and not self._problem

    @property
    def size(self) -> int:
        """Number of bytes that were kept."""
        return self._size

    @property
    def is_on_lake(self) -> bool:
        """Whether at least a part of the output is on the lake."""
        return self._there > 0

    @property
    def has_grown(self) -> bool:
        """Whether there is output that is not yet on the lake."""
        return self._size > self._there

    def write(self, chunk: bytes) -> None:
        """Append output that arrived."""
        left = memoryview(chunk)
        try:
            if self._file is None and not self._problem:
                # The owner of this spool closes it.
                self._file = tempfile.TemporaryFile(prefix="hopsgpu-", buffering=0)  # noqa: SIM115
            while self._file is not None and left and not self._problem:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._problem = str(error)
        self._missing += len(left)
        self._size += len(chunk) - len(left)
        self._last = chunk[-1:] or self._last

    def note(self, text: str) -> None:
        """Append a line from hopsgpu itself."""
        before = "" if self._last == b"\n" else "\n"
        self.write(f"{before}hopsgpu: {text}\n".encode())

    def follow(self, target: LakePath) -> None:
        """Append to a file on the lake what has arrived since the last call.

        If the lake cannot append, the file is written anew, unless there is little new.

        Raises:
            StoreError: the lake refused; the next call appends what is missing.
        """
        size = self._size
        if self._is_rewritten:
            self._rewrite(target, _NEW_SHARE)
            return
        try:
            self._append(target, size)
        except StoreError as error:
            if error.kind != UNSUPPORTED:
                raise
            self._is_rewritten = True
            self._rewrite(target, _NEW_SHARE)

    def _append(self, target: LakePath, size: int) -> None:
        while self._there < size:
            chunk = self._read(self._there, min(_CHUNK, size - self._there))
            if not chunk:  # closed meanwhile
                return
            self._is_followed = True
            self._there = target.append(chunk, self._there)

    def upload(self, target: LakePath) -> None:
        """Write everything that is not yet on the lake; wait as long as it takes.

        If the lake refuses, what was written before stays.

        Raises:
            StoreError: the lake refused, or the driver's disk was full.
        """
        if self._is_followed:
            self._upload_rest(target)
        elif self._file is None:
            target.write(b"")
        else:
            target.upload(self._path(self._file))
            self._there = self._size
        if self._problem:
            raise StoreError(
                f"{target.url} lacks its last {self._missing:,} bytes: the driver could not keep"
                f" them in its directory of temporary files ({self._problem})"
            )

    def _upload_rest(self, target: LakePath) -> None:
        """Append the rest, or replace the file if appending is impossible."""
        try:
            if not self._is_rewritten:
                self._append(target, self._size)
        except StoreError as error:
            if error.kind not in _REWRITE_KINDS:
                raise
            self._is_rewritten = True
        if self._is_rewritten:
            self._rewrite(target, 0.0)

    def _rewrite(self, target: LakePath, least_new: float) -> None:
        """Replace the file if at least this share of it is new."""
        with self._reading:
            if self._file is None or self._file.closed:
                return
            path = self._path(self._file)
            size = self._size
            if size > self._there and size - self._there >= least_new * size:
                target.replace_with(path)
                self._there = size

    def _path(self, file: IO[bytes]) -> Path:
        return Path(f"/proc/self/fd/{file.fileno()}")

    def _read(self, at: int, count: int) -> bytes:
        with self._reading:
            if self._file is None or self._file.closed:
                return b""
            return os.pread(self._file.fileno(), count, at)

    def close(self) -> None:
        """Close the file, which removes it."""
        with self._reading:
            if self._file is not None:
                self._file.close()


class RankOutput:
    """One rank's output at the driver.

    Args:
        rank: number of the rank.
        host: name of the node.
        show: displays the lines.
        clock: returns a time in seconds.
    """

    def __init__(
        self, rank: int, host: str, show: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spool = OutputSpool()
        self._rank = rank
        self._host = host
        self._show = show
        self._splitter = LineSplitter(clock)

    def take(self, chunk: bytes) -> None:
        """Keep output that arrived, and show the lines that it completes."""
        self.spool.write(chunk)
        self._line(self._splitter.lines(chunk))

    def refresh(self) -> None:
        """Show the state of a progress bar, if it is time to."""
        self._line(self._splitter.due_state())

    def ended(self) -> None:
        """Show the last line, if it is incomplete."""
        self._line(self._splitter.rest())

    def lost(self, reason: str) -> None:
        """Say in the log and in the display that the end of the output may be missing."""
        self.ended()
        why = " ".join(reason.split()) or "its connection ended"
        text = (
            f"the executor of rank {self._rank} on {self._host} was lost ({why});"
            " the end of its output may be missing"
        )
        self.note(text)

    def note(self, text: str) -> None:
        """Say something in the log and in the display, in a line of hopsgpu's own."""
        self.spool.note(text)
        self._line([f"hopsgpu: {text}"])

    def _line(self, lines: Sequence[str]) -> None:
        if lines:
            self._show.line(self._rank, self._host, *lines)


class Logs:
    """The output of ranks that have ended, ready for the lake.

    Args:
        spools: the outputs, by the name of their file on the lake.
    """

    def __init__(self, spools: Mapping[str, OutputSpool]) -> None:
        self._spools = spools

    def uploads(self, directory: LakePath) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield for each file its URL and a function that uploads it, then closes the spool.

        The function raises StoreError if the lake refuses, or if the driver's disk was full; it
        closes the spool in any case.

        Args:
            directory: the directory of the files; created if missing.
        """
        for name, spool in self._spools.items():
            target = directory / name
            yield target.url, functools.partial(_upload, spool, directory, target)


def _follow(spool: OutputSpool, directory: LakePath, target: LakePath) -> None:
    # What the lake refuses now is tried again soon; an error at the end is reported.
    with contextlib.suppress(StoreError):
        if not spool.is_on_lake:
            directory.make()
        spool.follow(target)


def _upload(spool: OutputSpool, directory: LakePath, target: LakePath) -> None:
    with contextlib.closing(spool):
        if not spool.is_on_lake:
            directory.make()
        spool.upload(target)


class Outputs:
    """The output of all processes of a gang; discarded on exit unless it was taken over.

    Args:
        world: the gang.
        show: displays the lines.
        clock: returns a time in seconds.
    """

    def __init__(
        self, world: World, show: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._places: Mapping[int, RankPlacement] = {place.rank: place for place in world.processes}
        self._ranks = {
            rank: RankOutput(rank, place.container.host, show, clock)
            for rank, place in self._places.items()
        }
        self._records = {rank: OutputSpool() for rank in self._places}
        self._metrics = Metrics(self._places)
        self._agents: dict[int, OutputSpool] = {}
        self._keeps_agents = False
        self._owned = contextlib.ExitStack()

    def __enter__(self) -> Outputs:
        # Two files for each process, its executor's connection, and its agent's log.
        allow_descriptors(4 * len(self._places))
        for spool in (*(output.spool for output in self._ranks.values()), *self._records.values()):
            self._owned.callback(spool.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owned.close()

    def take(self, rank: int, chunk: bytes) -> None:
        """Keep and show output of a rank."""
        self._ranks[rank].take(chunk)

    def take_record(self, rank: int, chunk: bytes) -> None:
        """Keep a chunk of a rank's file of reports and GPU samples."""
        self._records[rank].write(chunk)

    def take_agent_log(self, index: int, content: bytes) -> None:
        """Keep the end of an agent's own log, in case the attempt fails.

        Args:
            index: index of the agent's container in the gang.
            content: the end of the log; replaces what the agent sent before.
        """
        if (before := self._agents.pop(index, None)) is not None:
            before.close()
        spool = self._agents[index] = OutputSpool()
        self._owned.callback(spool.close)
        spool.write(content)

    def keep_agent_logs(self) -> None:
        """Include the agents' own logs with the ranks' on the lake: the attempt has failed."""
        self._keeps_agents = True

    def take_reports(self, rank: int, chunk: bytes) -> Sequence[GpuSample]:
        """Process a message of the agent's `follow_reports`; return the samples in it."""
        return self._metrics.add_chunk(rank, chunk)

    def refresh(self) -> None:
        """Show progress bars that have advanced; call this several times a second."""
        for output in self._ranks.values():
            output.refresh()

    def ended(self, rank: int) -> None:
        """Record that all of a rank's output has arrived."""
        self._ranks[rank].ended()

    def lost(self, rank: int, reason: str) -> None:
        """Record that no more output of a rank will arrive, although some may be missing."""
        self._ranks[rank].lost(reason)

    def note(self, rank: int, text: str) -> None:
        """Say something in a rank's log and in the display, in a line of hopsgpu's own."""
        self._ranks[rank].note(text)

    def unused(self, rank: int) -> float:
        """Return the seconds in which a rank's GPUs were not used; 0 if that is unknown."""
        return self._metrics.unused_seconds(rank)

    def metrics(self) -> tuple[Mapping[str, float], ...]:
        """Return the last values of each rank, as `Metrics.last` does."""
        return self._metrics.last_values()

    def utilisation(self, rank: int) -> float | None:
        """Return the mean utilisation of a rank's GPUs, in [0, 1]; None if it is unknown."""
        return self._metrics.utilisation(rank)

    def warnings(self, rank: int) -> list[str]:
        """Return warnings about a rank's metrics at its end, above all about an idle GPU."""
        return self._metrics.warnings(rank, self._places[rank].container.host)

    def sizes(self) -> dict[str, int]:
        """Return the bytes so far of each file that will be on the lake at the end."""
        return {name: spool.size for name, spool in self._files().items()}

    def grown(self, directory: LakePath) -> list[tuple[str, Callable[[], None]]]:
        """Return for each file that has grown its URL, and a function that appends the new part.

        Args:
            directory: the directory of the files; created if missing.
        """
        return [
            ((target := directory / name).url, functools.partial(_follow, spool, directory, target))
            for name, spool in self._files().items()
            if spool.has_grown
        ]

    def take_over(self) -> Logs:
        """Return the files for the lake; the caller owns them now, and must add no more output.

        There is a file `rank-<rank>.log` for each rank; `metrics-<rank>.jsonl` if the rank reported
        something or its GPUs were sampled; and, if the agents' logs are kept, `agent-<index>.log`
        for each container whose agent has sent its log.
        """
        self._owned.pop_all()
        for spool in () if self._keeps_agents else self._agents.values():
            spool.close()
        return Logs(self._files())

    def _files(self) -> dict[str, OutputSpool]:
        logs = {f"rank-{rank}.log": output.spool for rank, output in self._ranks.items()}
        records = {
            record_name(rank): spool for rank, spool in self._records.items() if not spool.is_empty
        }
        agents = self._agents.copy() if self._keeps_agents else {}
        return logs | records | {f"agent-{index}.log": spool for index, spool in agents.items()}
