"""`hopsgpu web`: the cluster, runs, models and usage as pages for a browser."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from hopsgpu.cli.lake_root import roots_option, use_keytab
from hopsgpu.cli.master_option import master_option
from hopsgpu.cli.output import echo

_PORT = 8420
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@roots_option
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to listen on."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_PORT,
    show_default=True,
    help="Port to listen on; 0 for any free one.",
)
@click.option("--certfile", type=_FILE, help="Certificate for TLS, as PEM.")
@click.option("--keyfile", type=_FILE, help="Its key, as PEM.  [default: in --certfile]")
@click.option(
    "--plain-http",
    is_flag=True,
    help="Listen without TLS where other machines reach it: who sees the network on the way can do"
    " and read what you can.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of a proxy under which browsers reach the pages; may be given several times.",
)
@master_option
def web(
    roots: tuple[str, ...],
    host: str,
    port: int,
    certfile: Path | None,
    keyfile: Path | None,
    plain_http: bool,
    names: tuple[str, ...],
    master: str | None,
) -> None:
    """Show the cluster, the queue of gangs, runs, models and usage in a browser, until Ctrl-C.

    Open the URL that is printed: its token lets nobody else in. The pages show what you may read,
    and can cancel a run that you may cancel; nothing else is changed.
    """
    from hopsgpu.web.listener import ServerOptions, serve
    from hopsgpu.web.page_sources import live_sources

    use_keytab()
    options = ServerOptions(host, port, names, certfile, keyfile, plain_http)
    sources = live_sources(roots, os.environ, master)
    with contextlib.suppress(KeyboardInterrupt):
        serve(sources, options, lambda url: echo(f"The pages are at {url}"))
