"""The hosts on which executors end before they are ready; others are preferred to these."""

from __future__ import annotations

import threading
from collections import defaultdict

# One end may have any cause.
_MANY = 2
_SECONDS = 600.0


class FailingHosts:
    """The hosts of one application on which executors ended unexpectedly; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock: when each container was seen to have ended, by host.
        self._ended: defaultdict[str, dict[str, float]] = defaultdict(dict)

    def ended(self, container: str, host: str, now: float) -> None:
        """Record that a container has ended before its executor was ready.

        Args:
            container: its id; one that was recorded before counts once.
            host: its node.
            now: the clock's reading.
        """
        with self._lock:
            self._ended[host].setdefault(container, now)

    def arrived(self, host: str) -> None:
        """Record that an executor of a host is ready: what ended there before had other causes."""
        with self._lock:
            self._ended.pop(host, None)

    def containers(self) -> dict[str, str]:
        """Return these containers by id, each with its host."""
        with self._lock:
            return {name: host for host, ended in self._ended.items() for name in ended}

    def hosts(self, now: float) -> frozenset[str]:
        """Return the hosts on which at least two executors have ended in the last ten minutes."""
        with self._lock:
            recent = {
                host: [at for at in ended.values() if now - at < _SECONDS]
                for host, ended in self._ended.items()
            }
        return frozenset(host for host, ends in recent.items() if len(ends) >= _MANY)
