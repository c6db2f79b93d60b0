"""The metrics over HTTP, in Prometheus' text format; and the files that go with them."""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler

from hopsgpu.core.host_header import is_host_of_server
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.monitoring.families import families
from hopsgpu.monitoring.observation import Look

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

_WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

# Several Prometheus servers that poll at the same time share an observation.
_FRESH_SECONDS = 1.0
# A connection that sends nothing has a thread until then.
_SILENT_SECONDS = 30.0
# prometheus-client fails if a version in the Accept header is no number.
_NO_VERSION = re.compile(r"version=(?!\d+(\.\d+)*\s*([;,]|$))")
_REFUSAL = b"""The exporter has no such host name. If it is meant to be reached under that name,
start it with --allow-host NAME.
"""
ALERTS, DASHBOARD = "alerts.yml", "dashboard.json"


class Looks(Protocol):
    """A source of observations, one at a time."""

    def look(self) -> Look: ...


class LookCollector:
    """Prometheus' collector: makes an observation when it is asked."""

    def __init__(self, monitor: Looks) -> None:
        self._monitor = monitor
        self._lock = threading.Lock()
        self._last: Look | None = None
        self._taken = 0.0

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families now."""
        with self._lock:
            if self._last is None or time.monotonic() - self._taken > _FRESH_SECONDS:
                self._last = self._monitor.look()
                self._taken = time.monotonic()
            last = self._last
        yield from families(last)


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the server's default is a line for each request."""


class RequestCheck:
    """A WSGI application before another one, which gets only requests that it can answer.

    Requests whose Host header is not the server's are refused.
    """

    def __init__(self, app: _WsgiApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = names

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if is_host_of_server(environ.get("HTTP_HOST", ""), self._names):
            if _NO_VERSION.search(environ.get("HTTP_ACCEPT", "")):
                del environ["HTTP_ACCEPT"]
            return self._app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [_REFUSAL]


@contextlib.contextmanager
def serving(monitor: Looks, host: str, port: int, names: Sequence[str] = ()) -> Iterator[str]:
    """Serve the metrics while inside; yield their URL.

    The first observation is made before, since counters count from then on.

    Args:
        port: port to listen on; 0 for any free one.
        names: names of this server, beside those of the machine and `host`.

    Raises:
        ConfigError: prometheus-client is not installed.
        HopsGpuError: the address cannot be listened on.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "the exporter needs prometheus-client, which is not installed here: pip install"
            " 'hopsgpu[monitoring]'"
        )
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

    registry, collector = CollectorRegistry(), LookCollector(monitor)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise HopsGpuError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port,"
            " or another address of this machine as --host"
        ) from error
    server.RequestHandlerClass = _Handler
    own_names = (host, socket.gethostname(), socket.getfqdn(), *names)
    server.set_app(RequestCheck(make_wsgi_app(registry), own_names))
    try:
        for _ in collector.collect():
            pass
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def file_text(name: str) -> str:
    """Return the text of the file of alert rules (`ALERTS`) or of the dashboard (`DASHBOARD`)."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
