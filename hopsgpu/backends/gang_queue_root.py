"""The location of a cluster's queues of gangs: on the lake, or in its cluster manager."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.backends.gang_queue import DEFAULT_PARTITION, GangQueueReader
from hopsgpu.backends.queue_directory import GangQueueHost, GangQueueRoot
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.errors import ConfigError
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


def is_queue_on_lake(locks: str | None, default_fs: str | None) -> bool:
    """Return whether the queues are on the lake, if the cluster manager can hold them too. Pure.

    Args:
        locks: value of `spark.hopsgpu.locks`, or None.
        default_fs: `fs.defaultFS`; None for this machine's file system.
    """
    if locks:
        return True
    try:
        directory = LakePath(join_url(default_fs or "file:///", "tmp"))
    except ConfigError:  # a file system that hopsgpu does not support
        return False
    return not (directory.is_local or directory.is_object_store)


def find_hosted_queues(
    manager: ClusterManager, locks: str | None, default_fs: str | None
) -> GangQueueRoot | None:
    """Return the directory of all queues in the cluster manager; None if they are on the lake."""
    if not isinstance(manager, GangQueueHost) or is_queue_on_lake(locks, default_fs):
        return None
    return manager.queue_root((DEFAULT_PARTITION,))


def configured_queue_root(environ: Mapping[str, str], manager: ClusterManager) -> GangQueueRoot:
    """Return the directory of all queues of a cluster, which may not exist."""
    defaults = spark_defaults(environ)
    locks = defaults.get("spark.hopsgpu.locks") or environ.get("HOPSGPU_LOCKS")
    # Spark passes its property to the Hadoop client of a session.
    default_fs = defaults.get("spark.hadoop.fs.defaultFS")
    default_fs = default_fs or HadoopConf.load_hdfs(environ).get("fs.defaultFS")
    hosted = find_hosted_queues(manager, locks, default_fs)
    if hosted is not None:
        return hosted
    directory, names = gang_queue_root(locks, default_fs, manager.cluster)
    for name in names:
        directory /= name
    return directory


def configured_queues(environ: Mapping[str, str], manager: ClusterManager) -> GangQueueReader:
    """Return a reader of the queues of gangs of a cluster."""
    return GangQueueReader(
        configured_queue_root(environ, manager),
        find_partitions=lambda: {node.partition for node in manager.nodes()},
    )
