"""A child that a fork server has forked ahead, and that waits for the rank that it is to become.

The larger a framework is, the longer a fork takes. Whatever a rank has to itself it gets when it
becomes one, so that it does not differ from one that was forked at the call.
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
from hopsgpu.rank import exit as exiting
from hopsgpu.rank import main as rank

# Its command (proc(5), comm), by which it is told from ranks.
NAME = "hopsgpu-spare"
# What it says once it has been told what it is to become: from then on it may have begun.
_TAKEN = b"."

Become = Callable[[Path, Mapping[str, str]], None]


@dataclass(frozen=True)
class Spare:
    """A child that waits, as its fork server sees it.

    Attributes:
        pid: its number; its own until the server has reaped it.
        connection: takes what it is to become, and tells how its set-up went. It ends with this.
    """

    pid: int
    connection: socket.socket

    def hand_over(self, directory: Path, environment: Mapping[str, str]) -> bytes | None:
        """Has it become a rank; what it reports as `forking.read_report` has it.

        Args:
            directory: the rank's.
            environment: all its variables.

        Raises:
            OSError: it has died before it began, or was killed since it does not listen.
        """
        told = json.dumps({"directory": str(directory), "environment": dict(environment)})
        with self.connection as connection:
            try:
                connection.settimeout(fork_protocol.SET_UP_SECONDS)
                connection.sendall(told.encode())
                connection.shutdown(socket.SHUT_WR)
                said = fork_protocol.read_report(connection.fileno())
                if said is not None and not said.startswith(_TAKEN):
                    raise ChildProcessError("the spare has ended")
            except OSError:
                # Before the connection is closed, which would tell it that it has been told all.
                os.kill(self.pid, signal.SIGKILL)
                raise
        return None if said is None else said.removeprefix(_TAKEN)

    def close(self) -> None:
        """Let go of it in its server."""
        self.connection.close()

    def forget(self) -> None:
        """Let go of it in another child, whose files may have the connection's number."""
        self.connection.detach()


def fork(begin: Callable[[], None], become: Become) -> Spare | None:
    """Fork a spare; None where that is not possible: if that lasts, who wants a rank is told.

    Args:
        begin: is called in it first.
        become: makes it the rank of a directory with an environment.
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
    return Spare(child, ours)


def _wait(server: int, connection: int, begin: Callable[[], None], become: Become) -> int:
    begin()
    name = linux.comm(os.getpid())
    linux.rename(NAME)
    forked_child.cut_off(server, [connection])
    told = fork_protocol.read_all(connection)
    if not told:
        # Nobody wants it any more, and there is nothing of its own that it could undo.
        os._exit(0)
    os.write(connection, _TAKEN)
    fields = json.loads(told)
    directory = Path(fields["directory"])

    def prepare() -> None:
        linux.rename(name)
        become(directory, fields["environment"])

    return fork_protocol.set_up(prepare, lambda: rank.run(directory), connection)
