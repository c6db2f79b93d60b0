"""The driver's side of what ranks write: shown by lines, kept whole for the lake, measured."""

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
from hopsgpu.core.gang import RankPlace, World
from hopsgpu.core.metrics import Metrics, record_name
from hopsgpu.display.progress import Progress
from hopsgpu.errors import StoreError
from hopsgpu.linux import allow_descriptors
from hopsgpu.storage.error_messages import DAMAGED, UNSUPPORTED
from hopsgpu.storage.lake import Lake

# Of a large output so much is in memory, and appended, at a time.
_CHUNK = 4 * 2**20
# Another length than what was appended before, and no appending at all: nothing can be added.
_MADE_ANEW = frozenset({DAMAGED, UNSUPPORTED})


class Spool:
    """A rank's output, whole, in a file on the driver's disk.

    The file has no name: whatever ends the driver, nothing is left of it. There is none before
    the first byte. A full disk ends the keeping, and not the run. One thread writes; another may
    bring it to the lake meanwhile.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._last = b"\n"
        self._missing = 0
        self._problem = ""
        self._size = 0
        self._there = 0
        self._is_followed = False
        # Nothing is read by the number of a file that has been closed.
        self._reading = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was to be kept."""
        return self._file is None and not self._problem

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._size

    @property
    def is_on_lake(self) -> bool:
        """Whether a part of it is."""
        return self._there > 0

    @property
    def has_grown(self) -> bool:
        """Whether there is more than is on the lake."""
        return self._size > self._there

    def write(self, chunk: bytes) -> None:
        """Keeps what arrived, in order."""
        left = memoryview(chunk)
        try:
            if self._file is None and not self._problem:
                # Closed by whoever owns this.
                self._file = tempfile.TemporaryFile(prefix="hopsgpu-", buffering=0)  # noqa: SIM115
            while self._file is not None and left and not self._problem:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._problem = str(error)
        self._missing += len(left)
        self._size += len(chunk) - len(left)
        self._last = chunk[-1:] or self._last

    def note(self, text: str) -> None:
        """Adds a line of ours."""
        before = "" if self._last == b"\n" else "\n"
        self.write(f"{before}hopsgpu: {text}\n".encode())

    def follow(self, target: Lake) -> None:
        """Appends to the lake what has come since the last time.

        Raises:
            StoreError: the lake refused; what is missing there comes with the next time.
        """
        size = self._size
        while self._there < size:
            chunk = self._read(self._there, min(_CHUNK, size - self._there))
            if not chunk:  # closed meanwhile
                return
            self._is_followed = True
            self._there = target.append(chunk, self._there)

    def upload(self, target: Lake) -> None:
        """Brings all that is not there yet to the lake; waits as long as it takes.

        Where the lake refuses, what came there before stays.

        Raises:
            StoreError: the lake refused, or the driver's disk had been full.
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

    def _upload_rest(self, target: Lake) -> None:
        """Appends it, or makes the file anew where that cannot be."""
        try:
            self.follow(target)
        except StoreError as error:
            if error.kind not in _MADE_ANEW or self._file is None:
                raise
            target.replace_with(self._path(self._file))
            self._there = self._size

    def _path(self, file: IO[bytes]) -> Path:
        return Path(f"/proc/self/fd/{file.fileno()}")

    def _read(self, at: int, count: int) -> bytes:
        with self._reading:
            if self._file is None or self._file.closed:
                return b""
            return os.pread(self._file.fileno(), count, at)

    def close(self) -> None:
        """Lets go of the file."""
        with self._reading:
            if self._file is not None:
                self._file.close()


class RankOutput:
    """One rank's output at the driver.

    Args:
        rank: of the gang.
        host: the node's name.
        show: is given the lines.
        clock: seconds.
    """

    def __init__(
        self, rank: int, host: str, show: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spool = Spool()
        self._rank = rank
        self._host = host
        self._show = show
        self._splitter = LineSplitter(clock)

    def take(self, chunk: bytes) -> None:
        """Keeps what arrived, and shows the lines that it completes."""
        self.spool.write(chunk)
        self._line(self._splitter.lines(chunk))

    def refresh(self) -> None:
        """Shows the state of a progress bar, where it is time to."""
        self._line(self._splitter.due())

    def ended(self) -> None:
        """Shows the last line, where it did not end."""
        self._line(self._splitter.rest())

    def lost(self, reason: str) -> None:
        """Says in the log and to the person that what followed did not arrive."""
        self.ended()
        why = " ".join(reason.split()) or "its connection ended"
        text = (
            f"the executor of rank {self._rank} on {self._host} was lost ({why});"
            " what it wrote last may be missing"
        )
        self.spool.note(text)
        self._line([f"hopsgpu: {text}"])

    def _line(self, lines: Sequence[str]) -> None:
        if lines:
            self._show.line(self._rank, self._host, *lines)


class Logs:
    """What ranks that have ended wrote, on its way to the lake.

    Args:
        spools: by the name of the file to be.
    """

    def __init__(self, spools: Mapping[str, Spool]) -> None:
        self._spools = spools

    def uploads(self, directory: Lake) -> Iterator[tuple[str, Callable[[], None]]]:
        """For each file its URL and what brings it there, which lets go of it however it ends.

        It raises StoreError where the lake refuses, or the driver's disk had been full.

        Args:
            directory: made where it is not there.
        """
        for name, spool in self._spools.items():
            target = directory / name
            yield target.url, functools.partial(_bring, spool, directory, target)


def _follow(spool: Spool, directory: Lake, target: Lake) -> None:
    # What the lake refuses now is tried again soon, and told at the end.
    with contextlib.suppress(StoreError):
        if not spool.is_on_lake:
            directory.make()
        spool.follow(target)


def _bring(spool: Spool, directory: Lake, target: Lake) -> None:
    with contextlib.closing(spool):
        if not spool.is_on_lake:
            directory.make()
        spool.upload(target)


class Outputs:
    """What all processes of a gang write; removed at the end, where it was not taken over.

    Args:
        world: the gang.
        show: is given each line.
        clock: seconds.
    """

    def __init__(
        self, world: World, show: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._places: Mapping[int, RankPlace] = {place.rank: place for place in world.processes}
        self._ranks = {
            rank: RankOutput(rank, place.container.host, show, clock)
            for rank, place in self._places.items()
        }
        self._records = {rank: Spool() for rank in self._places}
        self._metrics = Metrics(self._places)
        self._agents: dict[int, Spool] = {}
        self._keeps_agents = False
        self._owned = contextlib.ExitStack()

    def __enter__(self) -> Outputs:
        # Two files for each process, and its executor's connection and its agent's log.
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
        """Keeps and shows what a rank wrote."""
        self._ranks[rank].take(chunk)

    def take_record(self, rank: int, chunk: bytes) -> None:
        """Keeps what a rank's file of reports and GPU samples holds."""
        self._records[rank].write(chunk)

    def take_agent_log(self, index: int, content: bytes) -> None:
        """Keeps the end of an agent's own log, for an attempt that fails.

        Args:
            index: of its container in the gang.
            content: which replaces what it sent before.
        """
        if (before := self._agents.pop(index, None)) is not None:
            before.close()
        spool = self._agents[index] = Spool()
        self._owned.callback(spool.close)
        spool.write(content)

    def keep_agent_logs(self) -> None:
        """Has the agents' own logs brought to the lake with the ranks': the attempt has failed."""
        self._keeps_agents = True

    def take_reports(self, rank: int, folded: bytes) -> None:
        """Takes in what `follow_reports` sent."""
        self._metrics.take(rank, folded)

    def refresh(self) -> None:
        """Shows progress bars that have gone on; to be called some times a second."""
        for output in self._ranks.values():
            output.refresh()

    def ended(self, rank: int) -> None:
        """Notes that all of a rank's output has come."""
        self._ranks[rank].ended()

    def lost(self, rank: int, reason: str) -> None:
        """Notes that no more of a rank's output will come, though there may be more."""
        self._ranks[rank].lost(reason)

    def metrics(self) -> tuple[Mapping[str, float], ...]:
        """The last values of each rank, as `Metrics.last` gives them."""
        return self._metrics.last()

    def utilisation(self, rank: int) -> float | None:
        """The mean utilisation of a rank's GPUs, share in [0, 1]; None where it is not known."""
        return self._metrics.utilisation(rank)

    def warnings(self, rank: int) -> list[str]:
        """What a person should know of a rank's measures at its end, an idle GPU above all."""
        return self._metrics.warnings(rank, self._places[rank].container.host)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that is to be on the lake at the end, so far."""
        return {name: spool.size for name, spool in self._files().items()}

    def grown(self, directory: Lake) -> list[tuple[str, Callable[[], None]]]:
        """For each file that has grown its URL, and what brings the new part to the lake.

        Args:
            directory: made where it is not there.
        """
        return [
            ((target := directory / name).url, functools.partial(_follow, spool, directory, target))
            for name, spool in self._files().items()
            if spool.has_grown
        ]

    def take_over(self) -> Logs:
        """What there is for the lake; it is the caller's from now on, and nothing can follow.

        A file `rank-<rank>.log` for each rank, and `metrics-<rank>.jsonl` where it reported
        something or its GPUs were sampled; `agent-<index>.log` of each container whose agent has
        sent it, where these are kept.
        """
        self._owned.pop_all()
        for spool in () if self._keeps_agents else self._agents.values():
            spool.close()
        return Logs(self._files())

    def _files(self) -> dict[str, Spool]:
        logs = {f"rank-{rank}.log": output.spool for rank, output in self._ranks.items()}
        records = {
            record_name(rank): spool for rank, spool in self._records.items() if not spool.is_empty
        }
        kept = self._agents.copy() if self._keeps_agents else {}
        return logs | records | {f"agent-{index}.log": spool for index, spool in kept.items()}
