"""A spare: a child that a fork server has preforked, and that waits to become a rank.

The larger a framework is, the longer a fork takes. A spare receives its directory and variables
when it becomes a rank, so that it is like a child that was forked on request.
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

# Command of a spare (proc(5), comm), which distinguishes it from ranks.
NAME = "hopsgpu-spare"
# A spare sends this byte when it has received its request; from then on it may run the rank.
_REQUEST_RECEIVED = b"."

Become = Callable[[Path, Mapping[str, str]], None]


@dataclass(frozen=True)
class SpareChild:
    """The fork server's side of a spare.

    Attributes:
        pid: valid until the server has reaped the spare.
        connection: when it is closed, an unused spare exits.
    """

    pid: int
    connection: socket.socket

    def hand_over(self, directory: Path, environment: Mapping[str, str]) -> bytes | None:
        """Turn the spare into a rank; return the result of `fork_protocol.read_report`.

        Raises:
            OSError: the spare was dead, or was killed because it did not respond.
        """
        request = json.dumps({"directory": str(directory), "environment": dict(environment)})
        with self.connection as connection:
            try:
                connection.settimeout(fork_protocol.SET_UP_SECONDS)
                connection.sendall(request.encode())
                connection.shutdown(socket.SHUT_WR)
                report = fork_protocol.read_report(connection.fileno())
                if report is not None and not report.startswith(_REQUEST_RECEIVED):
                    raise ChildProcessError("the spare process has ended")
            except OSError:
                # Kill before closing the connection: the child would take EOF for the end of its
                # request.
                os.kill(self.pid, signal.SIGKILL)
                raise
        return None if report is None else report.removeprefix(_REQUEST_RECEIVED)

    def close(self) -> None:
        self.connection.close()

    def detach(self) -> None:
        """Drop the connection in another child, whose files may reuse its descriptor's number."""
        self.connection.detach()


def fork(begin: Callable[[], None], become: Become) -> SpareChild | None:
    """Fork a spare; return None if that fails: the next rank reports a lasting problem.

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
            # The call does not return, so the sockets are never closed here: a later file may have
            # the number of their descriptors.
            exiting.run_and_exit(lambda: _wait(server, theirs.fileno(), begin, become))
    return SpareChild(child, ours)


def _wait(server: int, connection: int, begin: Callable[[], None], become: Become) -> int:
    begin()
    name = linux.comm(os.getpid())
    linux.set_process_name(NAME)
    forked_child.detach_child(server, [connection])
    request = fork_protocol.read_all(connection)
    if not request:
        # The server closed the connection. The spare has created nothing that needs cleanup.
        os._exit(0)
    os.write(connection, _REQUEST_RECEIVED)
    fields = json.loads(request)
    directory = Path(fields["directory"])

    def prepare() -> None:
        linux.set_process_name(name)
        become(directory, fields["environment"])

    return fork_protocol.set_up(prepare, lambda: rank.run(directory), connection)
