"""`hopsgpu exporter`: metrics for Prometheus."""

from __future__ import annotations

import contextlib
import os
import threading

import click

from hopsgpu.cli.lake_root import roots_option, use_keytab
from hopsgpu.cli.master_option import master_option
from hopsgpu.cli.output import echo
from hopsgpu.cli.signals import exit_on_signals
from hopsgpu.cli.tables import plain
from hopsgpu.errors import ConfigError


@click.command()
@roots_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9400,
    show_default=True,
    help="Port to listen on; 0 for any free one.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Another name under which Prometheus reaches the exporter; may be given several times.",
)
@click.option("--alerts", is_flag=True, help="Print alert rules for Prometheus, and exit.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana, and exit.")
@master_option
def exporter(
    roots: tuple[str, ...],
    host: str,
    port: int,
    names: tuple[str, ...],
    alerts: bool,
    dashboard: bool,
    master: str | None,
) -> None:
    """Serve metrics of GPUs, waiting gangs and runs to Prometheus, until Ctrl-C.

    The exporter asks YARN's ResourceManager and NodeManagers, a standalone master, or Kubernetes'
    API server. It reads the queue of gangs and the records of runs, with the rights of its user.
    There is no authentication: listen on another address than this machine's own only where
    everybody may read the names of users, queues, nodes and runs.
    """
    from hopsgpu.monitoring.exposition import ALERTS, DASHBOARD, file_text, serving
    from hopsgpu.monitoring.observation import Monitor
    from hopsgpu.storage.lake_root import given_roots

    if alerts and dashboard:
        raise ConfigError("--alerts and --dashboard: give one of them")
    if alerts or dashboard:
        echo(file_text(ALERTS if alerts else DASHBOARD), has_newline=False)
        return
    use_keytab()
    monitor = Monitor(
        os.environ, lambda: given_roots(roots or None), _tell, use_keytab, master=master
    )
    with (
        exit_on_signals(),
        contextlib.suppress(KeyboardInterrupt),
        serving(monitor, host, port, names) as url,
    ):
        echo(f"serving {url} until Ctrl-C")
        threading.Event().wait()


def _tell(line: str) -> None:
    # The terminal that started the exporter may be closed.
    with contextlib.suppress(OSError):
        echo(f"hopsgpu: {plain(line, 'utf-8')}", is_error=True)
