"""A user's script whose ranks use their GPUs or leave them idle; two GPUs are enough.

It prints a line of JSON for each run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from optuna.distributions import IntDistribution

import hopsgpu
from hopsgpu.data.rank_data import RankData
from tests import nvml_standin

NVML = Path(sys.argv[1])
# Far more than the ranks take to start, so that another loss is not the largest.
SECONDS = 12.0
HANG = 120.0


def tell(step: str, **fields: Any) -> None:
    print("TOLD " + json.dumps({"step": step, **fields}), flush=True)


def only_reads(seconds: float) -> int:
    """A training that takes rows faster than they can be decoded."""
    data, until = hopsgpu.context().data, time.monotonic() + seconds
    assert isinstance(data, RankData)
    for number, _ in enumerate(data.batches(4096, ["text"], epochs=None)):
        if time.monotonic() > until:
            return number
    raise AssertionError("it has no end")


def only_saves(seconds: float) -> int:
    """A training that saves large files all the time."""
    context, until, step = hopsgpu.context(), time.monotonic() + seconds, 0
    state = Path("state")
    state.write_bytes(os.urandom(64 << 20))
    while time.monotonic() < until:
        step += 1
        context.save_checkpoint(state, step, keep=1)
    return step


def waits(seconds: float) -> str:
    time.sleep(seconds)
    print("has waited", flush=True)
    return "returned"


def trial_waits(x: int) -> float:
    time.sleep(HANG)
    return float(x)


def told_of(result: Any) -> dict[str, Any]:
    return {
        "run": result.run_id,
        "kinds": dict(result.gpu_seconds.kinds()),
        "held": result.gpu_seconds.held,
        "warnings": list(result.warnings),
    }


def main() -> None:
    spark = hopsgpu.session("idle", conf={"spark.hopsgpu.idle_warning": "3s"})
    rows = spark.range(600_000).selectExpr("repeat(sha2(cast(id as string), 512), 4) as text")
    result = hopsgpu.launch(only_reads, args=(SECONDS,), workers=2, data=rows)
    tell("data", **told_of(result))
    tell("saves", **told_of(hopsgpu.launch(only_saves, args=(SECONDS,), workers=1)))
    nvml_standin.set_utilisation(NVML, "0")
    result = hopsgpu.launch(waits, args=(SECONDS,), workers=2, progress="lines")
    tell("unused", **told_of(result))
    try:
        hopsgpu.launch(waits, args=(HANG,), workers=2, retries=1, gpu_idle_timeout="5s")
    except hopsgpu.GpusIdle as error:
        tell("ended", said=str(error), seconds=error.seconds, **told_of(error.result))
    tell("back", used=sum(node.used for node in hopsgpu.inventory().nodes))
    space = {"x": IntDistribution(1, 2)}
    found = hopsgpu.search(
        trial_waits, space, trials=1, max_concurrent=1, gpu_idle_timeout="15s", progress="off"
    )
    tell("trial", error=found.trials[0].error, warnings=list(found.warnings))
    nvml_standin.set_utilisation(NVML, "unknown")
    result = hopsgpu.launch(waits, args=(SECONDS,), workers=2, gpu_idle_timeout="2s")
    tell("unknown", values=list(result.values), **told_of(result))


main()
