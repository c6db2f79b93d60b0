"""The process daemon: one process per container that starts ranks and outlives the tasks.

A task starts the daemon as `python -m hopsgpu.agent.process_daemon DIRECTORY PIDFD LOCK WARM`. The
daemon leads a session, and has init as its parent. It ends, with all its descendants, when the
process behind PIDFD (the executor's JVM) ends. LOCK is a descriptor that has the lock of the start
(`daemon_start`). WARM is a descriptor of a file with the spec of a fork server to start at once, or
null. To each client of the unix socket `socket` in DIRECTORY the daemon sends `token` and `pid`.
Then it receives

    warm     starts a fork server               → id, warning
    spawn    starts a rank                      → id, pid, warning | id, error, errno; later ended
    store    starts a torch TCPStore            → id, pid, port (None: no torch, or the warning says
                                                  why), warning; later ended
    prepare  unpacks a Python environment       → id, home | id, problem, configured
    signal   sends a signal to a rank
    remove-links  removes the short paths of ranks' directories before the directories go

A rank ends with the connection that started it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu import linux
from hopsgpu.agent import fork_servers, orphans
from hopsgpu.agent.container_entry import SCRATCH
from hopsgpu.agent.environment_unpacker import EnvironmentUnpacker
from hopsgpu.agent.fork_server_pool import ForkServerPool
from hopsgpu.agent.fork_servers import ForkServerProcess, ServerRequest
from hopsgpu.agent.json_lines import JsonLineSocket, error_fields, peer_user
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.reaper import ExitStatus, Reaper
from hopsgpu.agent.tmpdir_links import Links, links
from hopsgpu.core import own_log
from hopsgpu.rank import files
from hopsgpu.tracebacks import VARIABLE

# Named explicitly, because `__name__` is `__main__` here.
log = logging.getLogger("hopsgpu.agent.process_daemon")

SOCKET = "socket"
LOG = "log"
_TOKEN = "token"


@dataclass(eq=False)
class TaskConnection:
    """A connected task, its ranks, and the links to the ranks' directories."""

    lines: JsonLineSocket
    ranks: set[int] = field(default_factory=set)
    links: set[Path] = field(default_factory=set)
    is_gone: bool = False


@dataclass(frozen=True)
class RankOwner:
    """The client of a rank, and the fork server that reaps the rank (None: the daemon does)."""

    client: TaskConnection
    server: ForkServerProcess | None


