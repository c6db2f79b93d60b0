"""`hopsgpu usage`: who used how much GPU time."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import click

from hopsgpu.cli.lake_root import json_option, roots_option, unset_hint, use_keytab
from hopsgpu.cli.output import echo
from hopsgpu.cli.tables import Row, TableLayout, headers, plain, show
from hopsgpu.core.usage_report import DAY, GROUPINGS, NAMES, RUN, USER, numbers_of
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    from hopsgpu.core.usage_report import Grouping, Usage, UsageRow

_EVERY_NAME = {name for names in NAMES.values() for name in names}
_HOURS = ("HELD", "TRAINING", "PUBLISHING", "IDLE", "WAITED")
_LAYOUT = TableLayout(
    right=(*_HOURS, "FAILED", "RUNS"),
    least={"RUN": 16, "USER": 6, "QUEUE": 8},
    dropped_first=("PUBLISHING", "QUEUE", "RUNS", "STATE", "WAITED", "TRAINING"),
    cut_in_front=("RUN", "QUEUE"),
)
# A microhour is 4 ms of a GPU.
_DIGITS = 6
_MAX_PROBLEMS = 20
# Wide forms of the same signs count in some spreadsheets.
_FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@click.command()
@roots_option
@click.option(
    "--by",
    type=click.Choice(GROUPINGS),
    default=USER,
    show_default=True,
    help="What to sum up by; days are those of UTC.",
)
@click.option(
    "--since",
    metavar="TIME",
    default="30d",
    show_default=True,
    help='Count from then on: a duration until now, a date or time in UTC, or "all".',
)
@click.option("--until", metavar="TIME", help="Count until then.  [default: now]")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def usage(
    roots: tuple[str, ...], by: str, since: str, until: str | None, as_csv: bool, as_json: bool
) -> None:
    """Show the GPU hours that runs held, trained with, left idle and waited for.

    The command reads the records of runs, also of other users if the lake lets you read them, and
    what `hopsgpu runs prune` kept. Standard error names what cannot be read.
    """
    from hopsgpu.backends.usage import usage as usage_of

    if as_csv and as_json:
        raise ConfigError("--csv and --json: give one of them")
    use_keytab()
    usage_found = usage_of(cast("Grouping", by), since, until=until, root=roots or None)
    if as_json:
        echo(json.dumps(_content(usage_found), indent=2))
    elif as_csv:
        echo(_csv(usage_found), has_newline=False)
    elif usage_found.rows:
        show(list(_table(usage_found)), _LAYOUT)
    else:
        echo(f"no runs from {usage_found.period}{unset_hint()}")
    _tell_problems(usage_found.problems)


def _tell_problems(problems: tuple[str, ...]) -> None:
    for problem in problems[:_MAX_PROBLEMS]:
        # Directories of other users may have any name.
        echo(f"hopsgpu: not counted: {plain(problem, 'utf-8')}", is_error=True)
    if (more := len(problems) - _MAX_PROBLEMS) > 0:
        echo(f"hopsgpu: not counted: {more} more; --json lists all of them", is_error=True)


def _content(usage: Usage) -> Mapping[str, Any]:
    return {
        "by": usage.by,
        "since": usage.since,
        "until": usage.until,
        "rows": [_fields(row, usage.by) for row in usage.rows],
        "total": _fields(usage.total, None),
        "notes": list(usage.notes),
        "problems": list(usage.problems),
    }


def _fields(row: UsageRow, by: str | None) -> dict[str, Any]:
    """Return the fields of a row, without the names that rows of this sort lack."""
    left_out = _EVERY_NAME - set(NAMES.get(by or "", ()))
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in asdict(row).items()
        if name not in left_out
    }


def _csv(usage: Usage) -> str:
    """Return CSV with a header; a share that is unknown is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_fields(usage.total, usage.by)), lineterminator="\n")
    writer.writeheader()
    for row in usage.rows:
        fields = _fields(row, usage.by).items()
        writer.writerow({n: _cell(v) if isinstance(v, str) else v for n, v in fields})
    return text.getvalue()


def _cell(text: str) -> str:
    """Return a text for CSV; users and queues are texts of others' records.

    A spreadsheet would run a text that begins like a formula.
    """
    shown = plain(text, "utf-8")
    return f"'{shown}" if shown.startswith(_FORMULAS) else shown


def _table(usage: Usage) -> Iterator[Row]:
    names = NAMES[usage.by]
    yield [(f"GPU hours by {usage.by}, {usage.period}", "")]
    titles = ["DAY (UTC)" if name == DAY else name.upper() for name in names]
    count = () if usage.by == RUN else ("RUNS",)
    yield headers(*titles, *_HOURS, "FAILED", *count)
    for row in usage.rows:
        shown = [str(getattr(row, name) or "-") for name in names]
        yield [(text, "") for text in (*shown, *_numbers(row, usage.by))]
    if len(usage.rows) > 1:
        shown = ["total", *[""] * (len(names) - 1)]
        yield [(text, "bold") for text in (*shown, *_numbers(usage.total, usage.by))]
    for note in usage.notes:
        yield [(note, "dim")]


def _numbers(row: UsageRow, by: str) -> list[str]:
    return [*numbers_of(row), *([] if by == RUN else [str(row.runs)])]
