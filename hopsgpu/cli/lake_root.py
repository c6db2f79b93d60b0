"""Options that commands share: the root on the lake, and JSON output."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import click

from hopsgpu.errors import ConfigError

_KEY = "hopsgpu.root"


def _note(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    # Shared with the contexts of a group's commands.
    if value is not None:
        context.meta[_KEY] = value


# Of a command, or of the group that it is in.
root_option: Callable[[Any], Any] = click.option(
    "--root",
    metavar="URL",
    expose_value=False,
    callback=_note,
    help="Directory of runs and models.  [default: that of a session here]",
)


json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON."
)


def lake_root() -> str:
    """Return --root, or else the root that a session uses, without Spark.

    Raises:
        ConfigError: the root is unknown.
    """
    use_keytab()
    root = click.get_current_context().meta.get(_KEY)
    return str(root) if root else default_root(os.environ)


def unset_hint() -> str:
    """Return what to say beside finding nothing where nothing tells of a root or a cluster; else
    "".
    """
    from hopsgpu.storage.hadoop_conf import is_configured

    root = click.get_current_context().meta.get(_KEY) or _named(os.environ)
    if root or is_configured(os.environ):
        return ""
    return (
        " (HADOOP_CONF_DIR is not set: for a cluster, set it; for the development cluster:"
        ' eval "$(hopsgpu cluster env)")'
    )


def default_root(environ: Mapping[str, str]) -> str:
    """Return spark.hopsgpu.root of spark-defaults.conf, HOPSGPU_ROOT, or the user's directory.

    The user's directory is on the cluster's file system; without a Hadoop configuration, it is in
    the home directory.

    Args:
        environ: environment of the process.

    Raises:
        ConfigError: the configuration of the cluster cannot be read.
    """
    from hopsgpu.storage.hadoop_conf import HadoopConf, is_configured
    from hopsgpu.storage.identity import hadoop_user
    from hopsgpu.storage.root import root_on

    if named := _named(environ):
        return root_on(named, None, "")
    if not is_configured(environ):
        return root_on(None, None, "")
    try:
        hadoop = HadoopConf.load(environ).get
        return root_on(None, hadoop("fs.defaultFS"), hadoop_user(hadoop, environ))
    except ConfigError as error:
        raise ConfigError(
            "the root of runs and models is unknown: pass --root URL, or set HOPSGPU_ROOT"
            f" ({error})"
        ) from error


def use_keytab() -> None:
    """Get a Kerberos ticket for this command if spark-defaults.conf names a keytab.

    Raises:
        ConfigError: the keytab gives none, or a file cannot be read.
    """
    from hopsgpu.backends.spark.submit_arguments import spark_defaults
    from hopsgpu.storage.hadoop_conf import HadoopConf
    from hopsgpu.storage.identity import ensure_credentials
    from hopsgpu.storage.kerberos import has_keytab

    settings = spark_defaults(os.environ).get
    if has_keytab(settings):
        ensure_credentials(HadoopConf.load_hdfs(os.environ).get, settings, os.environ)


def _named(environ: Mapping[str, str]) -> str | None:
    """Return the root that an administrator or the user has set, or None."""
    from hopsgpu.backends.spark.submit_arguments import spark_defaults

    return spark_defaults(environ).get("spark.hopsgpu.root") or environ.get("HOPSGPU_ROOT")
