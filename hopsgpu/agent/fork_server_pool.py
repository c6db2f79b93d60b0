"""The running fork servers of a container: started on demand, ended when they are in the way."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hopsgpu.agent import fork_servers
from hopsgpu.agent.fork_protocol import SET_UP_SECONDS
from hopsgpu.agent.fork_servers import ForkServerProcess, Request
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.reaper import ExitStatus, Reaper

log = logging.getLogger(__name__)

_END_SECONDS = 5.0
# A ready server does one thing after the other, and bounds each by itself.
_ANSWER_SECONDS = SET_UP_SECONDS + 5.0


class ForkServerPool:
    """The fork servers of a container.

    Args:
        directory: the daemon's.
        temporary: directory for temporary files of fork servers, by a short path.
        mark: variables that are set for every server and rank.
        selector: selector of the daemon's loop, which calls what is registered with it.
        reaper: reaper of the daemon's children.
        without_server: serves a request without a server, or reports why it cannot; the second
            argument says why there is no server, None if nothing is wrong.
        tell_end: is notified of the end of a server's rank.
    """

    def __init__(
        self,
        directory: Path,
        temporary: Path,
        mark: Mapping[str, str],
        selector: selectors.BaseSelector,
        reaper: Reaper,
        *,
        without_server: Callable[[Request, str | None], None],
        tell_end: Callable[[ExitStatus], None],
    ) -> None:
        self._directory = directory
        self._temporary = temporary
        self._mark = mark
        self._selector = selector
        self._reaper = reaper
        self._without_server = without_server
        self._tell_end = tell_end
        self._numbers = itertools.count()
        self._servers: list[ForkServerProcess] = []
        self._dying: list[ForkServerProcess] = []
        self._unsafe: dict[tuple[Any, ...], str] = {}
        # What servers that were dropped have left to do, and why it is to be done without one.
        self._left: list[tuple[Request, str | None]] = []

    def patience(self) -> float | None:
        """Return the seconds until the first deadline of a server, None if there is none."""
        deadlines = [s.deadline for s in self._servers if s.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def serve(self, request: Request) -> None:
        """Serve a request with a fork server, now or when it is ready, or without one."""
        now = time.monotonic()
        spec = request.spec
        if (reason := self._unsafe.get(spec.identity)) is not None:
            log.info("serves %r without a fork server: %s", request.do, reason)
            self._without_server(request, _known_to_ranks(request, reason))
            return
        server = fork_servers.serving(spec, self._servers)
        if server is None:
            try:
                server = self._start_server(spec, now)
            except OSError as error:
                log.info("serves %r without a fork server: %s", request.do, error)
                self._without_server(request, _known_to_ranks(request, str(error)))
                return
        server.used = now
        if server.ready:
            self._forward(server, request)
        else:
            log.debug("%r waits until fork server %d is ready", request.do, server.pid)
            server.waiting.append(request)

    def _start_server(self, spec: ServerSpec, now: float) -> ForkServerProcess:
        """Start a fork server, in place of another one if there are many.

        Raises:
            OSError: the server cannot be started.
        """
        surplus = fork_servers.to_end(self._servers)
        if surplus is not None:
            self._forget(surplus)
        elif len(self._servers) >= fork_servers.MOST_SERVERS:
            raise BlockingIOError(f"{len(self._servers)} other fork servers are busy")
        server = fork_servers.start(
            spec, self._mark, self._directory, self._temporary, next(self._numbers), now
        )
        log.info(
            "started fork server %d, which imports %s in at most %g s",
            server.pid,
            ", ".join(spec.modules) or "nothing",
            spec.import_seconds,
        )
        self._servers.append(server)
        self._reaper.kept.add(server.pid)
        hear = functools.partial(self._hear, server)
        self._selector.register(server.lines.connection, selectors.EVENT_READ, hear)
        return server

    def forget_owner(self, owner: object) -> None:
        """Withdraw the requests of an owner that is gone."""
        for server in self._servers:
            server.waiting = [r for r in server.waiting if r.owner is not owner]

    def reaped(self, end: ExitStatus) -> tuple[int, ...]:
        """Handle a child's end; return the ranks that a server left, which are now the daemon's."""
        for server in [s for s in self._servers if s.pid == end.pid]:
            # What it has said last.
            while server in self._servers and server.lines.connection in self._selector.get_map():
                self._hear(server)
            if server not in self._servers:
                continue
            code = os.waitstatus_to_exitcode(end.status)
            log.info("fork server %d exited with code %d", server.pid, code)
            said = server.log_tail()
            self._drop(server, f"the fork server ended with {code}{said and f': {said}'}")
        left: list[int] = []
        for server in [s for s in self._dying if s.pid == end.pid]:
            self._dying.remove(server)
            left += server.ranks
        return tuple(left)

    def end_late(self) -> None:
        """End servers that have passed their deadlines, and serve their requests without them."""
        now = time.monotonic()
        for server in tuple(self._servers):
            if server.deadline is not None and server.deadline <= now:
                log.info("fork server %d: %s", server.pid, self._lateness(server))
                self._drop(server, self._lateness(server))
        left, self._left = self._left, []
        for request, reason in left:
            self._without_server(request, reason)

    def _lateness(self, server: ForkServerProcess) -> str:
        if not server.ready:
            modules = ", ".join(server.spec.modules) or "nothing"
            return f"importing {modules} took more than {server.spec.import_seconds:g} s"
        if server.lines.connection in self._selector.get_map():
            return f"the fork server did not answer within {_ANSWER_SECONDS:g} s"
        return "the fork server closed the connection"

    def _forward(self, server: ForkServerProcess, request: Request) -> None:
        fields = request.fields
        if request.do == "warm" or (request.do == "store" and "torch" not in server.has):
            self._without_server(request, None)
            return
        number = next(self._numbers)
        if request.do == "spawn":
            wanted = {
                "directory": fields["directory"],
                "environment": {**request.environment, **self._mark},
            }
        else:
            wanted = {"world_size": fields["world_size"], "log": str(server.log)}
        if server.lines.send(do=request.do, id=number, **wanted):
            if not server.asked:
                server.deadline = time.monotonic() + _ANSWER_SECONDS
            server.asked[number] = request
        else:
            self._without_server(request, "the fork server has just ended")

    def _hear(self, server: ForkServerProcess) -> None:
        messages = server.lines.receive()
        if messages is None:
            # It is about to end; why is known when it is reaped.
            self._selector.unregister(server.lines.connection)
            server.deadline = time.monotonic() + _END_SECONDS
            return
        for message in messages:
            if "ended" in message:
                server.ranks.discard(message["ended"]["pid"])
                self._tell_end(ExitStatus(**message["ended"]))
            elif "ready" in message:
                if message["ready"] is not None:
                    log.info("fork server %d may not fork: %s", server.pid, message["ready"])
                    self._drop(server, message["ready"])
                    return
                log.info("fork server %d is ready", server.pid)
                server.ready, server.deadline = True, None
                server.has = frozenset(message["imported"])
                server.imported |= server.has
                waiting, server.waiting = server.waiting, []
                for request in waiting:
                    self._forward(server, request)
            else:
                self._answered(server, server.asked.pop(message.pop("id")), message)

    def _answered(
        self, server: ForkServerProcess, request: Request, answer: dict[str, Any]
    ) -> None:
        server.deadline = time.monotonic() + _ANSWER_SECONDS if server.asked else None
        if "pid" in answer:
            server.ranks.add(answer["pid"])
        if "error" in answer:
            log.info("fork server %d: %r failed: %s", server.pid, request.do, answer["error"])
        if request.do == "store" and "error" in answer:
            # Rank 0 can serve it itself.
            self._without_server(request, answer["error"])
        else:
            request.reply(server, warning=None, **answer)

    def _forget(self, server: ForkServerProcess) -> None:
        """End a server, which is then reaped."""
        log.info("ends fork server %d", server.pid)
        self._servers.remove(server)
        self._dying.append(server)
        if server.lines.connection in self._selector.get_map():
            self._selector.unregister(server.lines.connection)
        server.lines.connection.close()
        if server.pid in self._reaper.kept:
            os.kill(server.pid, signal.SIGKILL)

    def _drop(self, server: ForkServerProcess, reason: str) -> None:
        """End a server that is of no use, and serve its waiting requests without it."""
        self._forget(server)
        if not server.ready:
            self._unsafe[server.spec.identity] = reason
        # What it may have forked dies with it, and a rank's call is run by who comes first.
        self._left += [(request, reason) for request in server.asked.values()]
        self._left += [(r, _known_to_ranks(r, reason)) for r in server.waiting]


def _known_to_ranks(request: Request, reason: str) -> str | None:
    """Return why there is no server; None if all ranks report it as well."""
    return None if request.do == "store" else reason
