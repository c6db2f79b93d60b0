"""A user's script on a machine without a cluster, whose runs the pages are tried with.

It prints a line of JSON for each run, and then stays, with one run that goes on, until its standard
input ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from optuna.distributions import CategoricalDistribution, FloatDistribution

import hopsgpu

DIRECTORY = Path(sys.argv[1])


def tell(step: str, run_id: str) -> None:
    print("TOLD " + json.dumps({"step": step, "run": run_id}), flush=True)


def trains(steps: int, seconds: float) -> float:
    context = hopsgpu.context()
    loss = 2.0
    for step in range(steps):
        loss = 2.0 / (1 + step / 20) + random.random() / 20  # noqa: S311
        context.report(step, loss=loss, accuracy=1 - loss / 2)
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f} <b>not bold</b>", flush=True)
        if step in (40, 80):
            state = Path(os.environ["TMPDIR"]) / "state"
            state.write_text(str(step))
            context.save_checkpoint(state, step=step)
        time.sleep(seconds)
    (context.model_dir / f"part-{context.rank}").write_text("model")
    return loss


def fails() -> None:
    context = hopsgpu.context()
    print("reads the batches", flush=True)
    if context.rank == 1:
        raise ValueError("<script>document.title='mine'</script> is no batch")
    time.sleep(60)


def tries(lr: float, layers: int, optimizer: str) -> float:
    if lr > 0.08:
        raise ValueError(f"lr={lr:.3g} is too large")
    return abs(lr - 0.01) * 10 + layers / 10 + (optimizer == "sgd") / 5


def main() -> None:
    hopsgpu.session("pages")
    result = hopsgpu.launch(trains, args=(120, 0.02), workers=2, model="digits", name="digits")
    tell("trained", result.run_id)
    try:
        hopsgpu.launch(fails, workers=2, gpus_per_worker=0, name="breaks")
    except hopsgpu.RankFailed as error:
        assert error.result is not None
        tell("failed", error.result.run_id)
    space = {
        "lr": FloatDistribution(1e-4, 0.1, log=True),
        "layers": CategoricalDistribution((2, 4, 8)),
        "optimizer": CategoricalDistribution(("adam", "sgd")),
    }
    found = hopsgpu.search(
        tries, space, trials=24, max_concurrent=2, max_failures=24, metric="loss", progress="off"
    )
    tell("searched", found.run_id)
    run = hopsgpu.submit(trains, args=(100_000, 0.2), workers=2, name="long", progress="off")
    while run.status().state != "running":
        assert not run.wait(0.1), run.result()
    tell("running", run.run_id)
    waits = hopsgpu.submit(trains, args=(10, 0.1), workers=2, name="later", progress="off")
    tell("waiting", waits.run_id)
    sys.stdin.read()
    for one in (run, waits):
        one.cancel()
        one.wait(900)


main()