class DaemonServer:
    """Must run in the main thread of its process.

    Args:
        token: marks its processes.
    """

    def __init__(self, directory: Path, listener: socket.socket, token: str, links: Links) -> None:
        self._listener = listener
        self._links = links
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._reaper = Reaper()
        self._mark = {orphans.VARIABLE: token}
        self._rank_owners: dict[int, RankOwner] = {}
        self._env_unpacker = EnvironmentUnpacker(directory, self._mark, self._reaper)
        self._pool = ForkServerPool(
            directory,
            links.add(directory) / files.TEMPORARY,
            self._mark,
            self._selector,
            self._reaper,
            serve_without=self._serve_without_server,
            on_exit=self._report_exit,
        )

    def warm(self, spec: ServerSpec) -> None:
        """Start a fork server for later ranks, which report if it cannot be used."""
        self._pool.serve(ServerRequest(None, "warm", spec, {}, lambda **_: None))

    def serve(self, watched: int) -> None:
        """Serve until the process behind a pidfd ends, or SIGTERM; then no descendant is left."""
        try:
            with linux.signal_descriptor([signal.SIGCHLD, signal.SIGTERM]) as arrived:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                self._selector.register(watched, selectors.EVENT_READ)
                self._selector.register(arrived, selectors.EVENT_READ)
                while True:
                    ready = self._selector.select(self._seconds_until_due())
                    if any(key.fd == watched for key, _ in ready):
                        log.info("the watched process has ended: ends")
                        return
                    if any(key.fd == arrived for key, _ in ready):
                        if signal.SIGTERM in os.read(arrived, 4096):
                            log.info("received SIGTERM: ends")
                            return
                        self._reap()
                    for key, _ in ready:
                        # An earlier event of this loop may have closed this descriptor.
                        if key.data and self._selector.get_map().get(key.fd) is key:
                            key.data()
                    self._pool.drop_overdue()
                    self._links.refresh(time.monotonic())
        finally:
            self._reaper.kill_all()

    def _seconds_until_due(self) -> float:
        until_refresh = self._links.seconds_until_due(time.monotonic())
        until_deadline = self._pool.seconds_until_due()
        return until_refresh if until_deadline is None else min(until_deadline, until_refresh)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer_user(connection) != os.geteuid():
            connection.close()
            return
        log.debug("a task has connected")
        client = TaskConnection(JsonLineSocket(connection))
        client.lines.send(token=self._token, pid=os.getpid())
        receive = functools.partial(self._receive, client)
        self._selector.register(connection, selectors.EVENT_READ, receive)

    def _receive(self, client: TaskConnection) -> None:
        try:
            messages = client.lines.receive()
            for message in messages or ():
                self._handle_request(client, message)
        except (KeyError, TypeError, ValueError):
            traceback.print_exc()
            log.info("a task sent an invalid message: closes the connection")
            messages = None
        if messages is None:
            self._disconnect(client)

    def _disconnect(self, client: TaskConnection) -> None:
        client.is_gone = True
        log.info("a task has disconnected: kills its %d processes", len(client.ranks))
        self._selector.unregister(client.lines.connection)
        client.lines.connection.close()
        for pid in tuple(client.ranks):
            self._signal(pid, signal.SIGKILL, "tree")
        self._pool.withdraw(client)
        self._remove_links(client, client.links)

    def _remove_links(self, client: TaskConnection, links: Iterable[Path]) -> None:
        for link in tuple(links):
            self._links.remove(link)
            client.links.discard(link)

    def _handle_request(self, client: TaskConnection, message: dict[str, Any]) -> None:
        log.debug("request: %s", message["do"])
        if message["do"] == "signal":
            if message["pid"] in client.ranks:
                log.debug("signal %d for pid %d", message["signal"], message["pid"])
                self._signal(message["pid"], message["signal"], message["scope"])
            return
        if message["do"] == "remove-links":
            below = self._links.below(Path(message["directory"]))
            self._remove_links(client, client.links.intersection(below))
            return
        reply = functools.partial(self._reply, client, message["id"])
        if message["do"] == "prepare":
            try:
                self._env_unpacker.prepare(message["env"], message["variables"], reply)
            except OSError as error:
                reply(**error_fields(error))
            return
        if message["do"] == "spawn":
            try:
                temporary = self._make_temporary(client, Path(message["directory"]))
            except OSError as error:
                reply(**error_fields(error))
                return
            message["environment"]["TMPDIR"] = str(temporary)
        spec = ServerSpec.from_fields(message["server"])
        self._pool.serve(ServerRequest(client, message["do"], spec, message, reply))

    def _make_temporary(self, client: TaskConnection, directory: Path) -> Path:
        # The ranks of a script share a directory, which exists already.
        (directory / files.TEMPORARY).mkdir(mode=0o700, exist_ok=True)
        link = self._links.add(directory)
        client.links.add(link)
        return link / files.TEMPORARY

    def _reply(
        self,
        client: TaskConnection,
        number: int,
        server: ForkServerProcess | None = None,
        **fields: Any,
    ) -> None:
        if (pid := fields.get("pid")) is not None:
            log.debug("pid %d %s", pid, "started" if server is None else "forked")
            self._rank_owners[pid] = RankOwner(client, server)
            client.ranks.add(pid)
            if client.is_gone:
                self._signal(pid, signal.SIGKILL, "tree")
        client.lines.send(id=number, **fields)

    def _signal(self, pid: int, number: int, scope: str) -> None:
        server = self._rank_owners[pid].server
        if server is None:
            self._reaper.signal(pid, number, scope)
        else:
            server.lines.send(do="signal", pid=pid, signal=number, scope=scope)

    def _reap(self) -> None:
        for status in self._reaper.reap():
            self._report_exit(status)
            self._env_unpacker.on_exit(status)
            orphaned = [pid for pid in self._pool.on_exit(status) if pid in self._rank_owners]
            for pid in orphaned:
                self._rank_owners[pid] = RankOwner(self._rank_owners[pid].client, None)
            # The kernel kills a server's ranks with the server (PDEATHSIG). If a rank died earlier,
            # its exit status was lost with the server: report SIGKILL.
            for pid in self._reaper.adopt_or_report_dead(orphaned):
                self._report_exit(ExitStatus(pid, signal.SIGKILL, 0))
        self._reaper.sweep()

    def _report_exit(self, status: ExitStatus) -> None:
        owner = self._rank_owners.pop(status.pid, None)
        log.debug("pid %d exited: %d", status.pid, os.waitstatus_to_exitcode(status.status))
        if owner is not None:
            owner.client.ranks.discard(status.pid)
            owner.client.lines.send(ended=asdict(status))

    def _serve_without_server(self, request: ServerRequest, reason: str | None) -> None:
        match request.do:
            case "warm":
                request.reply(warning=reason)
            case "store":
                request.reply(pid=None, port=None, warning=reason)
            case _:
                self._start_fresh(request, reason)

    def _start_fresh(self, request: ServerRequest, reason: str | None) -> None:
        directory = Path(request.fields["directory"])
        command = [request.spec.executable, "-m", files.ENTRY, str(directory), str(os.getpid())]
        try:
            # Append mode keeps the order in which C and Python write.
            with (directory / files.LOG).open("ab") as output:
                pid = fork_servers.start_process(
                    command,
                    cwd=directory / files.WORK,
                    env={**request.environment, **self._mark},
                    stdout=output,
                )
        except OSError as error:
            log.info("cannot start a rank: %s", error)
            request.reply(**error_fields(error))
            return
        self._reaper.add(pid)
        request.reply(pid=pid, warning=reason)


