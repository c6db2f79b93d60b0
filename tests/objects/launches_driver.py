"""A user's script whose root is on an object store; prints a line of JSON about each launch."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from optuna.distributions import IntDistribution

import hopsgpu

BUCKET = sys.argv[1]
CHECKPOINT = "at.txt"
SPACE = {"x": IntDistribution(0, 4)}


def tell(step: str, **fields: Any) -> None:
    print("TOLD " + json.dumps({"step": step, **fields}), flush=True)


def train(steps: int, fails: bool) -> tuple[int, str]:
    gang = hopsgpu.context()
    before = latest()
    rows = sum(len(batch["x"]) for batch in gang.data.batches(16))
    for step in range(steps):
        gang.report(step, loss=1 / (step + 1))
        print(f"step {step}", flush=True)
        Path(CHECKPOINT).write_text(f"rank {gang.rank} step {step}")
        gang.save_checkpoint(Path(CHECKPOINT), step)
    if fails:
        # A rank that fails ends the others: all must have saved the last step by then.
        while not latest().endswith(f"step {steps - 1}"):
            time.sleep(0.05)  # nobody tells
        raise ValueError("as planned")
    (gang.model_dir / f"part-{gang.rank}").write_text("weights")
    return rows, before


def latest() -> str:
    found = hopsgpu.context().latest_checkpoint()
    return "" if found is None else found.read_text()


def score(x: int) -> float:
    return float(-((x - 2) ** 2))


def refusals(spark: Any) -> None:
    for name, call in {
        "frame": lambda: hopsgpu.launch(train, args=(1, False), workers=1, data=spark.range(9)),
        "score": lambda: hopsgpu.score(len, f"{BUCKET}/table", gpus_per_worker=0),
    }.items():
        try:
            call()
        except hopsgpu.ConfigError as error:
            tell(name, error=str(error))
    os.environ["HOPSGPU_ROOT"] = sys.argv[2]
    for name, call in {
        "launch": lambda: hopsgpu.launch(len, args=("",), workers=1, gpus_per_worker=0),
        "search": lambda: hopsgpu.search(
            score, SPACE, trials=1, max_concurrent=1, gpus_per_trial=0
        ),
    }.items():
        try:
            call()
        except hopsgpu.StoreError as error:
            tell(f"{name} without a bucket", error=str(error), kind=error.kind)


if __name__ == "__main__":
    spark = hopsgpu.session("objects", conf={"spark.ui.enabled": "false"})
    options = {"workers": 2, "gpus_per_worker": int(sys.argv[3]), "progress": "off", "model": "net"}
    table = f"{BUCKET}/table"
    try:
        hopsgpu.launch(train, args=(3, True), data=table, **options)
    except hopsgpu.RankFailed as error:
        assert error.result is not None
        tell("failed", run=error.result.run_id, error=str(error))
        result = hopsgpu.launch(
            train, args=(1, False), data=table, resume=error.result.run_id, **options
        )
        assert result.model is not None
        tell("resumed", run=result.run_id, values=result.values, model=result.model.url)
    found = hopsgpu.search(
        score,
        SPACE,
        trials=4,
        max_concurrent=2,
        gpus_per_trial=int(sys.argv[3]),
        progress="off",
    )
    tell("searched", run=found.run_id, trials=len(found.trials))
    refusals(spark)
    spark.stop()
