"""The table of an ablation's result, as text and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.core import html
from hopsgpu.core.html import plain_line
from hopsgpu.core.trials import AblationOutcome, AblationRow

_LONGEST = 60
_WHOLE = "(whole)"


def text(result: AblationOutcome) -> str:
    """Return a plain table: the whole first, then the components by decreasing worth."""
    rows = [_headers(result), *(_cells(result, row) for row in _sort_rows(result))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def card(result: AblationOutcome) -> str:
    """Return the same table as HTML."""
    rows = [_cells(result, row) for row in _sort_rows(result)]
    return html.box(
        html.title("AblationResult", result.run_id, f"· {result.direction}"),
        html.table(_headers(result), rows),
    )


def contribution(result: AblationOutcome, row: AblationRow) -> float | None:
    """Return how much better the metric is with a component than without; None if unknown."""
    if row.difference is None:
        return None
    return row.difference if result.direction == "minimize" else -row.difference


def _sort_rows(result: AblationOutcome) -> list[AblationRow]:
    def key(row: AblationRow) -> tuple[bool, float]:
        is_worth = contribution(result, row)
        return is_worth is None, -(is_worth or 0.0)

    return [*result.rows[:1], *sorted(result.rows[1:], key=key)]


def _headers(result: AblationOutcome) -> list[str]:
    metric = plain_line(result.metric or "metric", _LONGEST)
    return ["without", metric, "spread", "difference", "worth", "trials", "failed"]


def _cells(result: AblationOutcome, row: AblationRow) -> Sequence[str]:
    is_whole = row is result.rows[0]
    # The whole has nothing to compare with.
    is_worth = None if is_whole else contribution(result, row)
    return (
        plain_line(row.component, _LONGEST) or _WHOLE,
        _number(row.mean),
        _number(row.spread, "±"),
        "" if is_whole else _number(row.difference, sign="+"),
        _number(is_worth, sign="+"),
        str(len(row.values)),
        str(row.failed or ""),
    )


def _number(value: float | None, before: str = "", sign: str = "") -> str:
    return "" if value is None else f"{before}{value:{sign}.4g}"
