"""`hopsgpu logs`: what the ranks of a run wrote, as it reaches the lake."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Protocol

import click

from hopsgpu.artifacts.run_logs import LogReader, RankLog, log_sizes, parse_log_name
from hopsgpu.cli.lake_root import lake_root, root_option
from hopsgpu.cli.output import TerminalFilter, echo
from hopsgpu.core.run_record import APPLICATION_ID
from hopsgpu.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from hopsgpu.artifacts.runs import RunStore
    from hopsgpu.core.run_record import RunRecord, SearchRecord

_POLL_SECONDS = 2.0
# The driver uploads the rest of the logs after it has recorded the end of the run.
_REST_SECONDS = 60.0
# A longer line is cut, so that it does not fill the memory.
_LONGEST_LINE = 2**20
_MAX_RANKS = 4096
Write = Callable[[bytes], object]


@click.command()
@root_option
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="Show only this rank (repeatable).",
)
@click.option("--trial", type=click.IntRange(0), metavar="N", help="Show this trial of a search.")
@click.option("--worker", type=click.IntRange(0), metavar="N", help="Show this worker of a score.")
@click.option(
    "--attempt",
    type=click.IntRange(0),
    metavar="N",
    help="Show this attempt.  [default: the last]",
)
@click.option("--follow", "-f", is_flag=True, help="Follow the logs until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.argument("run_id", metavar="ID")
def logs(
    run_id: str,
    ranks: tuple[int, ...],
    trial: int | None,
    worker: int | None,
    attempt: int | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show what the ranks of a run wrote, also while the run is active.

    The ranks are shown one after the other, each line with its rank and node. With --follow,
    lines appear a few seconds after they were written, and the command waits for the first run of
    an application. For a search, name a trial that has ended, for a score a worker.
    """
    from hopsgpu.artifacts.runs import RunStore

    if trial is not None and worker is not None:
        raise ConfigError("--trial is for a search and --worker for a score: leave one of them out")
    if follow and (trial, worker) != (None, None):
        option, noun = ("--trial", "trial") if worker is None else ("--worker", "worker")
        raise ConfigError(
            f"--follow cannot be combined with {option}: a {noun}'s logs reach the lake when it has"
            " ended; leave one of them out"
        )
    store = RunStore(lake_root())

    def printer(run_id: str) -> _LogPrinter:
        return _LogPrinter(store, run_id, ranks, trial, worker, attempt, as_json)

    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            printer(_await_run(store, run_id)).follow()
    else:
        printer(store.find(run_id)).once()


def _await_run(store: RunStore, reference: str) -> str:
    """Return the ID of a run; wait for the first run of an application that has none yet.

    Raises:
        StoreError: there is no such run, or the application has ended without one.
        HopsGpuError: the cluster manager does not answer, or does not know the application.
    """
    if not APPLICATION_ID.fullmatch(reference):
        return store.find(reference)
    manager = None
    while (run_id := store.find_of_application(reference)) is None:
        if manager is None:
            from hopsgpu.cluster_managers.manager_table import configured_manager

            manager = configured_manager(os.environ)
            echo(f"hopsgpu: {reference} has no run yet; waiting for its first one", is_error=True)
        if manager.end_of(reference):
            # The application may have written the record before it ended.
            return store.find(reference)
        # The lake announces no change.
        time.sleep(_POLL_SECONDS)
    return run_id


