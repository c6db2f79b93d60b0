"""Checks that start sessions and gangs of the doctor's own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from hopsgpu.backends.spark.spark_versions import other_python
from hopsgpu.control.handshake import UnreachableError
from hopsgpu.doctor import image_checks, node_checks
from hopsgpu.doctor.machine_checks import DriverMachine
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.probe_cluster import ProbeCluster
from hopsgpu.doctor.probe_gang import ProbeResult, try_nodes
from hopsgpu.doctor.probe_session import NoSessionError, started
from hopsgpu.doctor.report import Check, join_names, ok, unknown, wrong
from hopsgpu.errors import Cancelled, GangTimeout
from hopsgpu.units import count_of

_SESSION_SECONDS = 120.0
_GANG = "gang"
# Applications after the first one. Each takes about a minute.
_MAX_RETRIES = 2


class Sessions:
    """Starts applications, and inspects the nodes from containers.

    Args:
        cluster: the cluster before the first application.
        conf: Spark properties of the applications.
        seconds: longest wait for executors on the nodes.
    """

    def __init__(
        self,
        cluster: ProbeCluster,
        machine: DriverMachine,
        conf: Mapping[str, str],
        seconds: float,
    ) -> None:
        self._cluster = cluster
        self._machine = machine
        self._conf = conf
        self._seconds = seconds

    def checks(self) -> Iterator[Check]:
        """Yield the checks that need an application.

        If executors fail on some nodes, or do not start in time, another application inspects the
        other nodes. Only YARN can exclude nodes.
        """
        result = yield from self._probe_first(self._cluster.free)
        if result is None:
            return
        for _ in range(_MAX_RETRIES):
            if result.uninspected:
                result = self._probe_rest(result)
        yield check_gang(result, self._cluster.remedies)
        yield from node_checks.check_nodes(
            result.facts,
            result.failed,
            {**self._cluster.skipped, **result.skipped, **result.uninspected},
            str(result.error or ""),
            python=self._machine.python,
            spark=self._machine.spark or "",
            totals={node.host: node.total for node in self._cluster.gpus.nodes},
            remedies=self._cluster.remedies,
        )
        if self._cluster.has_image:
            yield from image_checks.check_containers(result.facts)

    def _probe_first(self, hosts: Sequence[str]) -> Generator[Check, None, ProbeResult | None]:
        """Yield the first application's checks; return its result, None if it did not start."""
        try:
            with started(self._conf, self._cluster, _SESSION_SECONDS) as session:
                yield ok("session", f"{session.sparkContext.applicationId} has started")
                return try_nodes(hosts, self._cluster, self._seconds) if hosts else ProbeResult()
        except NoSessionError as error:
            yield wrong("session", str(error), error.fix, [f"Spark's log: {error.log}"])
        in_image = image_checks.NAMES if self._cluster.has_image else ()
        names = (_GANG, *node_checks.NAMES, *in_image)
        yield from (unknown(name, "no session") for name in names)
        return None

    def _probe_rest(self, earlier: ProbeResult) -> ProbeResult:
        """Inspect the uninspected nodes with another gang; return the result of both gangs."""
        hosts = tuple(earlier.uninspected)
        conf = self._cluster.exclude(self._conf, (*earlier.failed, *earlier.skipped))
        if conf is None:
            return earlier
        try:
            with started(conf, self._cluster, _SESSION_SECONDS):
                result = try_nodes(hosts, self._cluster, self._seconds)
        except NoSessionError as error:
            result = ProbeResult(skipped=dict.fromkeys(hosts, str(error)), error=error)
        return replace(
            result,
            failed={**earlier.failed, **result.failed},
            skipped={**earlier.skipped, **result.skipped},
        )


def check_gang(result: ProbeResult, remedies: NodeRemedies) -> Check:
    """Check whether all executors started and reached the driver over the control channel."""
    if result.facts:
        executors = count_of(len(result.facts), "executor")
        return ok(_GANG, f"{executors} reached the driver {result.seconds:.0f} s after the request")
    error = result.error
    if error is None:
        return unknown(_GANG, "no node has a free GPU")
    if result.failed:
        return unknown(_GANG, f"executors failed on {join_names(sorted(result.failed))}")
    is_refused = bool(remedies.refusal) and remedies.refusal in str(error)
    if isinstance(error, GangTimeout | Cancelled) and not is_refused:
        return unknown(_GANG, f"not all executors started: {error}", remedies.late)
    if UnreachableError.__name__ in str(error):
        return wrong(
            _GANG,
            str(error),
            "set spark.hopsgpu.address to an address of this machine that the nodes reach, and"
            " spark.hopsgpu.ports to ports that the firewall lets through, such as 40000-40100",
        )
    if other_python(str(error)) or node_checks.missing_program(str(error)):
        return unknown(_GANG, "the executors' Python ended the gang: see the check executor python")
    return wrong(_GANG, str(error), remedies.gang)
