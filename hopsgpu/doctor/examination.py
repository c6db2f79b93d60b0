"""Runs all checks, the quick ones first, and yields each result as soon as it is known."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hopsgpu.backends.spark.spark_location import find_spark
from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.kubernetes.kind import Kubernetes
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.manager_table import MASTER, YARN_MASTER, cluster_master, kind_of
from hopsgpu.cluster_managers.standalone.kind import Standalone
from hopsgpu.cluster_managers.yarn.kind import Yarn
from hopsgpu.doctor import facts as gather
from hopsgpu.doctor import lake_checks, machine_checks, node_checks, queue_checks, settings_checks
from hopsgpu.doctor.cluster_examination import ClusterExamination, ExaminedCluster
from hopsgpu.doctor.kubernetes_examination import KubernetesExamination
from hopsgpu.doctor.report import Check, unknown, wrong
from hopsgpu.doctor.standalone_examination import StandaloneExamination
from hopsgpu.doctor.yarn_examination import YarnExamination
from hopsgpu.errors import ConfigError
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.spark_defaults import spark_defaults

_LAKE_SECONDS = 20.0
_EXAMINATIONS: Mapping[type[ManagerKind], type[ClusterExamination]] = {
    Yarn: YarnExamination,
    Standalone: StandaloneExamination,
    Kubernetes: KubernetesExamination,
}


def examined_master(conf: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the master of the examined session; YARN's if spark-defaults.conf is unreadable."""
    try:
        return cluster_master(conf, environ)
    except ConfigError:
        return conf.get(MASTER, YARN_MASTER)


@dataclass(frozen=True)
class Examination:
    """The order of the checks, and the facts that they need.

    Attributes:
        conf: Spark properties of the session, as for hopsgpu.session().
        seconds: longest wait for executors on the nodes.
    """

    conf: Mapping[str, str]
    should_start_session: bool
    seconds: float

    def checks(self) -> Iterator[Check]:
        """Yield every check; causes precede their effects."""
        try:
            defaults, unread = spark_defaults(os.environ), None
        except ConfigError as error:
            defaults, unread = {}, str(error)
        master = examined_master(self.conf, os.environ)
        settings = {**defaults, **self.conf, MASTER: master}
        machine = gather.machine_facts(os.environ, settings)
        yield machine_checks.check_java(machine)
        yield machine_checks.check_spark(machine)
        yield machine_checks.check_python(machine)
        examination = _examination_of(master)(settings, machine)
        cluster = yield from examination.checks()
        if unread is not None:
            yield wrong("settings", unread, "make it readable, or set SPARK_CONF_DIR")
        else:
            yield settings_checks.check_settings(master, defaults, self.conf, cluster.gpu_nodes)
        if cluster.refusal:
            yield unknown(examination.lake_name, cluster.refusal)
            yield unknown(queue_checks.NAME, cluster.refusal)
            return
        if cluster.lake:
            yield _lake(cluster.lake, examination.lake_name)
        elif cluster.no_lake:
            yield unknown(examination.lake_name, cluster.no_lake)
        if cluster.manager is not None:
            yield _gang_queue(settings, cluster.hadoop, cluster.manager)
        if self.should_start_session:
            yield from self._session(cluster, machine)

    def _session(
        self, cluster: ExaminedCluster, machine: machine_checks.DriverMachine
    ) -> Iterator[Check]:
        why = cluster.no_probe
        if cluster.probe is not None:
            why = _no_spark() if cluster.probe.gpus.nodes else "no node has GPUs"
        if cluster.probe is None or why:
            names = ("session", "gang", *node_checks.NAMES) if why else ()
            yield from (unknown(name, f"not tried: {why}") for name in names)
            return
        # A late import, because this module imports Spark.
        from hopsgpu.doctor.session_checks import Sessions

        yield from Sessions(cluster.probe, machine, self.conf, self.seconds).checks()


def _examination_of(master: str) -> type[ClusterExamination]:
    kind = kind_of(master)
    # YARN's examination also says what is missing if no cluster manager is configured.
    return YarnExamination if kind is None else _EXAMINATIONS[type(kind)]


def _lake(root: str, name: str) -> Check:
    try:
        facts = BoundedCall("hopsgpu-lake", lambda: gather.lake_facts(root)).result(_LAKE_SECONDS)
    except TimeoutError:
        facts = lake_checks.LakeFacts(root, f"no answer after {_LAKE_SECONDS:.0f} s", None)
    return lake_checks.check_lake(facts, name)


def _gang_queue(
    settings: Mapping[str, str], hadoop: gather.Setting, manager: ClusterManager
) -> Check:
    def read() -> queue_checks.QueueFacts:
        return gather.queue_facts(settings, os.environ, hadoop, manager)

    try:
        facts = BoundedCall("hopsgpu-queue", read).result(_LAKE_SECONDS)
    except TimeoutError:
        problem = f"the lake did not answer: no answer after {_LAKE_SECONDS:.0f} s"
        facts = queue_checks.QueueFacts("", problem=problem)
    return queue_checks.check_gang_queue(facts)


def _no_spark() -> str:
    """Make Spark importable; return why it cannot be imported, or ""."""
    try:
        find_spark()
    except ConfigError as error:
        return str(error)
    return ""
