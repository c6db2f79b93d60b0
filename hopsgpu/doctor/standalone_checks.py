"""Checks of a standalone master: its state, its Spark, and its workers' GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hopsgpu.backends.spark.spark_versions import release_of
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.standalone.master_answers import ALIVE
from hopsgpu.cluster_managers.standalone.master_url import WEB_SETTING, WEB_VARIABLE
from hopsgpu.cluster_managers.standalone.token_file import TOKEN_SETTING
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.report import Check, join_names, ok, wrong
from hopsgpu.units import count_of

MASTER, GPUS, VERSION = "master", "gpus", "master spark"
_WORKER_ENV = "conf/spark-env.sh of the workers"
NODE_REMEDIES = NodeRemedies(
    discovery=(
        "each worker with GPUs needs NVIDIA's driver with nvidia-smi, and PYSPARK_PYTHON must name"
        " a Python that every worker has"
    ),
    spark=(
        "run the workers with Spark {version} (SPARK_HOME where they start), or the driver with"
        " the workers' Spark"
    ),
    leases=(
        "create it as root, mode 1777; or name another one with HOPSGPU_LEASE_DIR in"
        f" {_WORKER_ENV}, and restart them"
    ),
    gang=(
        "fix what the message says; the master also shuts an application down whose executors fail"
        " repeatedly: their logs are in work/ of the workers, and the workers' own logs say why an"
        " executor did not start"
    ),
)
_ANSWER = (
    f"start the master, or set {WEB_SETTING} ({WEB_VARIABLE}) to the URL of its web interface, by"
    f" default port 8080 of its host; if its pages need a token, set {TOKEN_SETTING}"
)
_WORKER_GPUS = (
    "set spark.worker.resource.gpu.amount, and spark.worker.resource.gpu.discoveryScript to a copy"
    " of spark-scripts/worker-gpus, in the workers' properties (spark-defaults.conf, or"
    " SPARK_WORKER_OPTS), and restart them"
)
SHARED_LAKE = (
    "all workers",
    "set spark.hopsgpu.root (HOPSGPU_ROOT) to a lake, or to a directory that all workers mount at"
    " the same path",
)


@dataclass(frozen=True)
class MasterFacts:
    """The state of the masters and their workers.

    Attributes:
        address: web address of the active master.
        standby: status of each other master, by web address.
        spark: version of the active master's Spark; "" if it is unknown.
        nodes: the workers.
        gpus: the GPUs of the workers.
    """

    address: str
    standby: Mapping[str, str]
    spark: str
    nodes: tuple[Node, ...]
    gpus: ClusterGpus

    @property
    def lost_hosts(self) -> tuple[str, ...]:
        """Return the hosts that have lost a worker, and have no other one."""
        running = {node.host for node in self.nodes if node.state == "RUNNING"}
        lost = (node.host for node in self.nodes if node.state == "LOST")
        return tuple(dict.fromkeys(host for host in lost if host not in running))


def check_no_answer(error: str) -> Check:
    """Return the check of a master that does not answer, or whose settings are wrong."""
    return wrong(MASTER, error, _ANSWER)


def check_master(facts: MasterFacts) -> Check:
    version = f", Spark {facts.spark}" if facts.spark else ""
    running = sum(node.state == "RUNNING" for node in facts.nodes)
    standby = "".join(f"; {address} is {status}" for address, status in facts.standby.items())
    workers = count_of(running, "worker")
    return ok(MASTER, f"{facts.address} is {ALIVE}{version}, {workers}{standby}")


def check_version(master: str, driver: str | None) -> Check | None:
    """Check whether master and driver have the same minor version; None if one is unknown."""
    if not master or driver is None:
        return None
    if release_of(master) == release_of(driver):
        return ok(VERSION, f"{master}, and {driver} here")
    return wrong(
        VERSION,
        f"the master runs Spark {master}, and this machine {driver}: their messages differ",
        f"use the master's Spark here: set SPARK_HOME to it, or pip install 'pyspark=={master}'",
    )


def check_gpus(facts: MasterFacts) -> Check:
    """Check whether workers have GPUs, and whether any worker was lost."""
    running = [node for node in facts.nodes if node.state == "RUNNING"]
    with_gpus = [node for node in running if node.total.gpus]
    where = join_names(f"{node.host} {node.total.gpus}" for node in with_gpus)
    gpus = sum(node.total.gpus for node in with_gpus)
    seen = f"{gpus} on {count_of(len(with_gpus), 'worker')} ({where or 'none'})"
    if facts.lost_hosts:
        return wrong(
            GPUS,
            f"{seen}; LOST: {join_names(facts.lost_hosts)}",
            "start these workers again (their logs say why they ended); the master forgets workers"
            " that stay away (spark.dead.worker.persistence)",
        )
    if not running:
        return wrong(
            GPUS,
            "no worker has registered",
            "start a worker on each node: sbin/start-worker.sh with the URL of the master",
        )
    if not with_gpus:
        return wrong(GPUS, f"none of {count_of(len(running), 'worker')} has GPUs", _WORKER_GPUS)
    return ok(GPUS, seen)
