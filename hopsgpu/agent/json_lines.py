"""Messages between the processes of one container: JSON objects, one per line."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_CHUNK = 2**20
_SEND_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")


class JsonLineSocket:
    """A connected stream socket; its owner closes it, and reads only when data is available.

    A peer that reads nothing for 10 s is disconnected.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        self.connection = connection
        self._rest = b""

    def send(self, **fields: Any) -> bool:
        """Send one message; return False if the connection has ended, as `receive` also reports."""
        try:
            self.connection.sendall(json.dumps(fields).encode() + b"\n")
        except OSError:
            # Half a line may have been sent: no other message may follow.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that one read completes, or None at the end of the connection."""
        try:
            read = self.connection.recv(_CHUNK)
        except OSError:
            return None
        if not read:
            return None
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [json.loads(line) for line in lines]


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an exception for a message: `error` for people, and `errno` of an OSError or None."""
    if not isinstance(error, OSError) or error.errno is None:
        return {"error": f"{type(error).__name__}: {error}", "errno": None}
    file = "" if error.filename is None else f": {str(error.filename)!r}"
    return {"error": f"{error.strerror}{file}", "errno": error.errno}


def as_error(fields: Mapping[str, Any]) -> OSError:
    """Return the exception of a message that `error_fields` made."""
    number, text = fields["errno"], fields["error"]
    return OSError(text) if number is None else OSError(number, text)


def peer_user(connection: socket.socket) -> int:
    """Return the user ID of the peer of a unix socket (unix(7), SO_PEERCRED)."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(credentials)[1])
