"""`hopsgpu`: the group of all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from hopsgpu.cli.cluster import cluster
from hopsgpu.cli.command_group import Commands
from hopsgpu.cli.doctor import doctor
from hopsgpu.cli.exporter import exporter
from hopsgpu.cli.gpus import gpus
from hopsgpu.cli.lake_root import unset_hint
from hopsgpu.cli.logs import logs
from hopsgpu.cli.model_commands import models
from hopsgpu.cli.output import echo
from hopsgpu.cli.run import run
from hopsgpu.cli.run_commands import runs
from hopsgpu.cli.score import score
from hopsgpu.cli.submit import submit
from hopsgpu.cli.tensorboard import tensorboard
from hopsgpu.cli.usage import usage
from hopsgpu.cli.web import web
from hopsgpu.core.version import __version__
from hopsgpu.errors import HopsGpuError, StoreError


class Main(Commands):
    """The group that shows hopsgpu's own errors as one message, without a traceback."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        if sys.stdout is None:  # the parent process closed it
            echo(
                "hopsgpu: standard output is closed, and nothing was done: leave it open, or"
                " redirect it to /dev/null",
                is_error=True,
            )
            sys.exit(1)
        try:
            return super().main(args, *rest, **options)
        except HopsGpuError as e:
            echo(f"hopsgpu: {e}", is_error=True)
        except OSError as e:
            if not _is_of_output(e):
                raise
            echo(f"hopsgpu: standard output cannot be written to: {e.strerror}", is_error=True)
            _drop_output()
        sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke the command; whatever it does not find may be on a cluster that is not named."""
        try:
            return super().invoke(ctx)
        except StoreError as error:
            if error.kind == "absent" and (hint := unset_hint()):
                raise StoreError(f"{error}{hint}", error.kind) from error
            raise


def _is_of_output(error: OSError) -> bool:
    """Return whether standard output caused the error."""
    try:
        sys.stdout.flush()  # the refused output is still in the buffer
        os.write(sys.stdout.fileno(), b"")  # with PYTHONUNBUFFERED there is no buffer
    except OSError as again:
        return again.errno is not None and again.errno == error.errno
    return False


def _drop_output() -> None:
    """Discard the buffered output, which Python would otherwise try to write at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# By itself, click uses at most 80 columns of a wider terminal.
_WIDEST = 1000


@click.group(
    cls=Main,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST},
)
@click.version_option(__version__, prog_name="hopsgpu", message="%(prog)s %(version)s")
def main() -> None:
    """Run gang-scheduled distributed training on YARN's GPUs."""


main.add_command(cluster)
main.add_command(doctor)
main.add_command(exporter)
main.add_command(gpus)
main.add_command(logs)
main.add_command(models)
main.add_command(run)
main.add_command(runs)
main.add_command(score)
main.add_command(submit)
main.add_command(tensorboard)
main.add_command(usage)
main.add_command(web)

if __name__ == "__main__":
    main()
