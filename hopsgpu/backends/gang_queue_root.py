"""The location of a cluster's queues of gangs on the lake."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hopsgpu.backends.gang_queue import GangQueueReader
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
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


def cluster_name(setting: Callable[[str], str | None], addresses: Sequence[str]) -> str:
    """Return a name of this YARN cluster, unique among those that share the file system.

    Args:
        addresses: base URLs of the ResourceManagers.
    """
    cluster_id = setting("yarn.resourcemanager.cluster-id")
    return re.sub(r"[^\w.-]+", "-", cluster_id or addresses[0].partition("//")[2])


def configured_queue_directory(
    environ: Mapping[str, str], setting: Callable[[str], str | None]
) -> LakePath:
    """Return the directory of all queues of the YARN of a configuration, which may not exist.

    Args:
        setting: returns Hadoop's properties.
    """
    locks = spark_defaults(environ).get("spark.hopsgpu.locks") or environ.get("HOPSGPU_LOCKS")
    cluster = cluster_name(setting, web_addresses(setting))
    directory, names = gang_queue_root(locks, setting("fs.defaultFS"), cluster)
    for name in names:
        directory /= name
    return directory


def configured_queues(
    environ: Mapping[str, str], setting: Callable[[str], str | None]
) -> GangQueueReader:
    """Return a reader of the queues of gangs of the YARN of a configuration."""
    manager = ResourceManager(web_addresses(setting))
    return GangQueueReader(
        configured_queue_directory(environ, setting),
        find_partitions=lambda: {node.partition for node in manager.nodes()},
    )
