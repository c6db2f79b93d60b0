"""The root of runs and models on the lake, found without Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
from hopsgpu.storage.identity import hadoop_user
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, LakePath
from hopsgpu.storage.root import choose_root
from hopsgpu.storage.spark_defaults import spark_defaults


def default_root(environ: Mapping[str, str]) -> str:
    """Return spark.hopsgpu.root of spark-defaults.conf, HOPSGPU_ROOT, or the user's directory.

    The user's directory is on the cluster's file system, or below the home directory without a
    Hadoop configuration.

    Raises:
        ConfigError: the configuration of the cluster cannot be read.
    """
    if root := configured_root(environ):
        return choose_root(root, None, "")
    if not is_configured(environ):
        return choose_root(None, None, "")
    try:
        hadoop = HadoopConf.load_hdfs(environ).get
        if hadoop("fs.defaultFS") is None:
            # The variable names no configuration; the error says what is missing.
            hadoop = HadoopConf.load(environ).get
        return choose_root(None, hadoop("fs.defaultFS"), hadoop_user(hadoop, environ))
    except ConfigError as error:
        raise ConfigError(
            "the root of runs and models is unknown: pass --root URL, or set HOPSGPU_ROOT"
            f" ({error})"
        ) from error


def configured_root(environ: Mapping[str, str]) -> str | None:
    """Return the root that an administrator or the user has set, or None."""
    return spark_defaults(environ).get("spark.hopsgpu.root") or environ.get("HOPSGPU_ROOT")


def session_root(environ: Mapping[str, str]) -> str:
    """Return the root of this process's Spark session; without a session, `default_root`.

    Raises:
        ConfigError: the configuration of the cluster cannot be read.
    """
    if root := _root_of_active_session():
        return choose_root(root, None, "")
    return default_root(environ)


def _root_of_active_session() -> str | None:
    session = sys.modules.get("pyspark")
    context = None if session is None else session.SparkContext._active_spark_context
    return None if context is None else context.getConf().get("spark.hopsgpu.root")


def roots_of_users(environ: Mapping[str, str]) -> tuple[Sequence[LakePath], Sequence[str]]:
    """Return the roots of all users, and the problems with unknown roots.

    A configured root is shared by all users. Otherwise each user's root is in the user's directory
    on the cluster's file system.

    Raises:
        ConfigError: the configuration of the cluster cannot be read.
    """
    own_root = LakePath(session_root(environ))
    if _root_of_active_session() or configured_root(environ) or own_root.is_local:
        return [own_root], []
    homes = own_root.parent.parent.with_client()
    name = own_root.url.rpartition("/")[2]
    try:
        users = homes.names(only_directories=True)
    except StoreError as error:
        return [own_root], [f"the directories of other users: {error}"]
    # A user whose name has unsafe characters cannot have runs on a lake.
    users = tuple(user for user in users if not UNSAFE_CHARACTERS.search(user))
    roots = {root.url: root for root in [own_root, *(homes / f"{user}/{name}" for user in users)]}
    return list(roots.values()), []


def given_roots(root: str | Sequence[str] | None) -> tuple[Sequence[LakePath], Sequence[str]]:
    """Return the roots at one or several URLs; for None, the roots of all users.

    Raises:
        ConfigError: `root` is something else, or no URL of a lake.
    """
    if root is None:
        return roots_of_users(os.environ)
    urls = [root] if isinstance(root, str) else root
    if not isinstance(urls, Sequence) or not urls or not all(isinstance(url, str) for url in urls):
        raise ConfigError(
            f"root={root!r}: must be the URL of a directory of runs and models, a sequence of such"
            " URLs, or None for the roots of all users"
        )
    return [LakePath(url) for url in dict.fromkeys(urls)], []
