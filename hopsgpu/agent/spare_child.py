"""A child that a fork server has forked in advance, and that waits to become a rank.

The larger a framework is, the longer a fork takes. The child receives everything of its own when it
becomes a rank, so it does not differ from one that was forked on request.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu import linux
from hopsgpu.agent import fork_protocol, forked_child
from hopsgpu.rank import entry as rank
from hopsgpu.rank import exit as exiting

# Its command (proc(5), comm), by which it is told from ranks.
NAME = "hopsgpu-spare"
# What it says once it has been told what it is to become: from then on it may have begun.
_TAKEN = b"."

Become = Callable[[Path, Mapping[str, str]], None]


@dataclass(frozen=True)
class SpareChild:
    """A waiting child, as its fork server sees it.

    Attributes:
        pid: its pid, valid until the server has reaped it.
        connection: receives which rank to become, and reports the result of its setup; the child
            ends with it.
    """

    pid: int
    connection: socket.socket

    def hand_over(self, directory: Path, environment: Mapping[str, str]) -> bytes | None:
        """Turn it into a rank; return its report, as `fork_protocol.read_report` does.

        Args:
            directory: the rank's.
            environment: all its variables.

        Raises:
            OSError: it died before it started, or was killed because it did not respond.
        """
        request = json.dumps({"directory": str(directory), "environment": dict(environment)})
        with self.connection as connection:
            try:
                connection.settimeout(fork_protocol.SET_UP_SECONDS)
                connection.sendall(request.encode())
                connection.shutdown(socket.SHUT_WR)
                said = fork_protocol.read_report(connection.fileno())
                if said is not None and not said.startswith(_TAKEN):
                    raise ChildProcessError("the spare process has ended")
            except OSError:
                # Before the connection is closed, which would tell it that it has been told all.
                os.kill(self.pid, signal.SIGKILL)
                raise
        return None if said is None else said.removeprefix(_TAKEN)

    def close(self) -> None:
        """Release it in its server."""
        self.connection.close()

    def forget(self) -> None:
        """Release it in another child, whose files may reuse the connection's number."""
        self.connection.detach()


def fork(begin: Callable[[], None], become: Become) -> SpareChild | None:
    """Fork a spare; return None if that fails: if it persists, the next rank reports it.

    Args:
        begin: is called in the child first.
        become: turns the child into the rank of a directory with an environment.
    """
    server = os.getpid()
    try:
        ours, theirs = socket.socketpair()
    except OSError:
        return None
    with theirs:
        try:
            child = os.fork()
        except OSError:
            ours.close()
            return None
        if child == 0:
            # This frame stays: neither socket closes a descriptor that has its number later.
            exiting.end(lambda: _wait(server, theirs.fileno(), begin, become))
    return SpareChild(child, ours)


def _wait(server: int, connection: int, begin: Callable[[], None], become: Become) -> int:
    begin()
    name = linux.comm(os.getpid())
    linux.set_process_name(NAME)
    forked_child.detach_child(server, [connection])
    request = fork_protocol.read_all(connection)
    if not request:
        # Nobody wants it any more, and there is nothing of its own that it could undo.
        os._exit(0)
    os.write(connection, _TAKEN)
    fields = json.loads(request)
    directory = Path(fields["directory"])

    def prepare() -> None:
        linux.set_process_name(name)
        become(directory, fields["environment"])

    return fork_protocol.set_up(prepare, lambda: rank.run(directory), connection)
