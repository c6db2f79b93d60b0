"""Where the queues of gangs of a cluster are on the lake."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import join_url
from hopsgpu.storage.spark_defaults import spark_defaults


def gang_queue_root(
    locks: str | None, default_fs: str | None, cluster: str
) -> tuple[LakePath, tuple[str, ...]]:
    """Return a directory that exists, and the names below it of the directory of all queues.

    Below that, each cluster partition has a directory.

    Args:
        locks: what `spark.hopsgpu.locks` names, or None.
        default_fs: `fs.defaultFS`, or None.
        cluster: the cluster's name, as `cluster_name` returns it.

    Raises:
        ConfigError: `locks` is not a valid directory, or the directory is on an object store.
    """
    place = LakePath(locks or join_url(default_fs or "file:///", "tmp"), should_fail_fast=True)
    place.check_renames("queues of gangs", "spark.hopsgpu.locks (HOPSGPU_LOCKS)")
    return place, (cluster,) if locks else ("hopsgpu", "locks", cluster)


def cluster_name(setting: Callable[[str], str | None], addresses: Sequence[str]) -> str:
    """Return a name of a YARN, unique among the YARN clusters that share the file system.

    Args:
        setting: returns a property of Hadoop's configuration, or None.
        addresses: base URLs of the ResourceManagers.
    """
    named = setting("yarn.resourcemanager.cluster-id")
    return re.sub(r"[^\w.-]+", "-", named or addresses[0].partition("//")[2])


def configured_queue_root(environ: Mapping[str, str]) -> str | None:
    """Return the directory that an administrator or the user has set, or None."""
    return spark_defaults(environ).get("spark.hopsgpu.locks") or environ.get("HOPSGPU_LOCKS")
