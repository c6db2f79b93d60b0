"""`hopsgpu`: the group that the commands hang under."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from hopsgpu.cli.cluster import cluster
from hopsgpu.cli.doctor import doctor
from hopsgpu.cli.gpus import gpus
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

if __name__ == "__main__":
    main()
