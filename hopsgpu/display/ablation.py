"""What each component of a function contributes, as text and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.core import html
from hopsgpu.core.html import plain
from hopsgpu.core.trials import AblationOutcome, AblationRow

_LONGEST = 60
_WHOLE = "(whole)"


def text(result: AblationOutcome) -> str:
    """A plain table, what is worth most first."""
    rows = [_headers(result), *(_cells(result, row) for row in _sorted(result))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def card(result: AblationOutcome) -> str:
    """A table, what is worth most first."""
    rows = [_cells(result, row) for row in _sorted(result)]
    return html.box(
        html.title("AblationResult", result.run_id, f"· {result.direction}"),
        html.table(_headers(result), rows),
    )


def worth(result: AblationOutcome, row: AblationRow) -> float | None:
    """How much better the metric is with a component than without; None where that is unknown."""
    if row.difference is None:
        return None
    return row.difference if result.direction == "minimize" else -row.difference


def _sorted(result: AblationOutcome) -> list[AblationRow]:
    def key(row: AblationRow) -> tuple[bool, float]:
        is_worth = worth(result, row)
        return is_worth is None, -(is_worth or 0.0)

    return [*result.rows[:1], *sorted(result.rows[1:], key=key)]


def _headers(result: AblationOutcome) -> list[str]:
    metric = plain(result.metric or "metric", _LONGEST)
    return ["without", metric, "spread", "difference", "worth", "trials", "failed"]


def _cells(result: AblationOutcome, row: AblationRow) -> Sequence[str]:
    is_whole = row is result.rows[0]
    # Of the whole there is nothing to compare.
    is_worth = None if is_whole else worth(result, row)
    return (
        plain(row.component, _LONGEST) or _WHOLE,
        _number(row.mean),
        _number(row.spread, "±"),
        "" if is_whole else _number(row.difference, sign="+"),
        _number(is_worth, sign="+"),
        str(len(row.values)),
        str(row.failed or ""),
    )


def _number(value: float | None, before: str = "", sign: str = "") -> str:
    return "" if value is None else f"{before}{value:{sign}.4g}"
