"""What was seen in the fault matrix, and the page of it: `python -m tests.faults.page`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
YARN, STANDALONE, KUBERNETES = "YARN", "standalone", "Kubernetes"

_HEAD = """\
# Fault injection results

Results of the last run of `make faults`: {dates}. The
[development cluster](development-cluster.md) had two nodes with two simulated GPUs each, on two
cores that other work may have shared. Each fault is injected into a gang of two ranks, an elastic
gang (`workers=(1, 2)`) and a search with two concurrent trials, all without `retries`.

A cell says what the launch did. "Continues" means in another world, or in another attempt of the
trial. The seconds, where they were recorded, are from the fault until then. After the semicolon are
the seconds from the end until the cluster manager counted no GPU in use. The test allows
{back:g} s for that. A dash marks a cell that was not run, or that does not apply.

The test also checks that

- the first failure is named;
- no process of the launch is left, and no file of it on a node or in `TMPDIR`;
- no GPU lease is held;
- the model is complete or absent.

In these tests, a peer without a heartbeat for 5 s counts as lost (`spark.hopsgpu.heartbeat`). The
default is 30 s.

<!-- written by tests/faults/page.py from tests/faults/results.json -->

"""
_OF_HADOOP = """\
## YARN and Spark standalone

The last column is a gang on a Spark standalone master with the recovery mode `FILESYSTEM`. The
other columns are on YARN.

YARN gives up a node after 15 s here; the default is 10 minutes. The standalone master gives up a
silent worker after 10 s; the default is 60 s.

A standalone master counts a GPU as free as soon as it tells the worker to kill the executor. The
process ends up to 2 s later, and a frozen one 10 s later. The test waits for that too.

"""
_OF_KUBERNETES = """
## Kubernetes

All columns are on Kubernetes; `make faults FAULTS_ON=--kubernetes` runs them. The cells are from
several runs within a day. The test also checks that the API server lists no pod of the launch. The
pods of a killed driver end, but the API server lists them until somebody deletes them.

Kubernetes counts a node as not ready after 10 s here; the default is 50 s. The kubelet and the
device plugin start again after their end, unless the fault says that they stay away.

"""
_TAIL = """
## Not tested

- a node's clock one hour behind: under libfaketime, Python's `time.sleep` then fails
- elastic gangs and searches on a standalone master
- faults of NodeManagers, the ResourceManager and standalone daemons, on Kubernetes: those of
  kubelets, nodes and the API server take their place
- containers are preempted, on Kubernetes: the preemption of pods takes its place
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


class CellKey(NamedTuple):
    """The row and the column of a cell."""

    fault: str
    kind: str
    manager: str = YARN


@dataclass(frozen=True)
class Cell:
    """What a fault did to one kind of launch.

    Attributes:
        outcome: in words, or what failed.
        seconds: from the fault to the launch's end, or until ranks ran again; None if it did
            neither.
        gpus_back: from the launch's end until the cluster manager counted no GPU in use; None if
            that was not seen.
    """

    outcome: str
    seconds: float | None = None
    gpus_back: float | None = None

    def __str__(self) -> str:
        after = "" if self.seconds is None else f", {self.seconds:.1f} s"
        back = "" if self.gpus_back is None else f"; GPUs {self.gpus_back:.1f} s"
        return f"{self.outcome}{after}{back}"


Seen = Mapping[CellKey, Cell]


def table(seen: Seen, *managers: str) -> str:
    """Return the cells as a table of Markdown: a row for each fault, a column for each kind.

    Args:
        managers: cluster managers with a column in the table; only the first one is not named.
    """
    from tests.faults.launches import Kind

    columns = [
        (kind.value, manager)
        for manager in managers
        for kind in (Kind if manager != STANDALONE else [Kind.GANG])
    ]
    titles = (kind if manager == managers[0] else f"{kind}, {manager}" for kind, manager in columns)
    rows = [["fault", *titles], ["---"] * (1 + len(columns))]
    for fault in dict.fromkeys(key.fault for key in seen if key.manager in managers):
        cells = (seen.get(CellKey(fault, *column)) for column in columns)
        rows.append([fault, *("–" if cell is None else str(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tables(seen: Seen) -> str:
    """Return a table for each cluster manager that has cells."""
    managers = dict.fromkeys(key.manager for key in seen)
    return "\n\n".join(f"{manager}\n{table(seen, manager)}" for manager in managers)


def page(dates: Mapping[str, str], seen: Seen) -> str:
    """Return the whole page.

    Args:
        dates: of the last run with each cluster manager.
        seen: the cells.
    """
    from tests.faults.leftovers import BACK_SECONDS
    from tests.faults.matrix import FAULTS

    missing = [
        f"- {fault.name}, {kind}: {why}" for fault in FAULTS for kind, why in fault.not_for.items()
    ]
    missing += [
        f"- {fault.name}, on {manager}: {why}"
        for fault in FAULTS
        for manager, why in fault.not_on.items()
    ]
    runs = ", ".join(f"{manager} on {date}" for manager, date in dates.items())
    parts = [
        _HEAD.format(dates=runs, back=BACK_SECONDS),
        _OF_HADOOP,
        table(seen, YARN, STANDALONE),
        "\n",
        _OF_KUBERNETES,
        table(seen, KUBERNETES),
        "\n",
        _TAIL.format(missing="\n".join(missing)),
    ]
    return "".join(parts)


def load(file: Path = RESULTS) -> tuple[dict[str, str], dict[CellKey, Cell]]:
    """Return the date of the last run with each cluster manager, and all cells."""
    results = json.loads(file.read_text(encoding="utf-8"))
    cells = {
        CellKey(row["fault"], row["kind"], row["manager"]): Cell(**row["cell"])
        for row in results["cells"]
    }
    return results["dates"], cells


def record(seen: Seen, file: Path = RESULTS) -> None:
    """Store cells, in place of earlier ones; those of other cluster managers stay."""
    dates, before = load(file) if file.is_file() else ({}, {})
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    dates |= {key.manager: today for key in seen}
    order = _known()
    cells = {key: cell for key, cell in {**before, **seen}.items() if key.fault in order}
    rows = [
        {**key._asdict(), "cell": asdict(cell)}
        for key, cell in sorted(cells.items(), key=lambda item: order.index(item[0].fault))
    ]
    text = json.dumps({"dates": dates, "cells": rows}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _known() -> list[str]:
    from tests.faults.matrix import FAULTS

    return [fault.name for fault in FAULTS]


if __name__ == "__main__":
    PAGE.write_text(page(*load()), encoding="utf-8")
