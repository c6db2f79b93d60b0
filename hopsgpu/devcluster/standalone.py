"""A Spark standalone cluster in place of YARN: Masters and Workers, from PySpark's own jars.

Each Worker offers the GPUs that `spark-scripts/worker-gpus` lists on its node. Executors are
children of their Worker, whose environment they inherit.

Source: the Spark documentation, "Spark Standalone Mode", also for high availability.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hopsgpu.devcluster import admin
from hopsgpu.devcluster.config import ClusterSpec, Properties
from hopsgpu.devcluster.hadoop_jars import spark_versions
from hopsgpu.devcluster.layout import MASTER, SPARK_MASTERS, ClusterLayout, address_of
from hopsgpu.devcluster.site_files import node_size
from hopsgpu.devcluster.standby import quorum

Ports = Mapping[str, int]
GPU_RESOURCE = "spark.worker.resource.gpu"
_MASTER_CLASS = "org.apache.spark.deploy.master.Master"
_WORKER_CLASS = "org.apache.spark.deploy.worker.Worker"
# A Worker that is silent for this time counts as dead (60 s by default).
_TIMEOUT_SECONDS = "10"


def master_url(spec: ClusterSpec, ports: Ports) -> str:
    """Return the URL of all Masters, for `spark.master`."""
    addresses = (f"{MASTER}:{ports[f'{daemon}.rpc']}" for daemon in spec.masters)
    return f"spark://{','.join(addresses)}"


def client_properties(spec: ClusterSpec, ports: Ports) -> Properties:
    """Return the properties that point a client's Spark and hopsgpu at the Masters."""
    pages = (f"{spec.scheme}://{MASTER}:{ports[f'{daemon}.web']}" for daemon in spec.masters)
    return {
        "spark.master": master_url(spec, ports),
        "spark.hopsgpu.master.ui": ",".join(pages),
    }


def master_properties(layout: ClusterLayout, spec: ClusterSpec, ports: Ports) -> Properties:
    recovery = {
        "spark.deploy.recoveryMode": "FILESYSTEM",
        "spark.deploy.recoveryDirectory": str(layout.recovery(SPARK_MASTERS[0])),
    }
    if spec.has_master_ha:
        recovery = {
            "spark.deploy.recoveryMode": "ZOOKEEPER",
            "spark.deploy.zookeeper.url": quorum(ports),
            "spark.deploy.zookeeper.dir": "/spark",
        }
    return {
        **_common_properties(),
        **recovery,
        # The pages have no authentication: nobody can end applications there.
        "spark.ui.killEnabled": "false",
        "spark.master.rest.enabled": "false",
    }


def worker_properties(spec: ClusterSpec, node: str) -> Properties:
    gpus = {
        f"{GPU_RESOURCE}.amount": str(spec.gpus_per_node),
        f"{GPU_RESOURCE}.discoveryScript": str(admin.WORKER_GPUS),
    }
    return {
        **_common_properties(),
        **(gpus if spec.gpus_per_node else {}),
        **spec.conf.nodes.get(node, {}),
    }


def _common_properties() -> Properties:
    return {
        "spark.worker.timeout": _TIMEOUT_SECONDS,
        # By default, a daemon whose port is in use takes another one, where no client searches.
        "spark.port.maxRetries": "0",
    }


def command_of(daemon: str, layout: ClusterLayout, spec: ClusterSpec, ports: Ports) -> list[str]:
    """Return the main class of a Master or Worker, with its arguments."""
    common = (
        *("--host", MASTER if daemon in SPARK_MASTERS else daemon),
        *("--port", str(ports[f"{daemon}.rpc"])),
        *("--webui-port", str(ports[f"{daemon}.web"])),
        *("--properties-file", str(layout.spark_daemon_conf(daemon))),
    )
    if daemon in SPARK_MASTERS:
        return [_MASTER_CLASS, *common]
    memory, cores = node_size(spec.gpus_per_node)
    size = ("--memory", f"{memory}m", "--cores", str(cores))
    work = ("--work-dir", str(layout.node(daemon) / "work"))
    return [_WORKER_CLASS, *common, *size, *work, master_url(spec, ports)]


def environ_of(daemon: str, layout: ClusterLayout, spark: Path) -> dict[str, str]:
    """Return the variables of a Master or Worker, which executors inherit from their Worker."""
    environ = {
        "SPARK_HOME": str(spark),
        # Spark's own scripts set this variable, without which a Worker starts no executor.
        "SPARK_SCALA_VERSION": spark_versions(spark)[1],
        # The web pages have no other setting for their address.
        "SPARK_LOCAL_IP": address_of(daemon),
    }
    if daemon not in SPARK_MASTERS:
        environ["SPARK_LOCAL_DIRS"] = str(layout.node(daemon) / "local")
    return environ
