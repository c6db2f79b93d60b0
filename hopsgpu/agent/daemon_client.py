"""A task's connection to the process daemon of its container."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hopsgpu.agent import orphans
from hopsgpu.agent.daemon_start import (
    container_process,
    daemon_directory,
    socket_in,
    start_process_daemon,
    wait_readable,
)
from hopsgpu.agent.json_lines import as_error, peer_user
from hopsgpu.agent.rank_environment import ServerSpec, package_path
from hopsgpu.agent.reaper import ExitStatus
from hopsgpu.agent.tmpdir_links import sweep
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.environment import PythonEnv, RankPython

log = logging.getLogger(__name__)

Scope = Literal["process", "group", "tree"]

_START_SECONDS = 300.0
_END_SECONDS = 5.0
_MAX_LINE = 2**20


class ProcessDaemonLost(ConnectionError):
    """The process daemon has ended, and with it the ranks that it had started."""


@dataclass(frozen=True)
class StartedRank:
    """A running rank, which leads a session.

    Attributes:
        warning: why the rank is a fresh interpreter rather than forked, or None.
    """

    pid: int
    warning: str | None


@dataclass(frozen=True)
class Store:
    """A torch TCPStore that serves on all interfaces until `DaemonClient.signal` ends it."""

    port: int
    pid: int


class DaemonClient:
    """A connection to the process daemon; ranks end with the connection that started them.

    Attributes:
        pid: the daemon's.
        token: marks the daemon's processes in their environment (`orphans.VARIABLE`).
        warnings: for people; the caller that reports a warning removes it.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pidfd: int,
        hello: Mapping[str, Any],
    ) -> None:
        self._pidfd = pidfd
        self.pid = int(hello["pid"])
        self.token = str(hello["token"])
        self.is_lost = False
        self.warnings: list[str] = []
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._exits: dict[int, asyncio.Future[ExitStatus]] = {}

    async def warm(self, spec: ServerSpec) -> str | None:
        """Start a fork server, and wait until it may fork; return why it may not, or None."""
        answer = await self._ask("warm", server=spec.as_fields())
        return None if answer["warning"] is None else str(answer["warning"])

    async def prepare(self, env: PythonEnv, variables: Mapping[str, str]) -> RankPython:
        """Unpack a Python environment, once for the whole application on this node.

        Unpacking continues after a cancellation.

        Raises:
            ConfigError: ranks cannot run with the environment here.
            OSError: the environment could not be fetched, or the daemon ended.
        """
        path = os.pathsep.join(filter(None, (package_path(), variables.get("PYTHONPATH"))))
        variables = {**variables, "PYTHONPATH": path}
        answer = await self._ask("prepare", env=env.as_fields(), variables=variables)
        if "problem" in answer:
            raise (ConfigError if answer["configured"] else OSError)(answer["problem"])
        return env.rank_python_in(Path(answer["home"]))

    async def spawn(
        self, spec: ServerSpec, directory: Path, environment: Mapping[str, str]
    ) -> StartedRank:
        """Fork a rank from the spec's server, or start it as a fresh interpreter.

        Args:
            directory: the rank's. TMPDIR is a short path into it until `remove_links`.
            environment: the variables that differ from the spec's.

        Raises:
            OSError: the rank cannot be started, or the daemon ended.
        """
        fields = {"directory": str(directory), "environment": dict(environment)}
        answer = await self._ask("spawn", server=spec.as_fields(), **fields)
        return StartedRank(answer["pid"], answer["warning"])

    async def store(self, spec: ServerSpec, world_size: int) -> Store | None:
        """Start a torch TCPStore for a process group; return None if no fork server can.

        The result is None for a fork server without torch and, with a warning, for one that hangs.
        `torch.distributed` joins the store if TORCHELASTIC_USE_AGENT_STORE is "True".

        Raises:
            OSError: the store cannot be started, or the daemon ended.
        """
        answer = await self._ask("store", server=spec.as_fields(), world_size=world_size)
        if answer["port"] is not None:
            return Store(answer["port"], answer["pid"])
        if answer["warning"] is not None:
            self.warnings.append(f"rank 0 serves torch's TCPStore itself: {answer['warning']}")
        return None

    async def wait_exit(self, pid: int) -> ExitStatus:
        """Wait for the exit of a process; if the daemon was killed, return SIGKILL as its status.

        After the return none of its processes is left, except those that entered their own session
        while other ranks run.
        """
        try:
            return await asyncio.shield(self._exits[pid])
        finally:
            if self._exits[pid].done():
                del self._exits[pid]

    def signal(self, pid: int, number: int, scope: Scope) -> None:
        """Send a signal to a process that this client started; do nothing if it has exited.

        With the scope "tree", the process and all its descendants get SIGKILL.
        """
        if not self.is_lost:
            self._send(do="signal", pid=pid, signal=int(number), scope=scope)

    def remove_links(self, directory: Path) -> None:
        """Remove the short paths of ranks' directories; call this before removing `directory`."""
        if not self.is_lost:
            self._send(do="remove-links", directory=str(directory))

    def _send(self, **fields: Any) -> None:
        self._writer.write(json.dumps(fields).encode() + b"\n")

    async def _ask(self, do: str, **fields: Any) -> Mapping[str, Any]:
        if self.is_lost:
            raise ProcessDaemonLost("the container's process daemon has ended")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            log.debug("request %d to the process daemon: %s", number, do)
            self._send(do=do, id=number, **fields)
            reply: Mapping[str, Any] = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                self._abandon(answer.result())
            raise
        finally:
            log.debug("request %d to the process daemon has ended: %s", number, do)
            del self._answers[number]
        if "error" in reply:
            raise as_error(reply)
        return reply

    async def listen(self) -> None:
        """Receive messages until the daemon ends; then none of its ranks is left."""
        try:
            with contextlib.suppress(ConnectionError):
                while line := await self._reader.readline():
                    self._handle_message(json.loads(line))
            self.is_lost = True
            log.info("process daemon %d closed the connection", self.pid)
            if await self._is_dead():
                # The kernel has killed the ranks, but not the processes that ranks had started.
                await asyncio.to_thread(orphans.sweep, self.token)
                # The daemon removes TMPDIR links at its exit. After a kill this task removes them.
                await asyncio.to_thread(sweep)
        finally:
            # Also on cancellation: fail all pending requests, so that no caller waits forever.
            self.is_lost = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(
                        ProcessDaemonLost("the container's process daemon ended before it answered")
                    )
        for pid, process_exit in self._exits.items():
            if not process_exit.done():
                process_exit.set_result(ExitStatus(pid, signal.SIGKILL, 0))

    async def _is_dead(self) -> bool:
        # Wait, because connections end before the process. A living daemon kills the ranks itself.
        try:
            async with asyncio.timeout(_END_SECONDS):
                await wait_readable(self._pidfd)
        except TimeoutError:
            return False
        return True

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            status = ExitStatus(**message["ended"])
            log.debug("process daemon: pid %d exited, wait status %d", status.pid, status.status)
            if not self._exits[status.pid].done():
                self._exits[status.pid].set_result(status)
            return
        if (pid := message.get("pid")) is not None:
            self._exits[pid] = asyncio.get_running_loop().create_future()
        answer = self._answers.get(message["id"])
        if answer is not None and not answer.done():
            answer.set_result(message)
        else:
            self._abandon(message)

    def _abandon(self, message: Mapping[str, Any]) -> None:
        """Kill a process that was started for a caller who no longer waits for it."""
        if (pid := message.get("pid")) is not None:
            self.signal(pid, signal.SIGKILL, "tree")


