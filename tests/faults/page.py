"""What was seen in the fault matrix, and the page of it: `python -m tests.faults.page`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

_HEAD = """\
# Faults and what becomes of a launch

What was seen when `make faults` ran last, on {date}: a
[development cluster](development-cluster.md) of two nodes with two simulated GPUs each, on two
cores that other work may have shared. Each fault befalls two ranks, an elastic gang of one or two
(`workers=(1, 2)`), and a search with two trials at a time, all without `retries`.

A cell says how the launch ended, or that it goes on with another world or another try of the
trial, and the seconds from the fault until then, where they were kept. After the semicolon are the
seconds from the end until the ResourceManager counted no GPU in use, which the test wants within
{back:g}. The test also checks that the first failure is named, that no process of the launch and no
file of it on a node or in `TMPDIR` is left, that no lease of a GPU is held, and that the model is
there whole or not at all. A dash is a cell that was not run, or that does not apply.

A peer without a heartbeat counts as lost after 5 s here (`spark.hopsgpu.heartbeat`), and YARN gives
a node up after 15 s; the defaults are 30 s and 10 minutes.

<!-- written by tests/faults/page.py from tests/faults/results.json -->

"""
_TAIL = """
## What is not tried

- a node's clock an hour behind: libfaketime has each `time.sleep` of Python fail then
{missing}

## What others try

- Horovod's elastic mode (`test/integration/elastic_common.py` and, on Spark,
  `elastic_spark_common.py`): hosts are added and removed, also all of them and unused ones; one
  rank or all ranks raise or are killed; all hosts are on the blacklist, which hosts leave after a
  time; fewer hosts than the minimum; a limit of resets; Spark's blacklist, off and on in five ways.
  The tests compare ranks, sizes and the number of rendezvous. None looks at what is left on nodes,
  and the daemons of the cluster are no part of them.
- Ray's release tests (`release/nightly_tests/chaos_test`): a node is killed each minute, by its
  raylet's shutdown or by the end of its virtual machine, or the network fails (by iptables or in
  the RPC layer), while tasks, actors, streaming generators and borrowed references run. The tests
  check that the workload ends, and record its time and its memory.
"""


@dataclass(frozen=True)
class Cell:
    """What a fault did to one kind of launch.

    Attributes:
        outcome: in words, or what failed.
        seconds: from the fault to the launch's end, or until ranks ran again; None if it did
            neither.
        gpus_back: from the launch's end until the ResourceManager counted no GPU in use; None if
            that was not seen.
    """

    outcome: str
    seconds: float | None = None
    gpus_back: float | None = None

    def __str__(self) -> str:
        after = "" if self.seconds is None else f", {self.seconds:.1f} s"
        back = "" if self.gpus_back is None else f"; GPUs {self.gpus_back:.1f} s"
        return f"{self.outcome}{after}{back}"


Seen = Mapping[tuple[str, str], Cell]


def table(seen: Seen) -> str:
    """Return the cells as a table of Markdown: a row for each fault, a column for each kind."""
    from tests.faults.launches import Kind

    rows = [["fault", *(kind.value for kind in Kind)], ["---"] * (1 + len(Kind))]
    for fault in dict.fromkeys(fault for fault, _ in seen):
        cells = (seen.get((fault, kind.value)) for kind in Kind)
        rows.append([fault, *("–" if cell is None else str(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(date: str, seen: Seen) -> str:
    """Return the whole page."""
    from tests.conftest import BACK_SECONDS
    from tests.faults.faults import FAULTS

    missing = [
        f"- {fault.name}, {kind}: {why}" for fault in FAULTS for kind, why in fault.not_for.items()
    ]
    head = _HEAD.format(date=date, back=BACK_SECONDS)
    return head + table(seen) + "\n" + _TAIL.format(missing="\n".join(missing))


def load(file: Path = RESULTS) -> tuple[str, dict[tuple[str, str], Cell]]:
    """Return the date of the last run and its cells."""
    said = json.loads(file.read_text(encoding="utf-8"))
    cells = {(one["fault"], one["kind"]): Cell(**one["cell"]) for one in said["cells"]}
    return said["date"], cells


def record(seen: Seen, file: Path = RESULTS) -> None:
    """Store cells, in place of earlier ones."""
    before = load(file)[1] if file.is_file() else {}
    rows = [
        {"fault": fault, "kind": kind, "cell": asdict(cell)}
        for (fault, kind), cell in {**before, **seen}.items()
        if fault in _known()
    ]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    order = list(_known())
    rows.sort(key=lambda row: order.index(str(row["fault"])))
    text = json.dumps({"date": today, "cells": rows}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _known() -> list[str]:
    from tests.faults.faults import FAULTS

    return [fault.name for fault in FAULTS]


if __name__ == "__main__":
    PAGE.write_text(page(*load()), encoding="utf-8")
