"""The running fork servers of a container: started on demand, ended if others need their memory."""

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
from hopsgpu.agent.fork_servers import ForkServerProcess, ServerRequest
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.reaper import ExitStatus, Reaper

log = logging.getLogger(__name__)

_END_SECONDS = 5.0
# A ready server serves one request after the other, and bounds each setup by itself.
_ANSWER_SECONDS = SET_UP_SECONDS + 5.0


class ForkServerPool:
    """Runs in the process daemon.

    Args:
        temporary: short path of the directory for temporary files of fork servers.
        selector: the daemon's, which calls the registered functions.
        serve_without: serves a request without a server, or reports why it cannot; the second
            argument says why there is no server, None if nothing is wrong.
        on_exit: is called at the exit of a rank that a server has forked.
    """

    def __init__(
        self,
        directory: Path,
        temporary: Path,
        mark: Mapping[str, str],
        selector: selectors.BaseSelector,
        reaper: Reaper,
        *,
        serve_without: Callable[[ServerRequest, str | None], None],
        on_exit: Callable[[ExitStatus], None],
    ) -> None:
        self._directory = directory
        self._temporary = temporary
        self._mark = mark
        self._selector = selector
        self._reaper = reaper
        self._serve_without = serve_without
        self._on_rank_exit = on_exit
        self._numbers = itertools.count()
        self._servers: list[ForkServerProcess] = []
        self._dying: list[ForkServerProcess] = []
        self._unsafe: dict[tuple[Any, ...], str] = {}
        # Requests of dropped servers, and why they are served without a server.
        self._unserved: list[tuple[ServerRequest, str | None]] = []

    def seconds_until_due(self) -> float | None:
        """Return the seconds until the first deadline of a server; None without a deadline."""
        deadlines = [s.deadline for s in self._servers if s.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def serve(self, request: ServerRequest) -> None:
        """Serve a request with a fork server, now or when it is ready, or without one."""
        now = time.monotonic()
        spec = request.spec
        if (reason := self._unsafe.get(spec.identity)) is not None:
            log.info("serves %r without a fork server: %s", request.do, reason)
            self._serve_without(request, _reason_for(request, reason))
            return
        server = fork_servers.find_server(spec, self._servers)
        if server is None:
            try:
                server = self._start_server(spec, now)
            except OSError as error:
                log.info("serves %r without a fork server: %s", request.do, error)
                self._serve_without(request, _reason_for(request, str(error)))
                return
        server.last_used = now
        if server.ready:
            self._forward(server, request)
        else:
            log.debug("%r waits until fork server %d is ready", request.do, server.pid)
            server.waiting.append(request)

    def _start_server(self, spec: ServerSpec, now: float) -> ForkServerProcess:
        """Start a fork server; at the limit, end an idle server first, or raise OSError."""
        surplus = fork_servers.server_to_replace(self._servers)
        if surplus is not None:
            self._end(surplus)
        elif len(self._servers) >= fork_servers.MAX_SERVERS:
            raise BlockingIOError(f"{len(self._servers)} other fork servers are busy")
        server = fork_servers.start(
            spec, self._mark, self._directory, self._temporary, next(self._numbers), now
        )
        modules, seconds = ", ".join(spec.modules) or "nothing", spec.import_seconds
        log.info("started fork server %d: imports %s in at most %g s", server.pid, modules, seconds)
        self._servers.append(server)
        self._reaper.kept.add(server.pid)
        receive = functools.partial(self._receive, server)
        self._selector.register(server.lines.connection, selectors.EVENT_READ, receive)
        return server

    def withdraw(self, owner: object) -> None:
        """Forget the waiting requests of an owner that has disconnected."""
        for server in self._servers:
            server.waiting = [r for r in server.waiting if r.owner is not owner]

    def on_exit(self, status: ExitStatus) -> tuple[int, ...]:
        """Handle a child's exit; return an exited server's ranks, now the daemon's children."""
        for server in [s for s in self._servers if s.pid == status.pid]:
            # The connection may still contain the server's last messages.
            while server in self._servers and server.lines.connection in self._selector.get_map():
                self._receive(server)
            if server not in self._servers:
                continue
            code = os.waitstatus_to_exitcode(status.status)
            log.info("fork server %d exited with code %d", server.pid, code)
            output = server.log_tail()
            self._drop(server, f"the fork server ended with {code}{output and f': {output}'}")
        orphaned: list[int] = []
        for server in [s for s in self._dying if s.pid == status.pid]:
            self._dying.remove(server)
            orphaned += server.ranks
        return tuple(orphaned)

    def drop_overdue(self) -> None:
        """End servers that have passed their deadlines, and serve their requests without them."""
        now = time.monotonic()
        for server in tuple(self._servers):
            if server.deadline is not None and server.deadline <= now:
                log.info("fork server %d: %s", server.pid, self._lateness(server))
                self._drop(server, self._lateness(server))
        unserved, self._unserved = self._unserved, []
        for request, reason in unserved:
            self._serve_without(request, reason)

    def _lateness(self, server: ForkServerProcess) -> str:
        if not server.ready:
            modules = ", ".join(server.spec.modules) or "nothing"
            return f"importing {modules} took more than {server.spec.import_seconds:g} s"
        if server.lines.connection in self._selector.get_map():
            return f"the fork server did not answer within {_ANSWER_SECONDS:g} s"
        return "the fork server closed the connection"

    def _forward(self, server: ForkServerProcess, request: ServerRequest) -> None:
        fields = request.fields
        if request.do == "warm" or (request.do == "store" and "torch" not in server.loaded_modules):
            self._serve_without(request, None)
            return
        number = next(self._numbers)
        if request.do == "spawn":
            details = {
                "directory": fields["directory"],
                "environment": {**request.environment, **self._mark},
            }
        else:
            details = {"world_size": fields["world_size"], "log": str(server.log)}
        if server.lines.send(do=request.do, id=number, **details):
            if not server.pending:
                server.deadline = time.monotonic() + _ANSWER_SECONDS
            server.pending[number] = request
        else:
            self._serve_without(request, "the fork server has just ended")

    def _receive(self, server: ForkServerProcess) -> None:
        messages = server.lines.receive()
        if messages is None:
            # The server is about to exit. Its exit status says why.
            self._selector.unregister(server.lines.connection)
            server.deadline = time.monotonic() + _END_SECONDS
            return
        for message in messages:
            if "ended" in message:
                server.ranks.discard(message["ended"]["pid"])
                self._on_rank_exit(ExitStatus(**message["ended"]))
            elif "ready" in message:
                if message["ready"] is not None:
                    log.info("fork server %d may not fork: %s", server.pid, message["ready"])
                    self._drop(server, message["ready"])
                    return
                log.info("fork server %d is ready", server.pid)
                server.ready, server.deadline = True, None
                server.loaded_modules = frozenset(message["imported"])
                server.requested_modules |= server.loaded_modules
                waiting, server.waiting = server.waiting, []
                for request in waiting:
                    self._forward(server, request)
            else:
                self._handle_answer(server, server.pending.pop(message.pop("id")), message)

    def _handle_answer(
        self, server: ForkServerProcess, request: ServerRequest, answer: dict[str, Any]
    ) -> None:
        server.deadline = time.monotonic() + _ANSWER_SECONDS if server.pending else None
        if "pid" in answer:
            server.ranks.add(answer["pid"])
        if "error" in answer:
            log.info("fork server %d: %r failed: %s", server.pid, request.do, answer["error"])
        if request.do == "store" and "error" in answer:
            # Rank 0 can serve the store itself.
            self._serve_without(request, answer["error"])
        else:
            request.reply(server, warning=None, **answer)

    def _end(self, server: ForkServerProcess) -> None:
        log.info("ends fork server %d", server.pid)
        self._servers.remove(server)
        self._dying.append(server)
        if server.lines.connection in self._selector.get_map():
            self._selector.unregister(server.lines.connection)
        server.lines.connection.close()
        if server.pid in self._reaper.kept:
            os.kill(server.pid, signal.SIGKILL)

    def _drop(self, server: ForkServerProcess, reason: str) -> None:
        """Kill a server that failed; `drop_overdue` serves its requests without it."""
        self._end(server)
        if not server.ready:
            self._unsafe[server.spec.identity] = reason
        # Its ranks die with it. The call file ensures that only one process runs a call.
        self._unserved += [(request, reason) for request in server.pending.values()]
        self._unserved += [(r, _reason_for(r, reason)) for r in server.waiting]


def _reason_for(request: ServerRequest, reason: str) -> str | None:
    """Return why a request has no server; None if the ranks' own requests report it too."""
    return None if request.do == "store" else reason
