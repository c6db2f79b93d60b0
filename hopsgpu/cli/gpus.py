"""`hopsgpu gpus`: the cluster's GPUs, who uses them, and what a user could get."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from hopsgpu.cli.master_option import master_option
from hopsgpu.cli.output import echo
from hopsgpu.cli.param_types import Seconds
from hopsgpu.errors import ConfigError, HopsGpuError

if TYPE_CHECKING:
    from rich.console import Console

    from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus

_WATCH_SECONDS = 5.0
_Look = Callable[[], "ClusterGpus"]


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; with --watch, one line per refresh."
)
@click.option(
    "--watch",
    "seconds",
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    default=None,
    type=Seconds(0.5),
    metavar="[SECONDS]",
    help=f"Refresh until Ctrl-C, every {_WATCH_SECONDS:g} seconds by default.",
)
@click.option("--user", metavar="NAME", help="Show what this user could get.  [default: you]")
@master_option
def gpus(as_json: bool, seconds: float | None, user: str | None, master: str | None) -> None:
    """Show the cluster's GPUs: where they are, who has them, what you could get.

    The cluster is the one of --master. The command asks its ResourceManager and NodeManagers, its
    standalone master, or its API server of Kubernetes; it does not start Spark.
    """
    from hopsgpu.backends.inventory import Observer
    from hopsgpu.cli.lake_root import use_keytab
    from hopsgpu.cluster_managers.manager_table import configured_manager

    use_keytab()
    look = Observer(configured_manager(os.environ, master), user).observe
    if as_json:
        indent = 2 if seconds is None else None
        _again(look, seconds, lambda state: echo(json.dumps(state.to_json(), indent=indent)))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if seconds is not None and console.is_terminal:
        _redraw(look, seconds, console)
    else:
        _again(look, seconds, lambda state: _print(state, console))


def _again(look: _Look, seconds: float | None, show: Callable[[ClusterGpus], None]) -> None:
    """Look and show once, or until Ctrl-C."""
    if seconds is None:
        show(look())
        return
    with contextlib.suppress(KeyboardInterrupt):
        for state in _looks(look, seconds):
            if isinstance(state, HopsGpuError):
                echo(f"hopsgpu: {state}", is_error=True)
            else:
                show(state)


def _looks(look: _Look, seconds: float) -> Iterator[ClusterGpus | HopsGpuError]:
    while True:
        try:
            yield look()
        except ConfigError:
            raise
        except HopsGpuError as error:  # a ResourceManager that restarts soon answers again
            yield error
        # YARN announces no change.
        time.sleep(seconds)


def _redraw(look: _Look, seconds: float, console: Console) -> None:
    """Redraw the tables in place on a terminal, and leave the last ones there."""
    from rich.live import Live
    from rich.text import Text

    from hopsgpu.cli.gpu_tables import tables

    last: ClusterGpus | None = None
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for state in _looks(look, seconds):
            if isinstance(state, HopsGpuError):
                live.update(Text(f"hopsgpu: {state}", style="red"), refresh=True)
            else:
                last = state
                live.update(tables(state, console.encoding, console.width), refresh=True)
    if last is not None:
        _print(last, console)


def _print(state: ClusterGpus, console: Console) -> None:
    from hopsgpu.cli.gpu_tables import tables

    # A file or a pipe gets whole lines, in colours too if FORCE_COLOR is set.
    width = console.width if console.file.isatty() else None
    console.print(tables(state, console.encoding, width), soft_wrap=width is None)
