"""The reaper of ranks: until a process is reaped, its pid cannot belong to another process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from hopsgpu.agent.memory import children, kill_tree, session, tree
from hopsgpu.agent.shared_memory import CLEANING_SECONDS, await_cleaners, cleaners
from hopsgpu.linux import parent_of


@dataclass(frozen=True)
class ExitStatus:
    """How a child exited.

    Attributes:
        pid: the kernel may reuse it.
        status: as returned by wait(2).
        peak_memory: largest resident set, in bytes.
        time: when the exit was noticed, in seconds since the epoch.
    """

    pid: int
    status: int
    peak_memory: int
    time: float = field(default_factory=time.time)


class Reaper:
    """The children of this process, which must be single-threaded and a subreaper.

    A rank leads a session. When a rank exits, the rest of its session is killed. A process that
    entered its own session cannot be attributed to a rank, so it is killed once no rank is left.

    Attributes:
        ranks: pids of children that are ranks and not yet reaped; see `add`.
        kept: pids of other children to keep.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.kept: set[int] = set()
        self._stores: set[int] = set()
        # Session IDs of ranks that have exited. The kernel does not reuse a session ID while the
        # session has a process.
        self._exited: set[int] = set()
        # Orphans that clean up after a rank: pid → time at which they are killed.
        self._cleaning: dict[int, float] = {}

    def add(self, rank: int, *, is_store: bool = False) -> None:
        """Add a child that is a rank, or a store, which starts no processes."""
        self.ranks.add(rank)
        self._exited.discard(rank)
        if is_store:
            self._stores.add(rank)

    def signal(self, pid: int, number: int, scope: str) -> None:
        """Send a signal to a rank that has not been reaped; ignore other pids.

        Args:
            scope: "process", "group" (the rank's process group) or "tree" (the rank and all its
                descendants get SIGKILL, whatever the number).
        """
        if pid not in self.ranks:
            return
        if scope == "tree":
            kill_tree(pid)
            return
        send = os.killpg if scope == "group" else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)

    def reap(self) -> list[ExitStatus]:
        """Reap all children that have exited, also adopted ones; call `sweep` next."""
        statuses = []
        while (pid := _first_exited()) is not None:
            # One failure may cause others. The driver finds the first one by this timestamp.
            seen_at = time.time()
            if pid in self.ranks:
                kill_tree(pid)
            _, status, usage = os.wait4(pid, 0)
            statuses.append(ExitStatus(pid, status, usage.ru_maxrss * 1024, seen_at))
            self.kept.discard(pid)
            if pid in self.ranks:
                self.ranks.remove(pid)
                self._stores.discard(pid)
                self._exited.add(pid)
        return statuses

    def sweep(self) -> None:
        """Kill the orphans of exited ranks, but let processes that clean up finish first."""
        # The children of a killed orphan become children of this process, whose next SIGCHLD calls
        # this method again.
        orphans = {pid for orphan in self._orphans() for pid in tree(orphan)}
        now = time.monotonic()
        self._cleaning = {
            pid: self._cleaning.get(pid, now + CLEANING_SECONDS) for pid in cleaners(orphans)
        }
        _kill(pid for pid in orphans if self._cleaning.get(pid, now) <= now)

    def adopt_or_report_dead(self, ranks: Iterable[int]) -> list[int]:
        """Take over an exited child's ranks; return those that it had reaped, or that are gone."""
        dead = []
        for pid in ranks:
            if parent_of(pid) == os.getpid():
                self.add(pid)
            else:
                dead.append(pid)
        # Orphans of these ranks' sessions are now children of this process too.
        self._exited.update(dead)
        return dead

    def kill_all(self) -> None:
        """Kill and reap every descendant, after the processes that clean up have finished."""
        spared = cleaners(tree(os.getpid()))
        if spared:
            _kill(tree(os.getpid()).keys() - spared - {os.getpid()})
            await_cleaners(spared)
        with contextlib.suppress(ChildProcessError):
            while True:
                _kill(tree(os.getpid()).keys() - {os.getpid()})
                os.wait()

    def _orphans(self) -> list[int]:
        """Return adopted children that no rank needs."""
        ours = self.ranks | self.kept
        adopted = [pid for pid in children(os.getpid()) if pid not in ours]
        if not adopted:
            self._exited.clear()
        if not self.ranks - self._stores:
            return adopted
        return [pid for pid in adopted if session(pid) in self._exited]


def _first_exited() -> int | None:
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if child is None else child.si_pid


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        # The process may have exited, or belong to another user (setuid).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
