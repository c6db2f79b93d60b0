"""The ranks' output and metrics at the driver: displayed line by line, and kept for the lake."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from hopsgpu.agent.rank_logs import LineSplitter
from hopsgpu.core.gang import RankPlacement, World
from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.core.metrics import Metrics, record_name
from hopsgpu.core.output_limits import LOG_LIMIT, cut_note
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
    """The output of a rank, in a file on the driver's disk.

    The file has no name, so the kernel removes it however the driver ends. The first byte creates
    it. If the disk is full, the recording ends but not the run. One thread writes; another one may
    upload at the same time.

    Once the output exceeds the limit, later output overwrites the oldest bytes of the file's second
    half. Before the last upload, `_close_ring` puts these in order, behind a note.

    Args:
        limit: bytes of the file.
        note: returns the bytes in the place of so many missing ones.
    """

    def __init__(
        self, limit: int = LOG_LIMIT, note: Callable[[int], bytes] = lambda _count: b"\n"
    ) -> None:
        self._half = limit // 2
        self._note_of = note
        self.cut = 0
        self._file: IO[bytes] | None = None
        self._last = b"\n"
        self._missing = 0
        self._problem = ""
        self._size = 0
        self._uploaded_bytes = 0
        self._is_followed = False
        self._is_rewritten = False
        # Prevents reads from the descriptor of a file that has been closed.
        self._reading = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return self._file is None and not self._problem

    @property
    def size(self) -> int:
        """The bytes of the file; it had more output if the limit cut some."""
        return self._size if self.is_in_order else 2 * self._half

    @property
    def is_in_order(self) -> bool:
        """Whether the file has the bytes in their order, without later ones in the place of old."""
        return self.cut > 0 or self._size <= 2 * self._half

    @property
    def is_on_lake(self) -> bool:
        """Whether the lake has at least a part of the output."""
        return self._uploaded_bytes > 0

    @property
    def has_grown(self) -> bool:
        """Whether there is output that is not yet on the lake."""
        return min(self._size, self._half) > self._uploaded_bytes

    def write(self, chunk: bytes) -> None:
        unwritten = memoryview(chunk)
        try:
            if self._file is None and not self._problem:
                # The owner of this spool closes it.
                self._file = tempfile.TemporaryFile(prefix="hopsgpu-", buffering=0)  # noqa: SIM115
            while self._file is not None and unwritten and not self._problem:
                at, room = self._position()
                self._file.seek(at)
                count = self._file.write(unwritten[:room])
                unwritten = unwritten[count:]
                self._size += count
        except OSError as error:
            self._problem = str(error)
        self._missing += len(unwritten)
        self._last = chunk[-1:] or self._last

    def _position(self) -> tuple[int, int]:
        """Return where in the file the next byte belongs, and how many fit there."""
        if self._size < self._half:
            return self._size, self._half - self._size
        at = (self._size - self._half) % self._half
        return self._half + at, self._half - at

    def note(self, text: str) -> None:
        """Append a line from hopsgpu itself."""
        before = "" if self._last == b"\n" else "\n"
        self.write(f"{before}hopsgpu: {text}\n".encode())

    def follow(self, target: LakePath) -> None:
        """Append the output since the last call to a file on the lake, up to half of the limit.

        If the lake cannot append, the file is rewritten, unless there is little new output.

        Raises:
            StoreError: the lake refused; the next call appends the missing bytes.
        """
        if self._is_rewritten:
            self._rewrite(target, _NEW_SHARE)
            return
        try:
            self._append(target, min(self._size, self._half))
        except StoreError as error:
            if error.kind != UNSUPPORTED:
                raise
            self._is_rewritten = True
            self._rewrite(target, _NEW_SHARE)

    def _append(self, target: LakePath, size: int) -> None:
        while self._uploaded_bytes < size:
            chunk = self._read(self._uploaded_bytes, min(_CHUNK, size - self._uploaded_bytes))
            if not chunk:  # closed meanwhile
                return
            self._is_followed = True
            self._uploaded_bytes = target.append(chunk, self._uploaded_bytes)

    def upload(self, target: LakePath) -> None:
        """Write the rest to the lake, without a time limit.

        If the lake refuses, the file keeps its earlier content.

        Raises:
            StoreError: the lake refused, or the driver's disk was full.
        """
        self._close_ring()
        if self._is_followed:
            self._upload_rest(target)
        elif self._file is None:
            target.write(b"")
        else:
            target.upload(self._path(self._file))
            self._uploaded_bytes = self._size
        if self._problem:
            raise StoreError(
                f"{target.url} lacks its last {self._missing:,} bytes: the driver could not keep"
                f" them in its directory of temporary files ({self._problem})"
            )

    def _close_ring(self) -> None:
        """Put the end of the output in order, behind a note about the bytes before it."""
        if self._file is None or self.is_in_order:
            return
        file, half = self._file.fileno(), self._half
        cut, oldest = self._size - 2 * half, self._position()[0]
        note = self._note_of(cut)
        try:
            with tempfile.TemporaryFile(prefix="hopsgpu-", buffering=0) as ring:
                _copy(file, oldest, 2 * half, ring.fileno(), 0)
                _copy(file, half, oldest, ring.fileno(), 2 * half - oldest)
                os.pwrite(file, note, half)
                _copy(ring.fileno(), 0, half, file, half + len(note))
            self._size = 2 * half + len(note)
        except OSError as error:
            os.ftruncate(file, half)
            self._problem = str(error)
            self._missing += half
            self._size = half
        self.cut = cut

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
            if self._file is None or self._file.closed or not self.is_in_order:
                return
            path = self._path(self._file)
            size = self._size
            if size > self._uploaded_bytes and size - self._uploaded_bytes >= least_new * size:
                target.replace_with(path)
                self._uploaded_bytes = size

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


def _copy(source: int, begin: int, end: int, target: int, at: int) -> None:
    """Copy a part of a file to a position in another one.

    Raises:
        OSError: the disk is full.
    """
    while begin < end:
        count = os.pwrite(target, os.pread(source, min(_CHUNK, end - begin), begin), at)
        begin, at = begin + count, at + count


def _cut_note(limit: int, count: int) -> bytes:
    return b"\n" + cut_note(count, f"spark.hopsgpu.log.limit is {limit:,} bytes")


class RankOutput:
    """One rank's output at the driver."""

    def __init__(
        self,
        rank: int,
        host: str,
        show: Progress,
        clock: Callable[[], float] = time.monotonic,
        log_limit: int = LOG_LIMIT,
    ) -> None:
        self.spool = OutputSpool(log_limit, functools.partial(_cut_note, log_limit))
        self._rank = rank
        self._host = host
        self._show = show
        self._splitter = LineSplitter(clock)

    def add(self, chunk: bytes) -> None:
        """Keep a chunk of output, and show the lines that the chunk completes."""
        self.spool.write(chunk)
        self._line(self._splitter.lines(chunk))

    def refresh(self) -> None:
        """Show the state of a progress bar if it is due."""
        self._line(self._splitter.due_state())

    def finish(self) -> None:
        """Show an incomplete last line."""
        self._line(self._splitter.rest())

    def record_loss(self, reason: str) -> None:
        """Note in the log and the display that the end of the output may be missing."""
        self.finish()
        why = " ".join(reason.split()) or "its connection ended"
        text = (
            f"the executor of rank {self._rank} on {self._host} was lost ({why});"
            " the end of its output may be missing"
        )
        self.note(text)

    def note(self, text: str) -> None:
        """Add a line of hopsgpu's own to the log and the display."""
        self.spool.note(text)
        self._line([f"hopsgpu: {text}"])

    def _line(self, lines: Sequence[str]) -> None:
        if lines:
            self._show.line(self._rank, self._host, *lines)


