"""Mount tables of viewfs in Hadoop's configuration. Pure functions.

Source: Hadoop's ViewFs guide and its class `InodeTree`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from hopsgpu.storage.root import join_url

# HDFS refuses this path, because a name may not contain a colon.
NO_MOUNT = "/no-viewfs-mount-point:"
_FALLBACK = ("linkFallback", "linkMergeSlash")


def complete_mount_table(url: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings that make hdfs-native accept a mount table; none for URLs not of viewfs.

    Unlike Hadoop, hdfs-native requires a fallback, and refuses a table with a mount point that is
    not on HDFS. So paths without a mount point on HDFS lead to `NO_MOUNT`.

    Raises:
        ValueError: the table has no mount point on HDFS.
    """
    scheme, table = urlsplit(url)[:2]
    if scheme != "viewfs":
        return {}
    prefix = f"fs.viewfs.mounttable.{table}."
    mounts = dict(_mounts_of(prefix, settings))
    name_nodes = [urlsplit(target) for target in mounts.values() if target.startswith("hdfs://")]
    if not name_nodes:
        raise ValueError(f"no mount point on HDFS is configured ({prefix}link.<path>)")
    nowhere = f"hdfs://{name_nodes[0].netloc}{NO_MOUNT}"
    refused_mounts = {
        f"{prefix}link.{path}": nowhere
        for path, target in mounts.items()
        if path != "/" and not target.startswith("hdfs://")
    }
    fallback = mounts.get("/", "")
    return {
        **refused_mounts,
        f"{prefix}linkFallback": fallback if fallback.startswith("hdfs://") else nowhere,
    }


def resolve_mount(url: str, settings: Mapping[str, str]) -> str | None:
    """Return the target of a viewfs:// URL; None without a mount point."""
    scheme, table, path, *_ = urlsplit(url)
    mounts = dict(_mounts_of(f"fs.viewfs.mounttable.{table}.", settings))
    if scheme != "viewfs":
        return None
    for mount in sorted(mounts, key=len, reverse=True):
        below = path.removeprefix(mount.rstrip("/"))
        if path.startswith(mount) and (not below or below.startswith("/")):
            return join_url(mounts[mount], below.lstrip("/")) if below.strip("/") else mounts[mount]
    return None


def _mounts_of(prefix: str, settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the mount points of a table as (path, target); the fallback's path is `/`."""
    for name, target in settings.items():
        kind, dot, path = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and kind == "link" and dot:
            yield path, target
        elif name.startswith(prefix) and kind in _FALLBACK:
            yield "/", target
