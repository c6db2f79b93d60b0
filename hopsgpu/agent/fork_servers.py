"""The choice of fork servers: which one serves a request, which one must end, how one starts."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hopsgpu.agent.json_lines import JsonLineSocket
from hopsgpu.agent.rank_environment import ServerSpec, as_bytes
from hopsgpu.core.bounded_reads import read_end

# Each server takes 0.5 to 1 GiB of the container (AGENT_MIB).
MAX_SERVERS = 2
_LOG_TAIL_BYTES = 1000
# Not imported here: the imports of that module would slow the start of the process daemon.
_MODULE = "hopsgpu.agent.fork_server"


@dataclass(frozen=True)
class ServerRequest:
    """A request for a fork server.

    Attributes:
        owner: the requester; None for the daemon itself.
        do: "warm", "spawn" or "store".
        fields: fields of the request's message.
        reply: receives the answer's fields.
    """

    owner: object
    do: str
    spec: ServerSpec
    fields: Mapping[str, Any]
    reply: Callable[..., None]

    @property
    def environment(self) -> dict[str, str]:
        return {**self.spec.environment, **self.fields["environment"]}


@dataclass(eq=False)
class ForkServerProcess:
    """A fork server, as the process daemon sees it.

    Attributes:
        lines: the connection to the server.
        log: output of the server's imports.
        deadline: monotonic time by which the server must be ready, answer or exit, or None.
        last_used: monotonic time of the last request.
        requested_modules: top-level modules that are loaded, or were requested and are missing.
        loaded_modules: top-level modules that are loaded, once the server is ready.
        ready: whether the server has reported that it may fork.
        waiting: requests to serve once the server is ready.
        pending: forwarded requests without an answer, by number.
        ranks: pids of the server's children.
    """

    spec: ServerSpec
    pid: int
    lines: JsonLineSocket
    log: Path
    deadline: float | None
    last_used: float
    requested_modules: frozenset[str]
    loaded_modules: frozenset[str] = frozenset()
    ready: bool = False
    waiting: list[ServerRequest] = field(default_factory=list)
    pending: dict[int, ServerRequest] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.pending or self.ranks)

    def log_tail(self) -> str:
        lines = read_end(self.log, _LOG_TAIL_BYTES).splitlines()
        return lines[-1] if lines else ""


def find_server(spec: ServerSpec, servers: Iterable[ForkServerProcess]) -> ForkServerProcess | None:
    """Return a server with the spec's interpreter, variables and packages.

    The rank itself imports submodules that the server lacks.
    """
    for server in servers:
        existing = server.spec
        is_same = (existing.executable, existing.environment) == (spec.executable, spec.environment)
        if is_same and server.requested_modules.issuperset(spec.packages):
            return server
    return None


def server_to_replace(
    servers: Iterable[ForkServerProcess], limit: int = MAX_SERVERS
) -> ForkServerProcess | None:
    """Return the longest idle server; None if one more server is allowed, or all are busy."""
    running = list(servers)
    if len(running) < limit:
        return None
    return min((s for s in running if s.idle), key=lambda s: s.last_used, default=None)


def start(
    spec: ServerSpec,
    mark: Mapping[str, str],
    directory: Path,
    temporary: Path,
    number: int,
    now: float,
) -> ForkServerProcess:
    """Start a fork server as a child of this process, in its own session.

    Args:
        mark: variable with the daemon's token.
        directory: the daemon's.
        temporary: directory for temporary files; created if missing.

    Raises:
        OSError: the server cannot be started.
    """
    home = directory / "home"
    for path in (home, temporary):
        path.mkdir(mode=0o700, exist_ok=True)
    log = directory / f"server-{number}.log"
    places = {"HOME": str(home), "TMPDIR": str(temporary)}
    ours, theirs = socket.socketpair()
    try:
        with theirs, log.open("wb") as output:
            descriptor = str(theirs.fileno())
            command = [spec.executable, "-m", _MODULE, descriptor, str(os.getpid())]
            pid = start_process(
                [*command, *spec.modules],
                cwd=directory,
                env={**spec.environment, **places, **mark},
                stdout=output,
                pass_fds=[theirs.fileno()],
            )
    except BaseException:
        ours.close()
        raise
    deadline = now + spec.import_seconds
    return ForkServerProcess(spec, pid, JsonLineSocket(ours), log, deadline, now, spec.packages)


def start_process(
    command: list[str],
    *,
    env: Mapping[str, str],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    **options: Any,
) -> int:
    """Start a child that leads a session and writes errors to its stdout; return its pid.

    Args:
        env: as returned by `rank_environment`.

    Raises:
        OSError: the child cannot be started.
    """
    process = subprocess.Popen(
        command,
        env=as_bytes(env),
        stdin=stdin,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    # The caller reaps the child. Popen would also try to, when the pid may be another child's.
    process.returncode = 0
    return process.pid
