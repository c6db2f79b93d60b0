"""`hopsgpu doctor`: what is fine in a cluster and a session, what is not, and how to fix it."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from hopsgpu.cli.master_option import master_option
from hopsgpu.cli.param_types import Seconds
from hopsgpu.errors import ConfigError
from hopsgpu.terminal_text import printable

if TYPE_CHECKING:
    from hopsgpu.doctor.report import Check

_COLOURS = {"ok": "green", "wrong": "red", "unknown": "yellow"}
_STATE, _NAME = 9, 17


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per check.")
@click.option(
    "--no-session", is_flag=True, help="Run only the checks that need no Spark application."
)
@master_option
@click.option("--queue", metavar="NAME", help="YARN queue of the session.")
@click.option(
    "--conf",
    "conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="Spark property of the session (repeatable).",
)
@click.option(
    "--image",
    metavar="IMAGE",
    help="Container image of the session's executors, on YARN or Kubernetes. On YARN, the nodes'"
    " Docker and the containers are checked too.",
)
@click.option(
    "--seconds",
    type=Seconds(1.0),
    default=45.0,
    show_default=True,
    help="Seconds to wait for an executor on each node.",
)
def doctor(
    as_json: bool,
    no_session: bool,
    master: str | None,
    queue: str | None,
    conf: tuple[str, ...],
    image: str | None,
    seconds: float,
) -> None:
    """Check a cluster and a session, and say how to fix what is wrong.

    The cluster is that of a new session: YARN, a standalone master, or Kubernetes. The doctor
    starts its own session, as hopsgpu.session() does, and briefly runs an executor on each node
    that has a free GPU.
    Exit code 0 if nothing is wrong; a check that could not run does not count as wrong.
    """
    from hopsgpu.backends.spark.container_image import IMAGE
    from hopsgpu.backends.spark.submit_command import check_queue_option, image_settings
    from hopsgpu.cluster_managers.manager_table import MASTER, required_kind
    from hopsgpu.core.image_names import check_image_name
    from hopsgpu.doctor.examination import Examination, examined_master
    from hopsgpu.doctor.report import CheckState

    settings = dict(map(_property, conf))
    if master is not None:
        required_kind(master)
        settings[MASTER] = master
    examined = examined_master(settings, os.environ)
    if queue is not None:
        check_queue_option(queue, examined)
        settings["spark.yarn.queue"] = queue
    if image is not None:
        check_image_name(image, "--image")
        settings[IMAGE] = image
        settings = {**image_settings(settings, examined), **settings}
    counts = dict.fromkeys(CheckState, 0)
    for check in Examination(settings, not no_session, seconds).checks():
        counts[check.state] += 1
        click.echo(json.dumps(check.to_json()) if as_json else describe_check(check))
        sys.stdout.flush()
    if not as_json:
        summary = ", ".join(f"{count} {state.value}" for state, count in counts.items())
        click.echo(f"\n{summary}")
    sys.exit(1 if counts[CheckState.WRONG] else 0)


def describe_check(check: Check) -> str:
    """Return a check for people: one line, and more only if there is something to do."""
    state = click.style(check.state.value.ljust(_STATE), fg=_COLOURS[check.state.value], bold=True)
    lines = [f"{state}{check.name.ljust(_NAME)}{printable(check.seen)}"]
    if check.state.value != "ok":
        details = map(printable, check.details)
        lines += [textwrap.indent(detail, " " * (_STATE + 2)) for detail in details]
        if check.fix and check.fix not in check.seen:
            lines.append(f"{' ' * _STATE}{click.style('fix', bold=True)}: {printable(check.fix)}")
    return "\n".join(lines)


def _property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--conf {text}: must be NAME=VALUE, such as spark.yarn.queue=training")
    return name, value