def main(directory: Path, watched: int, lock: int, warm: int) -> None:
    """Become the daemon of a directory without a daemon; the module describes the arguments."""
    os.chdir(directory)  # the absolute path may exceed the limit of a socket's name
    with os.fdopen(warm, "rb") as file:
        fields = json.load(file)
    with contextlib.ExitStack() as stack:
        token = Path(_TOKEN)
        if token.exists():
            # The last daemon of the directory was killed.
            orphans.sweep(token.read_text())
        token.write_text(os.urandom(16).hex())
        Path(SOCKET).unlink(missing_ok=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(SOCKET)
        listener.listen(128)
        if os.fork() != 0:
            # The starter waits for this parent to exit. The daemon is then reparented to init.
            os._exit(0)
        os.close(lock)
        linux.reset_signals()
        linux.become_subreaper()
        # The daemon's directory is removed at its end, and the log must stay.
        log_file = own_log.directory(directory.parent) / own_log.daemon_file(os.getpid())
        level = own_log.level_of(os.environ.get(VARIABLE)) or own_log.INFO
        stack.enter_context(own_log.log_to_file(log_file, level))
        log.info("process daemon of %s", directory.name)
        with links(directory) as short_paths:
            server = DaemonServer(directory, listener, token.read_text(), short_paths)
            if fields is not None:
                server.warm(ServerSpec.from_fields(fields))
            server.serve(watched)
        # Remove the directory last: its absence shows that nothing of the daemon is left.
        shutil.rmtree(os.environ.get(SCRATCH) or directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
