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
    """How a child ended.

    Attributes:
        pid: its pid, free again.
        status: status as returned by wait(2).
        peak_memory: largest resident set, in bytes.
        time: when the end was seen, in seconds since the epoch.
    """

    pid: int
    status: int
    peak_memory: int
    time: float = field(default_factory=time.time)


class Reaper:
    """The children of this process, which must be single-threaded and a subreaper.

    A rank leads a session. When a rank ends, the rest of its session is killed and, once no rank is
    left, everything that its ranks have left: a process that entered its own session can no longer
    be distinguished from another rank's.

    Attributes:
        ranks: pids of children that are ranks and not yet reaped; see `add`.
        kept: pids of other children to keep.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.kept: set[int] = set()
        self._serving: set[int] = set()
        # Their sessions; no number of these is given out while a process is left in it.
        self._ended: set[int] = set()
        # Strays that are spared, until some readings of the clock.
        self._cleaning: dict[int, float] = {}

    def add(self, rank: int, *, serves: bool = False) -> None:
        """Add a child that is a rank, or that serves ranks and starts no processes itself."""
        self.ranks.add(rank)
        self._ended.discard(rank)
        if serves:
            self._serving.add(rank)

    def signal(self, pid: int, number: int, scope: str) -> None:
        """Send a signal to a rank that has not been reaped; ignore other pids.

        Args:
            pid: the rank's.
            number: number of the signal.
            scope: "process", "group" (the rank's process group) or "tree" (all descendants of the
                rank are killed, whatever the number).
        """
        if pid not in self.ranks:
            return
        if scope == "tree":
            kill_tree(pid)
            return
        send = os.killpg if scope == "group" else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)

    def collect(self) -> list[ExitStatus]:
        """Reap all children that have ended, adopted ones too; call `sweep` next."""
        ended = []
        while (pid := _first_ended()) is not None:
            # Others may fail of it at once: which was the first is told by time.
            seen = time.time()
            if pid in self.ranks:
                kill_tree(pid)
            _, status, usage = os.wait4(pid, 0)
            ended.append(ExitStatus(pid, status, usage.ru_maxrss * 1024, seen))
            self.kept.discard(pid)
            if pid in self.ranks:
                self.ranks.remove(pid)
                self._serving.discard(pid)
                self._ended.add(pid)
        return ended

    def sweep(self) -> None:
        """Kill what ended ranks have left, except processes that clean up, which finish first."""
        # Each that dies of this hands its children to us, and has us called again.
        left = {pid for stray in self._strays() for pid in tree(stray)}
        now = time.monotonic()
        self._cleaning = {
            pid: self._cleaning.get(pid, now + CLEANING_SECONDS) for pid in cleaners(left)
        }
        _kill(pid for pid in left if self._cleaning.get(pid, now) <= now)

    def adopt(self, ranks: Iterable[int]) -> list[int]:
        """Take over a dead child's ranks; return those that it, or this process, had reaped.

        Args:
            ranks: pids.
        """
        gone = []
        for pid in ranks:
            if parent_of(pid) == os.getpid():
                self.add(pid)
            else:
                gone.append(pid)
        # Who of their sessions is left came here too.
        self._ended.update(gone)
        return gone

    def kill_all(self) -> None:
        """Kill and reap every descendant, after those that clean up have finished."""
        spared = cleaners(tree(os.getpid()))
        if spared:
            _kill(tree(os.getpid()).keys() - spared - {os.getpid()})
            await_cleaners(spared)
        with contextlib.suppress(ChildProcessError):
            while True:
                _kill(tree(os.getpid()).keys() - {os.getpid()})
                os.wait()

    def _strays(self) -> list[int]:
        """Return adopted children of ranks that have ended."""
        ours = self.ranks | self.kept
        adopted = [pid for pid in children(os.getpid()) if pid not in ours]
        if not adopted:
            self._ended.clear()
        if not self.ranks - self._serving:
            return adopted
        return [pid for pid in adopted if session(pid) in self._ended]


def _first_ended() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        # Gone already, or another user's (setuid).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
