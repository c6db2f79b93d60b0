"""The hosts on which executors end before they are ready, so that other hosts are preferred."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

from hopsgpu.cluster_managers.yarn.container_exits import ContainerExit

# A single end may have any cause.
_MIN_ENDS = 2
_REMEMBERED_SECONDS = 600.0


class FailingHosts:
    """The hosts of one application on which executors ended unexpectedly; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock: the time of each container's end, by host.
        self._ended: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._exits: dict[str, ContainerExit] = {}
        self._has_arrival = False

    def record_end(self, container: str, host: str, now: float) -> None:
        """Record that a container has ended too early; a repeated ID counts once."""
        with self._lock:
            self._ended[host].setdefault(container, now)

    def record_arrival(self, host: str) -> None:
        """Forget the ends on a host, because an executor has become ready there."""
        with self._lock:
            self._ended.pop(host, None)
            self._has_arrival = True

    def record_exit(self, container: str, exit_: ContainerExit) -> None:
        """Record why a container ended."""
        with self._lock:
            self._exits[container] = exit_

    def exit_of(self, container: str) -> ContainerExit | None:
        with self._lock:
            return self._exits.get(container)

    def hopeless_exit(self) -> ContainerExit | None:
        """Return why no executor can start; None if another attempt may help.

        A setting is the cause of the end of at least two containers, and no executor of the
        application has become ready.
        """
        with self._lock:
            if self._has_arrival:
                return None
            kinds = Counter(e.kind for e in self._exits.values() if e.is_setting)
            if not kinds or kinds.most_common(1)[0][1] < _MIN_ENDS:
                return None
            kind = kinds.most_common(1)[0][0]
            return next(e for e in self._exits.values() if e.is_setting and e.kind == kind)

    def containers(self) -> dict[str, str]:
        with self._lock:
            return {name: host for host, ended in self._ended.items() for name in ended}

    def hosts(self, now: float) -> frozenset[str]:
        """Return the hosts on which at least two executors have ended in the last ten minutes."""
        with self._lock:
            recent = {
                host: [at for at in ended.values() if now - at < _REMEMBERED_SECONDS]
                for host, ended in self._ended.items()
            }
        return frozenset(host for host, ends in recent.items() if len(ends) >= _MIN_ENDS)
