"""A user's script on a machine without a cluster: prints a line of JSON for each thing it did."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from optuna.distributions import IntDistribution

import hopsgpu
from hopsgpu.data.rank_data import RankData
from tests.travelling import whole_environment

DIRECTORY = Path(sys.argv[1])


def tell(step: str, **fields: Any) -> None:
    print("TOLD " + json.dumps({"step": step, **fields}), flush=True)


def summed() -> tuple[float, list[str]]:
    import torch
    import torch.distributed as dist

    context = hopsgpu.context()
    dist.init_process_group("gloo")
    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    (context.model_dir / f"part-{context.rank}").write_text("model")
    context.report(1, loss=0.5)
    return float(total), list(context.gpus)


def shared() -> tuple[int, list[int], list[str]]:
    """What a manager and a DataLoader's workers give, which have sockets in TMPDIR."""
    import multiprocessing

    from torch.utils.data import DataLoader

    with multiprocessing.Manager() as manager:
        kept = list(manager.list([1, 2]))
    loaded = [int(n) for batch in DataLoader(range(4), num_workers=2) for n in batch]
    return sum(kept), loaded, sys.argv


def in_a_trial(x: int) -> float:
    return float(shared()[0])


def own_rows() -> list[int]:
    data = hopsgpu.context().data
    assert isinstance(data, RankData)
    return [int(number) for batch in data.batches(16) for number in batch["id"]]


def travelled() -> tuple[str, str]:
    import mine  # type: ignore[import-not-found]

    return mine.VALUE, sys.executable


def in_other_environments() -> None:
    home = DIRECTORY / "environments"
    (home / "modules").mkdir(parents=True)
    (home / "modules" / "mine.py").write_text("VALUE = 'modules'\n")
    whole = whole_environment(home, {"mine": "VALUE = 'whole'\n"})
    for given in (home / "modules", whole):
        result = hopsgpu.launch(travelled, workers=2, python_env=str(given), progress="off")
        tell("environment", values=result.values, run=result.run_id)


def second_fails() -> None:
    if hopsgpu.context().rank == 1:
        raise ValueError("no such batch")


class Delegating:
    """A wrapper as many people write it: it can be pickled, but not loaded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def unloadable(gang: hopsgpu.Gang) -> None:
    wrapped = Delegating(1)

    def use(x: Any) -> Any:
        return wrapped

    calls = {
        "launch": lambda: hopsgpu.launch(use, args=(1,), progress="off"),
        "held": lambda: gang.launch(use, [1], progress="off"),
        "search": lambda: hopsgpu.search(
            use, {"x": IntDistribution(1, 2)}, trials=1, max_concurrent=1, progress="off"
        ),
        "score": lambda: hopsgpu.score(use, "/nonexistent", progress="off"),
    }
    for name, call in calls.items():
        try:
            call()
        except hopsgpu.ConfigError as error:
            tell("unloadable", call=name, said=str(error))


def gpus_seen() -> tuple[list[str], str]:
    time.sleep(1)
    return list(hopsgpu.context().gpus), os.environ["CUDA_VISIBLE_DEVICES"]


def hang(directory: str) -> None:
    Path(directory, str(hopsgpu.context().rank)).write_text(str(os.getpid()))
    threading.Event().wait()


def hanging(name: str) -> tuple[hopsgpu.Run, list[int]]:
    """A gang of two whose ranks hang, and their pids."""
    directory = DIRECTORY / name
    directory.mkdir()
    run = hopsgpu.submit(hang, args=(str(directory),), workers=2, gpus_per_worker=0)
    while len(found := [f.read_text() for f in directory.iterdir()]) < 2 or not all(found):
        assert not run.wait(0.05), run.result()
    return run, [int(pid) for pid in found]


def main() -> None:
    spark = hopsgpu.session("laptop")
    result = hopsgpu.launch(summed, workers=2, model="sum")
    assert result.model is not None
    tell(
        "launch",
        values=result.values,
        warnings=result.warnings,
        url=result.model.url,
        files=sorted(f.name for f in Path(result.model.url.removeprefix("file://")).glob("part-*")),
        released=result.timeline.released is not None,
        metrics=[dict(m) for m in result.metrics],
    )
    tell("shared", value=hopsgpu.launch(shared, progress="off").value)
    space = {"x": IntDistribution(1, 2)}
    found = hopsgpu.search(in_a_trial, space, trials=2, max_concurrent=1, progress="off")
    tell("searched", values=[trial.value for trial in found.trials])
    result = hopsgpu.launch(own_rows, workers=2, data=spark.range(100))
    tell("data", values=result.values, run=result.run_id)
    in_other_environments()
    try:
        hopsgpu.launch(second_fails, workers=2, retries=1)
    except hopsgpu.RankFailed as error:
        tell("failure", said=str(error), rank=error.rank, warnings=error.result.warnings)
    with hopsgpu.hold(workers=2) as gang:
        times = []
        for _ in range(4):
            began = time.monotonic()
            gang.launch(gpus_seen_at_once, progress="off")
            times.append(time.monotonic() - began)
        unloadable(gang)
    tell("held", seconds=times)
    run, pids = hanging("cancelled")
    run.cancel()
    try:
        run.result()
    except hopsgpu.Cancelled as error:
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        tell("cancelled", said=str(error), alive=alive)
    with_gpus()
    _, pids = hanging("killed")
    tell("hanging", pids=pids)
    threading.Event().wait()


def gpus_seen_at_once() -> int:
    return len(hopsgpu.context().gpus)


def with_gpus() -> None:
    os.environ["HOPSGPU_NVIDIA_SMI"] = sys.argv[2]
    try:
        hopsgpu.launch(gpus_seen, workers=3)
    except hopsgpu.CapacityError as error:
        tell("too many", said=str(error))
    one, other = (hopsgpu.submit(gpus_seen, workers=2) for _ in range(2))
    waited = set()
    while not (one.wait(0.05) and other.wait(0.05)):
        waited |= {detail for run in (one, other) for detail in run.status().waiting_details}
    for run in (one, other):
        result = run.result()
        tell(
            "gpus", values=result.values, times=[result.timeline.started, result.timeline.returned]
        )
    tell("waited", waited=sorted(waited))
    usage = hopsgpu.usage("run", None)
    tell("usage", rows=[dataclasses.asdict(row) for row in usage], problems=usage.problems)


main()
