"""Write the table of docs/compatibility.md from recorded results: `python -m tests.matrix.page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.matrix.behaviours import BEHAVIOURS, WORKS, Corner, load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
# The table follows this line; all else on the page is written by hand.
_MARK = "<!-- written by tests/matrix/page.py from tests/matrix/results.json -->\n\n"


def page(corners: Sequence[Corner], before: str | None = None) -> str:
    """Return the whole page, with the table of these results.

    Args:
        before: the page with another table; by default the one that is there.
    """
    columns = [
        ["", "PySpark", "Hadoop", "Python, Java of both", "seen", *BEHAVIOURS.values()],
        *(_column(corner) for corner in corners),
    ]
    first, *rows = [_row(cells) for cells in zip(*columns, strict=True)]
    rule = _row(["---"] * len(columns))
    head, mark, rest = (before or PAGE.read_text(encoding="utf-8")).partition(_MARK)
    assert mark, f"{PAGE.name} has no line {_MARK.strip()}"
    _, _, tail = rest.partition("\n\n")
    return head + mark + "\n".join([first, rule, *rows]) + "\n\n" + tail


def _column(corner: Corner) -> list[str]:
    cells = [_cell(corner, name) for name in BEHAVIOURS]
    runtime = f"{corner.python}, {corner.java}"
    head = f"{corner.spark} × {corner.hadoop}"
    return [head, corner.spark, corner.hadoop, runtime, corner.date, *cells]


def _cell(corner: Corner, behaviour: str) -> str:
    seen = corner.seen.get(behaviour)
    if seen is None:
        return "not run"
    if seen.outcome == WORKS:
        return f"works ({seen.seconds:.0f} s)"
    return f"fails: `{seen.outcome.replace('`', chr(39)).replace('|', '/')}`"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(load()), encoding="utf-8")
