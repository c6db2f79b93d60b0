"""Suppression of messages that Spark logs because hopsgpu kills executors and cancels jobs.

The messages name the executor, its connection or the job, so those about all others are logged.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.backends.spark.log4j import Log4jFilters

# Spark's driver may send something to an executor minutes after its end, such as the removal of a
# broadcast variable.
EXPECTED_SECONDS = 600.0
_TASK = r"Lost task \S+ in stage \S+ \(TID \d+\) \(\S+ executor"
_SCHEDULER = "org.apache.spark.scheduler"
_STORAGE = "org.apache.spark.storage"
_NETWORK = "org.apache.spark.network"
# By logger: regular expressions of the beginnings of messages. Losses for other reasons than a kill
# by the driver have other messages.
_OF_EXECUTORS = {
    f"{_SCHEDULER}.cluster.YarnScheduler": (
        r"Lost an executor {ids} \(already removed\): Executor killed by driver",
    ),
    f"{_SCHEDULER}.TaskSetManager": (
        _TASK + r" {ids}\): ExecutorLostFailure .* Reason: Executor killed by driver",
    ),
    f"{_SCHEDULER}.cluster.YarnSchedulerBackend$YarnDriverEndpoint": (
        r"Ignored task status update \(\d+ state KILLED\) from unknown executor with ID {ids}\b",
    ),
    f"{_STORAGE}.BlockManagerMasterEndpoint": (
        r"Error trying to remove \w+ \S+ from block manager BlockManagerId\({ids}, ",
    ),
}
_OF_CONNECTIONS = {
    f"{_NETWORK}.client.TransportClient": (r"Failed to send RPC .* to {addresses}",),
    f"{_NETWORK}.client.TransportResponseHandler": (
        r"Still have \d+ requests outstanding when connection from {addresses} is closed",
    ),
    f"{_NETWORK}.server.TransportChannelHandler": (r"Exception in connection from {addresses}",),
    f"{_STORAGE}.BlockManagerMaster": (r"Failed to remove broadcast .* to {addresses}",),
}
_OF_JOBS = {
    f"{_SCHEDULER}.TaskSetManager": (
        _TASK + r" \S+\): TaskKilled \(Stage cancelled: .*\b{tags}\b",
    ),
    # This message names no job. A task in this state was killed on purpose.
    f"{_SCHEDULER}.cluster.YarnScheduler": (
        r"Ignoring update with state KILLED for TID \d+ because its task set is gone",
    ),
}


@dataclass(frozen=True)
class KilledExecutor:
    """An executor that hopsgpu kills.

    Attributes:
        address: host and port of its connection to the driver; "" if they are not known.
    """

    id: str
    address: str = ""


def regexes_by_logger(
    executors: Iterable[KilledExecutor] = (), tags: Iterable[str] = ()
) -> Mapping[str, Sequence[str]]:
    """Return regular expressions of the messages to suppress.

    Args:
        tags: the tags of cancelled jobs.
    """
    executors = list(executors)
    groups = (
        (_OF_EXECUTORS, "{ids}", [executor.id for executor in executors]),
        (_OF_CONNECTIONS, "{addresses}", [e.address for e in executors if e.address]),
        (_OF_JOBS, "{tags}", list(tags)),
    )
    regexes: dict[str, list[str]] = {}
    for messages, place, names in groups:
        if names:
            name = _one_of(names, is_address=place == "{addresses}")
            for logger, templates in messages.items():
                regexes.setdefault(logger, []).extend(t.replace(place, name) for t in templates)
    return regexes


def _one_of(names: Iterable[str], *, is_address: bool) -> str:
    choice = f"(?:{'|'.join(map(re.escape, dict.fromkeys(names)))})"
    # Java writes an address as host/IP:port or /IP:port.
    return rf"(?:\S*/)?{choice}(?!\d)" if is_address else choice


class ReleaseMessages:
    """Suppresses the messages about executors and jobs for `seconds` after hopsgpu ends them.

    Later releases remove the filters of earlier ones. The last filters stay: they name executors
    and jobs that have ended, so that messages about others pass.
    """

    def __init__(self, seconds: float = EXPECTED_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        # By executor or job's tag: the time until which its messages are suppressed.
        self._until: dict[KilledExecutor | str, float] = {}
        self._filters: Log4jFilters | None = None

    def suppress(self, jvm: Any, ended: Iterable[KilledExecutor | str]) -> None:
        """Suppress the messages about executors that are killed and jobs that are cancelled.

        Args:
            ended: executors, and tags of jobs.
        """
        with self._lock:
            now = time.monotonic()
            added = [item for item in ended if item not in self._until]
            if added:
                kept = {item: until for item, until in self._until.items() if until > now}
                self._until = kept | dict.fromkeys(added, now + self._seconds)
                self._replace_filters(jvm)

    def _replace_filters(self, jvm: Any) -> None:
        before = self._filters
        executors = [item for item in self._until if isinstance(item, KilledExecutor)]
        tags = [item for item in self._until if isinstance(item, str)]
        # Install first: no message may pass between the filters.
        self._filters = Log4jFilters(jvm, regexes_by_logger(executors, tags))
        if before is not None:
            before.remove()
