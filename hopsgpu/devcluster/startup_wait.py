"""Waits for daemons that start, and collects the signs of their progress."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from hopsgpu.devcluster.daemons import DaemonProcess
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.startup_progress import Signs, StartupProgress, decide_wait, poll_seconds
from hopsgpu.errors import ClusterError

_DIGITS = re.compile(rb"\d+")
_MAX_LINE_BYTES = 200
_LISTENING = "0A"


class StartupWait:
    """Waits as long as daemons make progress.

    Attributes:
        deadline: end of the whole `up`, by time.monotonic().
        has_waited: whether a condition was not met at its first poll.
    """

    def __init__(
        self, layout: ClusterLayout, report: Callable[[str], object], timeout: float | None = None
    ) -> None:
        self._layout = layout
        self._report = report
        self._began = time.monotonic()
        self.deadline = math.inf if timeout is None else self._began + timeout
        self.has_waited = False

    @property
    def seconds(self) -> float:
        """The time since the beginning of the `up`."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """The time until the deadline; None if there is none."""
        if self.deadline == math.inf:
            return None
        return max(0.0, self.deadline - time.monotonic())

    def until_met(
        self,
        find_unmet: Callable[[], str],
        processes: Mapping[str, DaemonProcess],
        ports: Collection[int] = (),
    ) -> None:
        """Poll a condition until it is met.

        Args:
            find_unmet: returns "" if the condition is met, else what is waited for.
            processes: daemon → process, whose progress counts.
            ports: the daemons' ports.

        Raises:
            ClusterError: the deadline has passed, or nothing shows progress.
        """
        logs = {daemon: self._layout.log(daemon) for daemon in processes}
        signs = SignReader(logs, processes, ports)
        progress = None
        while unmet := find_unmet():
            self.has_waited = True
            now, seen = time.monotonic(), signs.read()
            progress = progress or StartupProgress(self._began, now, seen, now)
            paused = [f"{d} is stopped by a signal" for d, p in processes.items() if p.is_stopped]
            what = "; ".join([unmet, *paused])
            decision = decide_wait(progress, seen, what, now, self.deadline)
            if decision.failure:
                raise ClusterError(f"{decision.failure}; the logs are in {self._layout.logs}")
            if decision.report:
                self._report(decision.report)
            progress = decision.progress
            # The daemons announce no progress.
            time.sleep(poll_seconds(now - self._began))


class SignReader:
    """Reads the signs of daemons' progress; remembers the kinds of lines and how far it read."""

    def __init__(
        self,
        logs: Mapping[str, Path],
        processes: Mapping[str, DaemonProcess],
        ports: Collection[int],
    ) -> None:
        self._logs = logs
        self._processes = processes
        self._ports = frozenset(ports)
        self._read_bytes = dict.fromkeys(logs, 0)
        self._kinds: set[tuple[str, bytes]] = set()

    def read(self) -> Signs:
        for daemon, log in self._logs.items():
            self._read_log(daemon, log)
        return Signs(
            line_kinds=len(self._kinds),
            ports=len(self._ports & listening_ports()) if self._ports else 0,
            cpu_seconds=sum(process.cpu_seconds for process in self._processes.values()),
        )

    def _read_log(self, daemon: str, log: Path) -> None:
        with suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(self._read_bytes[daemon])
            # The last line may be incomplete.
            content, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes[daemon] += len(content) + len(newline)
            for line in content.splitlines():
                self._kinds.add((daemon, _DIGITS.sub(b"", line)[:_MAX_LINE_BYTES]))


def listening_ports() -> frozenset[int]:
    """Return the TCP ports on which a process of this machine listens.

    Unlike a connection, this gives daemons no work.
    """
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTENING:
                    ports.add(int(local.rpartition(":")[2], 16))
    return frozenset(ports)
