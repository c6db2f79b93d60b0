"""Write docs/compatibility.md from the recorded results: `python -m tests.matrix.page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.matrix.behaviours import BEHAVIOURS, WORKS, Corner, load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
_HEAD = """\
# Versions of Spark and Hadoop

Results of the last `make matrix`. For each column it starts a
[development cluster](development-cluster.md) of that Hadoop, with two nodes of two simulated GPUs,
and uses it with that PySpark. A cell has the seconds of the test on two cores, mostly for the start
of JVMs, or what failed. The first row may include downloads and the cache of Spark's classes.

Other releases of these series are untried. PySpark 3.5 runs on Python 3.11 at most.

<!-- written by tests/matrix/page.py from tests/matrix/results.json -->
"""


def page(corners: Sequence[Corner]) -> str:
    """Return the whole page."""
    columns = [
        ["", "PySpark", "Hadoop", "Python, Java of both", "seen", *BEHAVIOURS.values()],
        *(_column(corner) for corner in corners),
    ]
    first, *rows = [_row(cells) for cells in zip(*columns, strict=True)]
    rule = _row(["---"] * len(columns))
    return "\n".join([_HEAD, first, rule, *rows]) + "\n"


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
