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
# Fault injection results

Results of the last run of `make faults`, on {date}. The
[development cluster](development-cluster.md) had two nodes with two simulated GPUs each, on two
cores that other work may have shared. Each fault is injected into a gang of two ranks, an elastic
gang (`workers=(1, 2)`) and a search with two concurrent trials, all without `retries`.

A cell says what the launch did. "Continues" means in another world, or in another attempt of the
trial. The seconds, where they were recorded, are from the fault until then. After the semicolon are
the seconds from the end until the ResourceManager counted no GPU in use. The test allows
{back:g} s for that. A dash marks a cell that was not run, or that does not apply.

The test also checks that

- the first failure is named;
- no process of the launch is left, and no file of it on a node or in `TMPDIR`;
- no GPU lease is held;
- the model is complete or absent.

In these tests, a peer without a heartbeat for 5 s counts as lost (`spark.hopsgpu.heartbeat`), and
YARN gives up a node after 15 s. The defaults are 30 s and 10 minutes.

<!-- written by tests/faults/page.py from tests/faults/results.json -->

"""
_TAIL = """
## Not tested

- a node's clock one hour behind: under libfaketime, Python's `time.sleep` then fails
{missing}

## Tests of other projects

- Horovod's elastic mode (`test/integration/elastic_common.py` and, on Spark,
  `elastic_spark_common.py`):
  - Hosts are added and removed, also all of them and unused ones.
  - One rank or all ranks raise or are killed.
  - All hosts are on the blacklist, which hosts leave after a time.
  - There are fewer hosts than the minimum, or a limit of resets.
  - Spark's blacklist is off and on, in five ways.
  - The tests compare ranks, sizes and the number of rendezvous. None checks what is left on nodes,
    and none injects faults into the daemons of the cluster.
- Ray's release tests (`release/nightly_tests/chaos_test`):
  - A node is killed each minute, by its raylet's shutdown or by the end of its virtual machine.
  - The network fails, by iptables or in the RPC layer.
  - Meanwhile tasks, actors, streaming generators and borrowed references run.
  - The tests check that the workload ends, and record its time and memory.
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
    from tests.faults.faults import FAULTS
    from tests.faults.leftovers import BACK_SECONDS

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
