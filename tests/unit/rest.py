"""A small HTTP server that stands in for daemons of Hadoop and Spark."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Daemon:
    """What it serves, and what it was asked.

    Attributes:
        answers: path with or without query → JSON value, (status, text), or a function that waits
            and gives one.
        token: what "Authorization: Negotiate" must bring; None where anybody is served.
        asked: paths with their queries, in the order in which they came.
        tokens: what came as Authorization, None where nothing did.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    token: str | None = None
    asked: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    port: int = 0
    scheme: str = "http"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"


class AnsweringHandler(BaseHTTPRequestHandler):
    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextlib.contextmanager
def http_server(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """Serve on a free port of the loopback address during the context."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serving(
    answers: Mapping[str, Any] | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Daemon]:
    """Serves answers on a port of the loopback address."""
    daemon = Daemon(dict(answers or {}), token, scheme="https" if tls else "http")

    class Handler(AnsweringHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization")
            daemon.asked.append(self.path)
            daemon.tokens.append(given)
            if daemon.token is not None and given != f"Negotiate {daemon.token}":
                self._reply(401, "who are you?", {"WWW-Authenticate": "Negotiate"})
                return
            path = self.path if self.path in daemon.answers else self.path.partition("?")[0]
            answer = daemon.answers.get(path, (404, "no such thing"))
            if isinstance(answer, Callable):  # type: ignore[arg-type]
                answer = answer()
            if isinstance(answer, tuple):
                self._reply(*answer)
            else:
                self._reply(200, json.dumps(answer))

        def _reply(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
            with contextlib.suppress(ConnectionError):  # whoever asked has stopped waiting
                self.answer(text.encode(), status, **(headers or {}))

    with http_server(Handler, tls) as server:
        daemon.port = server.server_address[1]
        yield daemon
