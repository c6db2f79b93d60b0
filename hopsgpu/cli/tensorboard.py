"""`hopsgpu tensorboard`: a run's TensorBoard files, displayed while they grow."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hopsgpu.cli.lake_root import lake_root, root_option
from hopsgpu.cli.output import echo
from hopsgpu.cli.signals import exit_on_signals
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError

if TYPE_CHECKING:
    from hopsgpu.artifacts.mirror import Mirror

_DIRECTORY = "tensorboard"
_POLL_SECONDS = 5.0
_END_SECONDS = 10.0


@click.command()
@root_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=6006,
    show_default=True,
    help="Port to listen on; 0 for any free one.",
)
@click.argument("run_id", metavar="ID")
def tensorboard(run_id: str, host: str, port: int) -> None:
    """Run TensorBoard on what a run wrote to context().log_dir, until Ctrl-C.

    The files are copied to a temporary directory, and updated every few seconds as they grow.
    TensorBoard has no authentication: listen on another address than this machine's own only
    where everybody may see the data.
    """
    from hopsgpu.artifacts.mirror import Mirror
    from hopsgpu.artifacts.runs import RunStore

    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("TensorBoard is not installed here: pip install 'hopsgpu[tensorboard]'")
    store = RunStore(lake_root())
    source = store.directory(store.find(run_id)) / _DIRECTORY
    with (
        exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="hopsgpu-tensorboard-") as directory,
    ):
        mirror = Mirror(source, Path(directory))
        if not mirror.update():
            echo(f"{source.url} is empty so far; it is checked every few seconds", is_error=True)
        with contextlib.suppress(KeyboardInterrupt), _served(directory, host, port) as server:
            _keep_in_step(mirror, server)


@contextlib.contextmanager
def _served(directory: str, host: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run TensorBoard, which prints its own URL, until the end of the context."""
    command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", directory]
    command += ["--host", host, "--port", str(port), "--reload_interval", str(int(_POLL_SECONDS))]
    server = subprocess.Popen(command)
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _keep_in_step(mirror: Mirror, server: subprocess.Popen[bytes]) -> None:
    """Copy new data until TensorBoard ends."""
    while True:
        try:
            # The lake announces no change.
            code = server.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            try:
                mirror.update()
            except StoreError as error:  # the next update may work
                echo(f"hopsgpu: {error}", is_error=True)
        else:
            raise HopsGpuError(f"TensorBoard ended unexpectedly with exit code {code}")
