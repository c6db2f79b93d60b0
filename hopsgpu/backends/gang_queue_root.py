"""The location of a cluster's queues of gangs on the lake."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.backends.gang_queue import GangQueueReader
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import join_url
from hopsgpu.storage.spark_defaults import spark_defaults


def gang_queue_root(
    locks: str | None, default_fs: str | None, cluster: str
) -> tuple[LakePath, tuple[str, ...]]:
    """Return an existing directory, and the names that lead to the directory of all queues.

    Each cluster partition has a directory in the latter.

    Args:
        locks: value of `spark.hopsgpu.locks`, or None.

    Raises:
        ConfigError: `locks` is not a valid directory, or the directory is on an object store.
    """
    base = LakePath(locks or join_url(default_fs or "file:///", "tmp"), should_fail_fast=True)
    base.check_renames("queues of gangs", "spark.hopsgpu.locks (HOPSGPU_LOCKS)")
    return base, (cluster,) if locks else ("hopsgpu", "locks", cluster)


def configured_queue_directory(environ: Mapping[str, str], cluster: str) -> LakePath:
    """Return the directory of all queues of a cluster, which may not exist.

    Args:
        cluster: name of the cluster.
    """
    locks = spark_defaults(environ).get("spark.hopsgpu.locks") or environ.get("HOPSGPU_LOCKS")
    default_fs = HadoopConf.load_hdfs(environ).get("fs.defaultFS")
    directory, names = gang_queue_root(locks, default_fs, cluster)
    for name in names:
        directory /= name
    return directory


def configured_queues(environ: Mapping[str, str], manager: ClusterManager) -> GangQueueReader:
    """Return a reader of the queues of gangs of a cluster."""
    return GangQueueReader(
        configured_queue_directory(environ, manager.cluster),
        find_partitions=lambda: {node.partition for node in manager.nodes()},
    )
