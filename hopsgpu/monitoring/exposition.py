"""The metrics over HTTP, in Prometheus' text format; and the files that go with them."""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.monitoring.families import families
from hopsgpu.monitoring.observation import Look

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

# Several Prometheus servers that poll at the same time share an observation.
_FRESH_SECONDS = 1.0
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


@contextlib.contextmanager
def serving(monitor: Looks, host: str, port: int) -> Iterator[str]:
    """Serve the metrics while inside; yield their URL.

    The first observation is made before, since counters count from then on.

    Args:
        port: port to listen on; 0 for any free one.

    Raises:
        ConfigError: prometheus-client is not installed.
        HopsGpuError: the address cannot be listened on.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "the exporter needs prometheus-client, which is not installed here: pip install"
            " 'hopsgpu[monitoring]'"
        )
    from prometheus_client import CollectorRegistry, start_http_server

    registry, collector = CollectorRegistry(), LookCollector(monitor)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise HopsGpuError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port,"
            " or another address of this machine as --host"
        ) from error
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