@contextlib.asynccontextmanager
async def connected(parent: Path, watched_pid: int | None = None) -> AsyncIterator[DaemonClient]:
    """Connect to this container's process daemon, and start it if there is none.

    Args:
        parent: directory that gets the daemon's directory.
        watched_pid: process with which the daemon ends; default: `container_process()`.

    Raises:
        OSError: there is no daemon, and none can be started.
    """
    watched_pid = watched_pid or container_process()
    directory = daemon_directory(parent, watched_pid)
    async with contextlib.AsyncExitStack() as stack:
        daemon = await _connect_or_start(directory, watched_pid, stack)
        listening = asyncio.create_task(daemon.listen())
        try:
            yield daemon
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening


async def _connect_or_start(
    directory: Path, watched_pid: int, stack: contextlib.AsyncExitStack
) -> DaemonClient:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = socket_in(descriptor)
        try:
            return await _connect(path, stack)
        except (FileNotFoundError, ConnectionError):
            # There is no daemon yet, or it was killed.
            await start_process_daemon(directory, watched_pid)
            return await _connect(path, stack)
    finally:
        os.close(descriptor)


async def _connect(path: str, stack: contextlib.AsyncExitStack) -> DaemonClient:
    reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE)
    stack.push_async_callback(_disconnect, writer)
    connection: socket.socket = writer.get_extra_info("socket")
    if peer_user(connection) != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    async with asyncio.timeout(_START_SECONDS):
        line = await reader.readline()
    if not line:
        raise ConnectionResetError("the process daemon closed the connection")
    hello = json.loads(line)
    try:
        pidfd = os.pidfd_open(hello["pid"])
    except ProcessLookupError as error:
        raise ConnectionResetError("the process daemon has just ended") from error
    stack.callback(os.close, pidfd)
    return DaemonClient(reader, writer, pidfd, hello)


async def _disconnect(writer: asyncio.StreamWriter) -> None:
    """Close a connection; after the return the daemon has seen the end before any later event."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
