"""A gang of the doctor, with a container on each node with GPUs."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.backends.gang_request import demand_of
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.settings import check_gang
from hopsgpu.cluster_managers.capacity import check_possible
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.spec import ExecutorShape
from hopsgpu.doctor.free_nodes import RANK_MIB
from hopsgpu.doctor.node_probe import NodeFacts, inspect_node
from hopsgpu.doctor.probe_cluster import ProbeCluster
from hopsgpu.errors import Cancelled, CapacityError, ConfigError, GangTimeout, HopsGpuError
from hopsgpu.launcher.api import plan, submit
from hopsgpu.runs.run import Run
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import count_of

_SHAPE: Mapping[str, Any] = {
    "gpus_per_worker": 1,
    "cores_per_worker": 1,
    "memory_per_worker": f"{RANK_MIB}m",
}
_POLL_SECONDS = 1.0
_RUN_SECONDS = 30.0
_ENDING_SECONDS = 45.0
_SNAPSHOT_SECONDS = 10.0


@dataclass(frozen=True)
class ProbeResult:
    """The result of the gang.

    Attributes:
        failed: by host, why no container stayed there.
        skipped: by host, why no container was granted there.
        uninspected: by host, why another gang, without the hosts above, may still inspect it.
        seconds: time until all containers were granted; 0 if they were not.
    """

    facts: tuple[NodeFacts, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    uninspected: Mapping[str, str] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float = 0.0


def try_nodes(hosts: Sequence[str], cluster: ProbeCluster, seconds: float) -> ProbeResult:
    """Inspect nodes from containers on them; wait at most `seconds` for the containers."""
    try:
        application = _application()
        workers = _max_containers(len(hosts), application)
        run = submit(
            inspect_node,
            workers=workers,
            placement="spread",
            name="doctor",
            acquire_timeout=seconds,
            run_timeout=_RUN_SECONDS,
            progress="off",
            **_SHAPE,
        )
    except Exception as error:  # noqa: BLE001 - also Spark's own errors are a result
        return ProbeResult(error=error, skipped=dict.fromkeys(hosts, "the gang failed"))
    watch = _GangWatch(hosts, cluster.end_reason)
    with _ended(run):
        while not run.wait(_POLL_SECONDS):
            watch.record(run.status(), application.failing.containers())
            if watch.is_decided:
                run.cancel()  # the failed containers would only fail again
        try:
            result = run.result()
        except Exception as error:  # noqa: BLE001 - as above
            return watch.failure_result(error)
    facts: tuple[NodeFacts, ...] = tuple(result.values)
    skipped = sorted(set(hosts) - {node.host for node in facts})
    allowed = f"the application may have {workers} of {count_of(len(hosts), 'executor')} at once"
    timeline = result.timeline
    return ProbeResult(
        facts=facts,
        skipped=dict.fromkeys(skipped, allowed),
        seconds=(timeline.granted or 0.0) - (timeline.requested or 0.0),
    )


def _application() -> Application:
    application = application_of(None)
    assert isinstance(application, Application), "the doctor's session is on a cluster"
    return application


def _max_containers(nodes: int, application: Application) -> int:
    """Return on how many nodes the limits of the application allow an executor at once.

    Raise CapacityError if they do not allow one.
    """
    shape = plan(inspect_node, workers=1, placement="spread", **_SHAPE).shape
    return largest_gang(nodes, shape, application)


def largest_gang(nodes: int, shape: ExecutorShape, application: Application) -> int:
    """Return the most executors, one per node, that the application may have; 1 at least."""
    # The snapshot that `plan` took a moment ago is recent enough.
    snapshot = application.snapshot(_SNAPSHOT_SECONDS)

    def is_refused(workers: int) -> bool:
        try:
            check_gang(application.setting, workers)
            check_possible(demand_of(shape, workers, "spread"), snapshot)
        except (CapacityError, ConfigError):
            return True
        return False

    return bisect.bisect_left(range(2, nodes + 1), True, key=is_refused) + 1


@contextlib.contextmanager
def _ended(run: Run) -> Iterator[None]:
    """Cancel the run on every path, and remove its record, which nobody needs."""
    try:
        yield
    finally:
        run.cancel()
        run.wait(_ENDING_SECONDS)
        with contextlib.suppress(HopsGpuError):  # the check of the lake reports it
            root = LakePath(application_of(None).root, should_fail_fast=True)
            (root / "runs" / run.run_id).remove()


class _GangWatch:
    """Observes which containers of a waiting gang start, and why others end."""

    def __init__(self, hosts: Sequence[str], read_reason: Callable[[str, str], str]) -> None:
        self._hosts = frozenset(hosts)
        self._read_reason = read_reason
        self._ended: dict[str, str] = {}  # the containers that ended, with their hosts
        self._unread: dict[str, tuple[str, str]] = {}
        self.started_hosts: frozenset[str] = frozenset()
        self.failed: dict[str, str] = {}
        self.why = ""

    @property
    def is_decided(self) -> bool:
        return bool(self.failed) and self._hosts <= self.started_hosts | self.failed.keys()

    def failure_result(self, error: Exception) -> ProbeResult:
        """Return the result of a gang that did not become complete, or whose ranks failed."""
        self._read_logs()
        for host, (container, why) in sorted(self._unread.items()):
            self.failed[host] = f"{container} ended there, and its log cannot be read: {why}"
        hosts = [host for host in sorted(self._hosts) if host not in self.failed]
        is_late = isinstance(error, GangTimeout | Cancelled)
        why = (self.why or str(error)) if is_late else "the gang failed"
        missing = f"no container started there in time: {why}" if is_late else why
        uninspected = [host for host in hosts if is_late and host in self.started_hosts]
        if self.failed and not uninspected:
            # Repeated failures may have ended the application, or kept others from starting.
            uninspected = hosts
        others_missing = f"its container started, but others did not: {why}"
        return ProbeResult(
            failed=self.failed,
            skipped={host: missing for host in hosts if host not in uninspected},
            uninspected={
                host: others_missing if host in self.started_hosts else why for host in uninspected
            },
            error=error,
        )

    def record(self, status: RunStatus, ended: Mapping[str, str]) -> None:
        """Record which containers started, what the gang waits for, and why containers ended.

        `ended` has containers that ended before their executors were ready, with their hosts.
        """
        if status.state != "waiting":
            return
        self.started_hosts |= frozenset(status.granted_hosts)
        self.why = status.waiting_for
        self._ended = dict(ended)
        self._read_logs()

    def _read_logs(self) -> None:
        """Read why containers ended; a log that cannot be read now may be readable later."""
        self._unread = {}
        for container, host in self._ended.items():
            if host not in self._hosts or host in self.started_hosts or host in self.failed:
                continue
            try:
                self.failed[host] = self._read_reason(container, host)
                self._unread.pop(host, None)
            except HopsGpuError as error:
                self._unread[host] = (container, str(error))
