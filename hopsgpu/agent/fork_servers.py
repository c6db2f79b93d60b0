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

# Each takes 0.5 to 1 GiB of the container (AGENT_MIB).
MOST_SERVERS = 2
_MOST_SAID = 1000
# By its name: what it imports has no part in the start of a process daemon.
_MODULE = "hopsgpu.agent.fork_server"


@dataclass(frozen=True)
class Request:
    """A request for a fork server.

    Attributes:
        owner: who requested it.
        do: "warm", "spawn" or "store".
        spec: spec of the server.
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
        """All variables of a rank."""
        return {**self.spec.environment, **self.fields["environment"]}


@dataclass(eq=False)
class ForkServerProcess:
    """A fork server's process.

    Attributes:
        spec: what it was started from.
        pid: pid of the process.
        lines: the connection to it.
        log: file for the output of its imports.
        deadline: the clock's reading by which it must be ready, have answered or have ended, or
            None.
        used: the clock's reading at the last request for it.
        imported: top-level modules that it has or was asked for; a missing one is not looked for
            again.
        has: top-level modules that it has, once it is ready.
        ready: whether it has reported that it may fork.
        waiting: requests to serve once it is ready.
        asked: requests that it is serving, by number.
        ranks: pids of its children.
    """

    spec: ServerSpec
    pid: int
    lines: JsonLineSocket
    log: Path
    deadline: float | None
    used: float
    imported: frozenset[str]
    has: frozenset[str] = frozenset()
    ready: bool = False
    waiting: list[Request] = field(default_factory=list)
    asked: dict[int, Request] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether the server has no requests and no ranks."""
        return not (self.waiting or self.asked or self.ranks)

    def log_tail(self) -> str:
        """Return the end of the last line that it wrote, or ""."""
        lines = self.log.read_text(errors="backslashreplace").splitlines()
        return lines[-1][-_MOST_SAID:] if lines else ""


def serving(spec: ServerSpec, servers: Iterable[ForkServerProcess]) -> ForkServerProcess | None:
    """Return the server that may fork for a spec: same interpreter and variables, all packages.

    The rank itself imports the modules below these that the server lacks.
    """
    for server in servers:
        own = server.spec
        same = (own.executable, own.environment) == (spec.executable, spec.environment)
        if same and server.imported.issuperset(spec.packages):
            return server
    return None


def to_end(
    servers: Iterable[ForkServerProcess], most: int = MOST_SERVERS
) -> ForkServerProcess | None:
    """Return the idle server with the oldest last request, if there is no room for another."""
    there = list(servers)
    if len(there) < most:
        return None
    return min((s for s in there if s.idle), key=lambda s: s.used, default=None)


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
        spec: what it shares with its ranks.
        mark: variables that mark the process.
        directory: directory of the daemon, used as home by frameworks while they are imported.
        temporary: directory for temporary files; created if missing.
        number: number in the name of its log.
        now: the clock's reading.

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
            pid = started(
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


def started(
    command: list[str],
    *,
    env: Mapping[str, str],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    **options: Any,
) -> int:
    """Start a child that leads a session and writes errors to its stdout; return its pid.

    Args:
        command: command and its arguments.
        env: its variables, as returned by `rank_environment`.
        stdin: its standard input, empty by default.
        **options: options of subprocess.Popen.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        env=as_bytes(env),
        stdin=stdin,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    # The caller reaps it; Popen would try to, on a number that may be another child's by then.
    process.returncode = 0
    return process.pid
