"""YARN as a kind of cluster manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.yarn.gpu_resource import choose_gpu_resource
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.gpu.script_archive import ALIAS
from hopsgpu.storage.hadoop_conf import HadoopConf

_MODE = "spark.submit.deployMode"
_PLUGIN = "spark.resources.discoveryPlugin"
# Spark's default plugin, which runs the discovery script.
_DEFAULT_PLUGIN = "org.apache.spark.resource.ResourceDiscoveryScriptPlugin"
_ARCHIVES = "spark.yarn.dist.archives"
_LABEL = "spark.yarn.executor.nodeLabelExpression"
# The heartbeat interval of Spark's application master, and its default.
_HEARTBEAT = "spark.yarn.scheduler.heartbeat.interval-ms"
_HEARTBEAT_MS = 3000
_TAGS = "spark.yarn.tags"
_WAIT = "spark.yarn.submit.waitAppCompletion"


def label_of(setting: Callable[[str], str | None]) -> str | None:
    """Return the node label with which executors are requested, or None."""
    return setting(_LABEL) or None


class Yarn(ManagerKind):
    """YARN, in client and in cluster mode."""

    title = "YARN"
    masters = "yarn"
    has_shell = True
    has_queues = True
    has_images = True
    session_settings: Mapping[str, str] = {
        # The release of GPUs is visible within one heartbeat of the application master.
        _HEARTBEAT: "250",
        # YARN must count the memory of ranks, whose process daemon outlives the task that starts
        # it.
        "spark.python.daemon.module": "hopsgpu.spark.daemon",
        # Executors that failed long ago do not count towards the limit that ends the application.
        "spark.executor.failuresValidityInterval": "10min",
        # Spark's default is twice maxExecutors: a node on which executors fail would soon end the
        # application, with its ETL. A waiting gang itself limits repeated failures.
        "spark.executor.maxNumFailures": "1000",
        "spark.yarn.maxAppAttempts": "1",
        # In cluster mode the driver's Python is in the application master's container too.
        "spark.driver.minMemoryOverhead": "1g",
        # The driver in YARN may import, read and build for longer before it creates its session
        # than the 100 s after which Spark ends it.
        "spark.yarn.am.waitTime": "30min",
    }

    def has_master(self, master: str) -> bool:
        return master.strip() == "yarn"

    def find_problems(self, setting: Callable[[str], str | None]) -> list[str]:
        findings = []
        mode = setting(_MODE) or "client"
        if mode not in ("client", "cluster"):
            findings.append(f"{_MODE}={mode}: must be client or cluster")
        plugin = setting(_PLUGIN)
        if plugin is not None and plugin.strip() != _DEFAULT_PLUGIN:
            findings.append(
                f"{_PLUGIN}={plugin}: hopsgpu's discovery script assigns the GPUs, and would not"
                " run; remove it"
            )
        archives = (setting(_ARCHIVES) or "").split(",")
        if not any(entry.endswith(f"#{ALIAS}") for entry in archives):
            by = "`hopsgpu submit --deploy-mode cluster`" if mode == "cluster" else ""
            findings.append(
                f"the discovery script is not shipped ({_ARCHIVES} has no '#{ALIAS}'), and an"
                " application that already runs can no longer receive it: start it with"
                f" {by or 'hopsgpu.session()'}"
            )
        return findings

    def submission_settings(
        self, tag: str, setting: Callable[[str], str | None]
    ) -> Mapping[str, str]:
        tags = ",".join(filter(None, (setting(_TAGS), tag)))
        return {_WAIT: "false", **({_TAGS: tags} if tag else {})}

    def settle_seconds(self, setting: Callable[[str], str | None]) -> float:
        interval = setting(_HEARTBEAT) or ""
        return 2 * (int(interval) if interval.isdigit() else _HEARTBEAT_MS) / 1000

    def connect(
        self,
        properties: Mapping[str, str],
        environ: Mapping[str, str],
        hadoop: Callable[[str], str | None] | None = None,
        seconds: tuple[float, float] | None = None,
    ) -> YarnManager:
        return YarnManager(
            hadoop or HadoopConf.load(environ).get,
            gpu_resource=choose_gpu_resource(properties, environ),
            partition=label_of(properties.get),
            queue=properties.get("spark.yarn.queue") or "default",
            seconds=seconds,
        )