@dataclass
class _LogPrinter:
    """The logs that a command shows."""

    _store: RunStore
    _run_id: str
    _ranks: tuple[int, ...]
    _trial: int | None
    _worker: InitVar[int | None]
    _attempt: int | None
    _as_json: bool

    def __post_init__(self, worker: int | None) -> None:
        self._directory = self._store.directory(self._run_id)
        if self._trial is not None:
            self._directory /= f"trials/{self._trial}"
        if worker is not None:
            self._directory /= f"workers/{worker}"
        self._readers: dict[RankLog, LogReader] = {}
        self._outs: dict[RankLog, Sink] = {}
        self._hosts: Mapping[int, str] = {}
        # Why the record could not be read at the last poll.
        self._unread: StoreError | None = None
        # The attempt that ran on these nodes; earlier attempts may have run on others.
        self._located: int | None = None
        self._kind = "gang"

    def once(self) -> None:
        """Show the existing logs, rank by rank.

        Raises:
            ConfigError: there are no logs.
        """
        self._read_record()
        sizes = self._select(log_sizes(self._directory))
        if not sizes:
            raise self._none()
        for log, size in sizes.items():
            self._show({log: size})
            self._end()
        if not self._has_shown():
            echo(f"hopsgpu: {self._run_id}: {self._nothing()}", is_error=True)

    def _none(self) -> ConfigError:
        """Return the error if the requested logs do not exist."""
        which = f" of rank {', '.join(map(str, self._ranks))}" if self._ranks else ""
        when = "" if self._attempt is None else f" in attempt {self._attempt}"
        return ConfigError(
            f"there are no logs{which}{when} in {self._directory.url}/logs{self._hint()}"
        )

    def _nothing(self) -> str:
        return (
            "its ranks have written nothing"
            f" (metrics: `hopsgpu runs show {shlex.quote(self._run_id)}`)"
        )

    def _hint(self) -> str:
        """Return how to find the logs of a search or a score."""
        if self._kind == "score":
            return ": for a score, name a worker with --worker N; its logs appear when it has ended"
        if self._kind != "search":
            return "" if self._trial is None else f": {self._run_id} is not a search"
        if self._trial is None:
            return ": for a search, name a trial with --trial N"
        return ": a trial's logs appear when it has ended"

    def follow(self) -> None:
        """Show the logs as they grow, until the run has ended and they are complete.

        Raises:
            ConfigError: at the end there are logs, but not the requested ones.
            StoreError: it is unknown whether the run is active, and no output arrived for long.
        """
        from hopsgpu.core.run_record import LOST_SECONDS

        ended_at: float | None = None
        came_at, is_known = time.monotonic(), True
        while True:
            record = self._read_record()
            sizes = self._select(log_sizes(self._directory))
            if self._attempt is not None or sizes:
                before = self._shown_bytes()
                self._show(sizes)
                if self._shown_bytes() > before:
                    came_at = time.monotonic()
            if record is not None:
                came_at, is_known = time.monotonic(), True
            elif is_known:
                is_known = False
                echo(
                    f"hopsgpu: {self._unread}; so it is not known whether the run is active: this"
                    f" command ends once no output has arrived for {LOST_SECONDS:g} s",
                    is_error=True,
                )
            elif time.monotonic() - came_at > LOST_SECONDS:
                self._end()
                raise StoreError(
                    f"{self._run_id}: no output has arrived for {LOST_SECONDS:g} s, and it is not"
                    f" known whether the run is active: {self._unread}"
                )
            now = time.time()
            if record is not None and not record.is_running(now):
                ended_at = ended_at or time.monotonic()
                late = time.monotonic() - ended_at > _REST_SECONDS
                is_complete = self._is_whole(record)
                if is_complete or late or not record.has_ended:
                    self._end()
                    # Before its end the run may still start the requested rank or attempt.
                    recorded_logs = self._logs_in_record(record)
                    if recorded_logs and not self._readers and not self._select(recorded_logs):
                        raise self._none()
                    missing = "" if self._has_shown() else f"; {self._nothing()}"
                    missing = missing if is_complete else "; the end of its logs is missing"
                    echo(f"hopsgpu: {self._run_id}: {record.state_at(now)}{missing}", is_error=True)
                    return
            # The lake announces no change.
            time.sleep(_POLL_SECONDS)

    def _read_record(self) -> RunRecord | None:
        try:
            record = self._store.record(self._run_id)
        except StoreError as error:
            # The logs can be read without the record.
            self._unread = error
            return None
        self._unread = None
        self._hosts = {rank.rank: rank.host for rank in record.ranks}
        self._kind = record.kind
        if record.search is not None and self._trial is not None:
            self._locate(record.search, self._trial)
        return record

    def _locate(self, search: SearchRecord, trial: int) -> None:
        """Note on which node a trial ran."""
        for report in search.trials:
            # The record does not say which rank ran on which of several nodes.
            if report.number == trial and report.host and "," not in report.host:
                ranks = range(min(search.workers_per_trial, _MAX_RANKS))
                self._hosts = dict.fromkeys(ranks, report.host)
                self._located = report.tries - 1

    def _select(self, sizes: Mapping[RankLog, int]) -> dict[RankLog, int]:
        """Return the logs to show: of the last attempt unless another one is requested.

        Once some of an attempt was shown, the following attempts are shown too.
        """
        attempts = [log.attempt for log in self._readers or sizes]
        first = min(attempts) if self._readers else max(attempts, default=0)
        return {
            log: size
            for log, size in sizes.items()
            if (log.attempt >= first if self._attempt is None else log.attempt == self._attempt)
            and (not self._ranks or log.rank in self._ranks)
        }

    def _show(self, sizes: Mapping[RankLog, int]) -> None:
        for log, size in sizes.items():
            if log not in self._readers:
                if self._readers and log.attempt > max(reader.attempt for reader in self._readers):
                    echo(f"hopsgpu: attempt {log.attempt}", is_error=True)
                self._readers[log] = LogReader(self._directory, log)
                self._outs[log] = self._out(log)
            for chunk in self._readers[log].read(size):
                self._outs[log].take(chunk)
        sys.stdout.flush()

    def _out(self, log: RankLog) -> Sink:
        if self._as_json:
            return WholeLines(lambda line: echo(json.dumps(self._as_json_line(log, line))))
        out = sys.stdout.buffer
        # Files and pipes get the bytes that the rank wrote.
        sink = TerminalFilter(out.write) if sys.stdout.isatty() else Unchanged(out.write)
        if len(self._ranks) == 1:
            return sink
        host = self._host(log)
        prefix = f"[rank {log.rank}{'' if host is None else f' {host}'}] ".encode()
        return WholeLines(lambda line: sink.take(prefix + line))

    def _as_json_line(self, log: RankLog, line: bytes) -> dict[str, object]:
        return {
            "attempt": log.attempt,
            "rank": log.rank,
            "host": self._host(log),
            "line": line.rstrip(b"\n").decode(errors="backslashreplace"),
        }

    def _host(self, log: RankLog) -> str | None:
        """Return where a log was written, or None."""
        is_known = self._located is None or self._located == log.attempt
        return self._hosts.get(log.rank) if is_known else None

    def _shown_bytes(self) -> int:
        return sum(reader.offset for reader in self._readers.values())

    def _has_shown(self) -> bool:
        return self._shown_bytes() > 0

    def _end(self) -> None:
        for out in self._outs.values():
            out.end()
        sys.stdout.flush()

    def _is_whole(self, record: RunRecord) -> bool:
        return all(
            log in self._readers and self._readers[log].offset >= size
            for log, size in self._select(self._logs_in_record(record)).items()
        )

    @staticmethod
    def _logs_in_record(record: RunRecord) -> dict[RankLog, int]:
        return {log: size for name, size in record.logs.items() if (log := parse_log_name(name))}


class Sink(Protocol):
    """Receives a log in chunks, up to its end."""

    def take(self, chunk: bytes, /) -> None: ...

    def end(self) -> None: ...


class Unchanged:
    """Passes chunks on unchanged.

    Args:
        write: receives the chunks.
    """

    def __init__(self, write: Write) -> None:
        self._write = write

    def take(self, chunk: bytes) -> None:
        self._write(chunk)

    def end(self) -> None:
        """Do nothing: no data is held back."""


class WholeLines:
    """Splits chunks into whole lines."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._rest = b""

    def take(self, chunk: bytes) -> None:
        """Write the lines that a chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._write(line + b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self.end()

    def end(self) -> None:
        """Write a last line without an end."""
        if self._rest:
            self._write(self._rest + b"\n")
            self._rest = b""
