"""`hopsgpu`: the group that the commands hang under."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from hopsgpu.cli.cluster import cluster
from hopsgpu.cli.doctor import doctor
from hopsgpu.cli.gpus import gpus
from hopsgpu.cli.logs import logs
from hopsgpu.cli.models import models
from hopsgpu.cli.runs import runs
from hopsgpu.cli.submit import submit
from hopsgpu.cli.tensorboard import tensorboard
from hopsgpu.errors import HopsGpuError


class Group(click.Group):
    """A group that shows what hopsgpu raises on purpose as one message, without a traceback."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        try:
            return super().main(args, *rest, **options)
        except HopsGpuError as e:
            click.echo(f"hopsgpu: {e}", err=True)
            sys.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Gang-scheduled distributed training on YARN's GPUs."""


main.add_command(cluster)
main.add_command(doctor)
main.add_command(gpus)
main.add_command(logs)
main.add_command(models)
main.add_command(runs)
main.add_command(submit)
main.add_command(tensorboard)

if __name__ == "__main__":
    main()
