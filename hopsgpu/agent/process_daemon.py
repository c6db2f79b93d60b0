"""The process daemon: one process per container that starts ranks and outlives the tasks.

A task's process starts it as `python -m hopsgpu.agent.process_daemon DIRECTORY PIDFD LOCK WARM`.
It leaves that process's session and family, and ends, with all its descendants, when the process
behind PIDFD (the executor's JVM) ends. LOCK is a descriptor that has the lock of its start
(`daemon_start`), and WARM that of a file with the spec of a fork server to start at once, or null.
On the unix socket `socket` in DIRECTORY it first says `token` and `pid`, and then receives

    warm     starts a fork server               → id, warning
    spawn    starts a rank                      → id, pid, warning | id, error, errno; later ended
    store    starts a torch TCPStore            → id, pid, port (None: no torch, or a warning tells
                                                  why), warning; later ended
    prepare  unpacks a Python environment       → id, home | id, problem, configured
    signal   sends a signal to a rank
    forget   removes the short paths of ranks' directories, which are about to be removed

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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu import linux
from hopsgpu.agent import fork_servers, orphans
from hopsgpu.agent.environment_unpacker import EnvironmentUnpacking
from hopsgpu.agent.fork_server_pool import ForkServerPool
from hopsgpu.agent.fork_servers import ForkServerProcess, Request
from hopsgpu.agent.json_lines import JsonLineSocket, error_fields, peer_user
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.agent.reaper import ExitStatus, Reaper
from hopsgpu.agent.tmpdir_links import Links, links
from hopsgpu.core import own_log
from hopsgpu.rank import files
from hopsgpu.tracebacks import VARIABLE

# Not by __name__: it runs as __main__.
log = logging.getLogger("hopsgpu.agent.process_daemon")

SOCKET = "socket"
LOG = "log"
_TOKEN = "token"


@dataclass(eq=False)
class Client:
    """A connected task, the ranks that end with it, and the links to their directories."""

    lines: JsonLineSocket
    ranks: set[int] = field(default_factory=set)
    links: set[Path] = field(default_factory=set)
    gone: bool = False


@dataclass(frozen=True)
class RankOwner:
    """A rank: its owner, and who reaps it (None: the daemon)."""

    client: Client
    server: ForkServerProcess | None


class DaemonServer:
    """Serves the tasks of one container; must run in the main thread of its process.

    Args:
        directory: the daemon's own directory.
        listener: socket on which tasks connect.
        token: mark of its processes.
        links: links that give TMPDIR a short path.

    Raises:
        OSError: there is no short path.
    """

    def __init__(self, directory: Path, listener: socket.socket, token: str, links: Links) -> None:
        self._listener = listener
        self._links = links
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._reaper = Reaper()
        self._mark = {orphans.VARIABLE: token}
        self._rank_owners: dict[int, RankOwner] = {}
        self._env_unpacker = EnvironmentUnpacking(directory, self._mark, self._reaper)
        self._pool = ForkServerPool(
            directory,
            links.add(directory) / files.TEMPORARY,
            self._mark,
            self._selector,
            self._reaper,
            without_server=self._without_server,
            tell_end=self._tell_end,
        )

    def warm(self, spec: ServerSpec) -> None:
        """Start a fork server for ranks to come; they are told if it cannot be used."""
        self._pool.serve(Request(None, "warm", spec, {}, lambda **_: None))

    def serve(self, watched: int) -> None:
        """Serve until the process behind a pidfd ends, or SIGTERM; then no descendant is left."""
        try:
            with linux.signal_descriptor([signal.SIGCHLD, signal.SIGTERM]) as arrived:
                self._when_readable(self._listener, self._accept)
                self._selector.register(watched, selectors.EVENT_READ)
                self._selector.register(arrived, selectors.EVENT_READ)
                while True:
                    ready = self._selector.select(self._patience())
                    if any(key.fd == watched for key, _ in ready):
                        log.info("the watched process has ended: ends")
                        return
                    if any(key.fd == arrived for key, _ in ready):
                        if signal.SIGTERM in os.read(arrived, 4096):
                            log.info("received SIGTERM: ends")
                            return
                        self._collect()
                    for key, _ in ready:
                        # What came before it may have had it closed.
                        if key.data and self._selector.get_map().get(key.fd) is key:
                            key.data()
                    self._pool.end_late()
                    self._links.refresh(time.monotonic())
        finally:
            self._reaper.kill_all()

    def _patience(self) -> float:
        until_refresh = self._links.patience(time.monotonic())
        patience = self._pool.patience()
        return until_refresh if patience is None else min(patience, until_refresh)

    def _when_readable(self, connection: socket.socket, act: Callable[[], None]) -> None:
        self._selector.register(connection, selectors.EVENT_READ, act)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer_user(connection) != os.geteuid():
            connection.close()
            return
        log.debug("a task has connected")
        client = Client(JsonLineSocket(connection))
        client.lines.send(token=self._token, pid=os.getpid())
        self._when_readable(connection, functools.partial(self._listen_to, client))

    def _listen_to(self, client: Client) -> None:
        try:
            messages = client.lines.receive()
            for message in messages or ():
                self._handle_request(client, message)
        except (KeyError, TypeError, ValueError):
            traceback.print_exc()
            log.info("a task sent an invalid message: closes the connection")
            messages = None
        if messages is None:
            self._hang_up(client)

    def _hang_up(self, client: Client) -> None:
        client.gone = True
        log.info("a task has disconnected: kills its %d processes", len(client.ranks))
        self._selector.unregister(client.lines.connection)
        client.lines.connection.close()
        for pid in tuple(client.ranks):
            self._signal(pid, signal.SIGKILL, "tree")
        self._pool.forget_owner(client)
        self._forget(client, client.links)

    def _forget(self, client: Client, links: Iterable[Path]) -> None:
        for link in tuple(links):
            self._links.remove(link)
            client.links.discard(link)

    def _handle_request(self, client: Client, message: dict[str, Any]) -> None:
        log.debug("request: %s", message["do"])
        if message["do"] == "signal":
            if message["pid"] in client.ranks:
                log.debug("signal %d for pid %d", message["signal"], message["pid"])
                self._signal(message["pid"], message["signal"], message["scope"])
            return
        if message["do"] == "forget":
            below = self._links.below(Path(message["directory"]))
            self._forget(client, client.links.intersection(below))
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
                temporary = self._temporary(client, Path(message["directory"]))
            except OSError as error:
                reply(**error_fields(error))
                return
            message["environment"]["TMPDIR"] = str(temporary)
        spec = ServerSpec.from_fields(message["server"])
        self._pool.serve(Request(client, message["do"], spec, message, reply))

    def _temporary(self, client: Client, directory: Path) -> Path:
        """Return the short path of a rank's directory for temporary files, and create it."""
        (directory / files.TEMPORARY).mkdir(mode=0o700)
        link = self._links.add(directory)
        client.links.add(link)
        return link / files.TEMPORARY

    def _reply(
        self, client: Client, number: int, server: ForkServerProcess | None = None, **fields: Any
    ) -> None:
        if (pid := fields.get("pid")) is not None:
            log.debug("pid %d %s", pid, "started" if server is None else "forked")
            self._rank_owners[pid] = RankOwner(client, server)
            client.ranks.add(pid)
            if client.gone:
                self._signal(pid, signal.SIGKILL, "tree")
        client.lines.send(id=number, **fields)

    def _signal(self, pid: int, number: int, scope: str) -> None:
        server = self._rank_owners[pid].server
        if server is None:
            self._reaper.signal(pid, number, scope)
        else:
            server.lines.send(do="signal", pid=pid, signal=number, scope=scope)

    def _collect(self) -> None:
        for end in self._reaper.collect():
            self._tell_end(end)
            self._env_unpacker.reaped(end)
            left = [pid for pid in self._pool.reaped(end) if pid in self._rank_owners]
            for pid in left:
                self._rank_owners[pid] = RankOwner(self._rank_owners[pid].client, None)
            # They die with their server, or had died before and it took to its grave how.
            for pid in self._reaper.adopt(left):
                self._tell_end(ExitStatus(pid, signal.SIGKILL, 0))
        self._reaper.sweep()

    def _tell_end(self, ended: ExitStatus) -> None:
        rank_owner = self._rank_owners.pop(ended.pid, None)
        log.debug("pid %d exited: %d", ended.pid, os.waitstatus_to_exitcode(ended.status))
        if rank_owner is not None:
            rank_owner.client.ranks.discard(ended.pid)
            rank_owner.client.lines.send(ended=asdict(ended))

    def _without_server(self, request: Request, reason: str | None) -> None:
        match request.do:
            case "warm":
                request.reply(warning=reason)
            case "store":
                request.reply(pid=None, port=None, warning=reason)
            case _:
                self._start_fresh(request, reason)

    def _start_fresh(self, request: Request, reason: str | None) -> None:
        directory = Path(request.fields["directory"])
        command = [request.spec.executable, "-m", files.ENTRY, str(directory), str(os.getpid())]
        try:
            # Append mode: what C and Python write comes in the order in which it was written.
            with (directory / files.LOG).open("ab") as output:
                pid = fork_servers.started(
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
    """Become the daemon of a directory, which has none.

    Args:
        directory: the directory.
        watched: pidfd of the process with which it ends.
        lock: descriptor that has the lock of its start, which it lets go.
        warm: descriptor of a file with the spec of a fork server to start at once, or null.
    """
    os.chdir(directory)  # the path may be longer than a socket's name may be
    with os.fdopen(warm, "rb") as given:
        fields = json.load(given)
    with contextlib.ExitStack() as stack:
        token = Path(_TOKEN)
        if token.exists():
            # Its daemon was killed.
            orphans.sweep(token.read_text())
        token.write_text(os.urandom(16).hex())
        Path(SOCKET).unlink(missing_ok=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(SOCKET)
        listener.listen(128)
        if os.fork() != 0:
            # Its starter waits for this process; the daemon is nobody's child.
            os._exit(0)
        os.close(lock)
        linux.reset_signals()
        linux.become_subreaper()
        # Not in the directory that goes with this process.
        file = own_log.directory(directory.parent) / own_log.daemon_file(os.getpid())
        level = own_log.level_of(os.environ.get(VARIABLE)) or own_log.INFO
        stack.enter_context(own_log.written(file, level))
        log.info("process daemon of %s", directory.name)
        short = stack.enter_context(links(directory))
        server = DaemonServer(directory, listener, token.read_text(), short)
        if fields is not None:
            server.warm(ServerSpec.from_fields(fields))
        server.serve(watched)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
