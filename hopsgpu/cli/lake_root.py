"""Options that commands share: the root on the lake, and JSON output."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import click

_KEY = "hopsgpu.root"
_PROBE_SECONDS = 2.0


def _note(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    # Shared with the contexts of a group's commands.
    if value is not None:
        context.meta[_KEY] = value


# The option of a command, or of the group of the command.
root_option: Callable[[Any], Any] = click.option(
    "--root",
    metavar="URL",
    expose_value=False,
    callback=_note,
    help="Directory of runs and models.  [default: that of a session here]",
)


def _note_first(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    if value:
        context.meta[_KEY] = value[0]
    return value


# The option of a command that reads several roots.
roots_option: Callable[[Any], Any] = click.option(
    "--root",
    "roots",
    metavar="URL",
    multiple=True,
    callback=_note_first,
    help="Directory of runs and models; may be given several times.  [default: that of a session"
    " here, and unless it was set those of all users]",
)


json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON."
)


def lake_root() -> str:
    """Return --root, or else the root that a session uses, without Spark.

    Raises:
        ConfigError: the root is unknown.
        StoreError: the root is on this machine, and its server does not run.
    """
    from hopsgpu.storage.lake_root import default_root

    use_keytab()
    root = str(click.get_current_context().meta.get(_KEY) or default_root(os.environ))
    _check_server(root)
    return root


def _check_server(root: str) -> None:
    """Raise StoreError if the root's server is on this machine and does not run.

    Other servers may be restarting, so the lake retries their calls for a minute.
    """
    from hopsgpu.errors import StoreError
    from hopsgpu.storage.error_messages import UNREACHABLE

    url = urlsplit(root)
    if url.hostname is None or url.port is None or not _is_loopback(url.hostname):
        return
    with socket.socket() as probe:
        probe.settimeout(_PROBE_SECONDS)
        refusal = probe.connect_ex((url.hostname, url.port))
    if refusal == errno.ECONNREFUSED:
        raise StoreError(
            f"nothing listens on {url.netloc}, the server of {root}; if it is the development"
            " cluster, start it: hopsgpu cluster up",
            UNREACHABLE,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unset_hint() -> str:
    """Return a hint for a command that found nothing; "" if a root or a cluster is configured."""
    from hopsgpu.storage.hadoop_conf import is_configured
    from hopsgpu.storage.lake_root import configured_root

    root = click.get_current_context().meta.get(_KEY) or configured_root(os.environ)
    if root or is_configured(os.environ):
        return ""
    return (
        " (HADOOP_CONF_DIR is not set: for a cluster, set it; for the development cluster:"
        ' eval "$(hopsgpu cluster env)")'
    )


def use_keytab() -> None:
    """Get a Kerberos ticket for this command if spark-defaults.conf names a keytab.

    Raises:
        ConfigError: the keytab gives none, or a file cannot be read.
    """
    from hopsgpu.storage.hadoop_conf import HadoopConf
    from hopsgpu.storage.identity import ensure_credentials
    from hopsgpu.storage.kerberos import has_keytab
    from hopsgpu.storage.spark_defaults import spark_defaults

    settings = spark_defaults(os.environ).get
    if has_keytab(settings):
        ensure_credentials(HadoopConf.load_hdfs(os.environ).get, settings, os.environ)
