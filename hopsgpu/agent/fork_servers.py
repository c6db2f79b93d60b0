"""A keeper's fork servers: which one serves whom, which one has to go, and how one is started."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hopsgpu.agent import fork_server
from hopsgpu.agent.json_lines import Lines
from hopsgpu.agent.rank_environment import ServerSpec, as_bytes

# Each takes 0.5 to 1 GiB of the container (AGENT_MIB).
MOST_SERVERS = 2
_MOST_SAID = 1000


@dataclass(frozen=True)
class Request:
    """Something that a fork server is wanted for.

    Attributes:
        owner: who wants it.
        do: "warm", "spawn" or "store".
        spec: of the server.
        fields: of the message that asked for it.
        reply: takes the answer's fields.
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
class Server:
    """A fork server's process.

    Attributes:
        spec: what it was started from.
        pid: of the process.
        lines: the connection to it.
        log: what its imports write.
        deadline: the clock's reading at which it must be ready, have answered or have ended, if it
            must.
        used: the clock's reading when it was last wanted.
        imported: top-level modules that it has or has been asked for: one that is not there is not
            looked for again.
        has: top-level modules that it has, once it is ready.
        ready: whether it has said that it may fork.
        waiting: what it is wanted for once it is ready.
        asked: what it has been told to do, by number.
        ranks: pids of its children.
    """

    spec: ServerSpec
    pid: int
    lines: Lines
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
        """Whether nobody would miss it now."""
        return not (self.waiting or self.asked or self.ranks)

    def log_tail(self) -> str:
        """Return the end of the last line that it wrote, "" where there is none."""
        lines = self.log.read_text(errors="backslashreplace").splitlines()
        return lines[-1][-_MOST_SAID:] if lines else ""


def serving(spec: ServerSpec, servers: Iterable[Server]) -> Server | None:
    """Return the server that may fork for a spec: same interpreter and variables, all its packages.

    What it lacks of the modules below these, the rank imports itself.
    """
    for server in servers:
        own = server.spec
        same = (own.executable, own.environment) == (spec.executable, spec.environment)
        if same and server.imported.issuperset(spec.packages):
            return server
    return None


def to_end(servers: Iterable[Server], most: int = MOST_SERVERS) -> Server | None:
    """Return the idle server that was not wanted for longest, where no room is left for another."""
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
) -> Server:
    """Start a fork server as a child of this process, in a session of its own.

    Args:
        spec: what it shares with its ranks.
        mark: variables that tell whose it is.
        directory: of the keeper; what frameworks leave at home while they are imported lies there.
        temporary: for temporary files; made where it is not there.
        number: tells its log from others'.
        now: the clock's reading.

    Raises:
        OSError: it cannot be started.
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
            command = [spec.executable, "-m", fork_server.__name__, descriptor, str(os.getpid())]
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
    return Server(spec, pid, Lines(ours), log, deadline, now, spec.packages)


def started(
    command: list[str],
    *,
    env: Mapping[str, str],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    **options: Any,
) -> int:
    """Return the pid of a child that leads a session and writes errors to its stdout.

    Args:
        command: and its arguments.
        env: its variables, as `rank_environment` gives them.
        stdin: what it reads, nothing by default.
        **options: of subprocess.Popen.

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