class Logs:
    """The output of ranks that have ended, ready for the lake."""

    def __init__(self, spools: Mapping[str, OutputSpool]) -> None:
        self._spools = spools

    def uploads(self, directory: LakePath) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield for each file its URL and a function that uploads it, then closes the spool.

        The function raises StoreError if the lake refuses, or if the driver's disk was full; it
        closes the spool in any case.
        """
        for name, spool in self._spools.items():
            target = directory / name
            yield target.url, functools.partial(_upload, spool, directory, target)


def _follow(spool: OutputSpool, directory: LakePath, target: LakePath) -> None:
    # The caller retries soon, and the upload at the end reports errors.
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
    """The output of all processes of a gang; removed on exit, unless `take_over` was called."""

    def __init__(
        self,
        world: World,
        show: Progress,
        clock: Callable[[], float] = time.monotonic,
        log_limit: int = LOG_LIMIT,
    ) -> None:
        self._places: Mapping[int, RankPlacement] = {place.rank: place for place in world.processes}
        self._ranks = {
            rank: RankOutput(rank, place.container.host, show, clock, log_limit)
            for rank, place in self._places.items()
        }
        self._records = {rank: OutputSpool(log_limit) for rank in self._places}
        self._log_limit = log_limit
        self._metrics = Metrics(self._places)
        self._agents: dict[int, OutputSpool] = {}
        self._should_upload_agent_logs = False
        self._owned = contextlib.ExitStack()

    def __enter__(self) -> Outputs:
        # Two files for each process, its executor's connection, and its agent's log.
        allow_descriptors(4 * len(self._places))
        for spool in (*(output.spool for output in self._ranks.values()), *self._records.values()):
            self._owned.callback(spool.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._owned.close()

    def add(self, rank: int, chunk: bytes) -> None:
        """Keep and show output of a rank."""
        self._ranks[rank].add(chunk)

    def add_record(self, rank: int, chunk: bytes) -> None:
        """Keep a chunk of a rank's file of reports and GPU samples."""
        self._records[rank].write(chunk)

    def set_agent_log(self, index: int, content: bytes) -> None:
        """Keep the end of an agent's own log, in case the attempt fails."""
        if (before := self._agents.pop(index, None)) is not None:
            before.close()
        spool = self._agents[index] = OutputSpool()
        self._owned.callback(spool.close)
        spool.write(content)

    def request_agent_log_upload(self) -> None:
        """Upload the agents' own logs too, because the attempt has failed."""
        self._should_upload_agent_logs = True

    def add_reports(self, rank: int, chunk: bytes) -> Sequence[GpuSample]:
        """Process a message of the agent's `follow_reports`; return the samples in it."""
        return self._metrics.add_chunk(rank, chunk)

    def refresh(self) -> None:
        """Show progress bars that have advanced; call this several times a second."""
        for output in self._ranks.values():
            output.refresh()

    def record_end(self, rank: int) -> None:
        """Record that all output of a rank has arrived."""
        self._ranks[rank].finish()

    def record_loss(self, rank: int, reason: str) -> None:
        """Record that no more output of a rank arrives, although some may be missing."""
        self._ranks[rank].record_loss(reason)

    def note(self, rank: int, text: str) -> None:
        """Say something in a rank's log and in the display, in a line of hopsgpu's own."""
        self._ranks[rank].note(text)

    def unused_seconds(self, rank: int) -> float:
        """Return the seconds in which a rank's GPUs were unused; 0 if unknown."""
        return self._metrics.unused_seconds(rank)

    def metrics(self) -> tuple[Mapping[str, float], ...]:
        return self._metrics.last_values()

    def utilisation(self, rank: int) -> float | None:
        """Return the mean utilisation of a rank's GPUs, in [0, 1]; None if unknown."""
        return self._metrics.utilisation(rank)

    def warnings(self, rank: int) -> list[str]:
        """Return warnings about a rank's metrics at its end, above all about an idle GPU."""
        warnings = self._metrics.warnings(rank, self._places[rank].container.host)
        if not self._records[rank].is_in_order:
            warnings.append(
                f"{record_name(rank)} has only the first and the last reports of rank {rank}:"
                f" spark.hopsgpu.log.limit is {self._log_limit:,} bytes"
            )
        return warnings

    def sizes(self) -> dict[str, int]:
        """Return the bytes so far of each file for the lake."""
        return {name: spool.size for name, spool in self._files().items()}

    def pending_appends(self, directory: LakePath) -> list[tuple[str, Callable[[], None]]]:
        """Return for each file that has grown its URL, and a function that appends the new part."""
        return [
            ((target := directory / name).url, functools.partial(_follow, spool, directory, target))
            for name, spool in self._files().items()
            if spool.has_grown
        ]

    def take_over(self) -> Logs:
        """Return the files for the lake. The caller now owns them, and must add no more output.

        There is a file `rank-<rank>.log` for each rank; `metrics-<rank>.jsonl` if the rank reported
        something or its GPUs were sampled; and, if the agents' logs are kept, `agent-<index>.log`
        for each container whose agent has sent its log.
        """
        self._owned.pop_all()
        for spool in () if self._should_upload_agent_logs else self._agents.values():
            spool.close()
        return Logs(self._files())

    def _files(self) -> dict[str, OutputSpool]:
        logs = {f"rank-{rank}.log": output.spool for rank, output in self._ranks.items()}
        records = {
            record_name(rank): spool for rank, spool in self._records.items() if not spool.is_empty
        }
        agents = self._agents.copy() if self._should_upload_agent_logs else {}
        return logs | records | {f"agent-{index}.log": spool for index, spool in agents.items()}
