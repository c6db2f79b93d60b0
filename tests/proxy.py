"""A proxy that lets nothing through, and tells what it was asked for."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.bounds import HANG_SECONDS

_NO = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class Proxy:
    """What it was asked for.

    Attributes:
        url: its own.
        asked: the first line of each request.
    """

    url: str
    asked: list[str] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """Those by which programs are told of a proxy."""
        names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        return {name: self.url for lower in names for name in (lower, lower.upper())}


@contextlib.contextmanager
def refusing_proxy() -> Iterator[Proxy]:
    """Listens on a port of the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(f"http://127.0.0.1:{server.getsockname()[1]}")

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(HANG_SECONDS)
                    proxy.asked.append(connection.recv(4096).decode().partition("\r\n")[0])
                    connection.sendall(_NO)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            thread.join()
