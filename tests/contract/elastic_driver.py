"""A user's script on a local master of three GPUs: an example on an elastic gang, 2 → 3 → 2 ranks.

For each example that it reads the name of, it prints what the uninterrupted training and the
elastic one reported.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import hopsgpu
from hopsgpu.backends.local import container

DIRECTORY = Path(sys.argv[1])
Train = Callable[..., Any]
# A world grows as soon as a third GPU is there, and then not again for minutes.
GROWTHS = 1


def reporting(train: Train, reports: str, hurried: bool, **kwargs: Any) -> Any:
    """Run a training whose reports are kept in files, by world.

    Unless it is hurried, a world that is to be resized takes its time, so that the resize finds it
    training: more and more, because a busy machine resizes late.
    """
    context = hopsgpu.context()
    kind, rank = type(context), context.rank
    plain = kind.report
    counted = 0

    def report(self: Any, step: int, **metrics: Any) -> None:
        nonlocal counted
        plain(self, step, **metrics)
        if rank == 0:
            with Path(reports, str(context.generation)).open("a") as file:
                values = {name: float(value) for name, value in metrics.items()}
                file.write(json.dumps({"step": step, **values}) + "\n")
        counted += 1
        if not hurried and context.generation <= GROWTHS:
            time.sleep(0.02 if counted < 150 else 0.5)

    kind.report = report  # type: ignore[method-assign]
    return train(**kwargs)


def hang(file: str) -> None:
    Path(file).write_text("")
    threading.Event().wait()


def until(run: hopsgpu.Run, holds: Callable[[], bool]) -> None:
    """Look again and again until something holds; nobody announces it. The run must go on."""
    while not holds():
        if run.wait(0.1):
            raise RuntimeError(f"the run has ended too early: {run.result().worlds}")


def curve(reports: Path) -> list[dict[str, Any]]:
    """The reports of all worlds, in their order."""
    return [
        {"world": int(file.name), **json.loads(line)}
        for file in sorted(reports.iterdir())
        for line in file.read_text().splitlines()
    ]


def container_pids() -> list[int]:
    """The processes of this driver's containers, the latest last."""
    name, found = container.__name__.encode(), []
    for process in Path("/proc").iterdir():
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and name in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except (OSError, IndexError):  # it has ended, or is no process
            continue
    return sorted(found)


def resized(launch: Callable[..., hopsgpu.Run], reports: Path) -> hopsgpu.GangResult:
    """Run a gang that grows when a GPU becomes free, and shrinks when an executor is killed."""
    here = reports.with_suffix(".here")
    other = hopsgpu.submit(hang, args=(str(here),), workers=1, progress="off")
    until(other, here.exists)
    run = launch(workers=(2, 3))
    until(run, lambda: len(curve(reports)) >= 10)
    other.cancel()
    # The examples save every 100 steps, so three ranks have saved.
    until(run, lambda: [row["world"] for row in curve(reports)].count(1) >= 120)
    os.kill(container_pids()[-1], signal.SIGKILL)
    return run.result()


def trained(name: str, kwargs: dict[str, Any], data: Any) -> dict[str, Any]:
    """Run the training of an example twice: whole on two ranks, and on 2, 3 and 2."""
    train = import_module(name).train
    told = dict[str, Any](example=name)
    for kind in ("whole", "elastic"):
        reports = DIRECTORY / f"{name}-{kind}"
        reports.mkdir()
        function = functools.partial(reporting, train, str(reports), kind == "whole")
        launch = functools.partial(
            hopsgpu.submit, function, kwargs=kwargs, data=data, progress="off", visible="rank"
        )
        result = launch(workers=2).result() if kind == "whole" else resized(launch, reports)
        worlds = [
            {"ranks": w.ranks, "end": w.end, "why": w.why, "resize": w.resize_seconds}
            for w in result.worlds
        ]
        told[kind] = {"values": result.values, "worlds": worlds, "reports": curve(reports)}
    return told


def main() -> None:
    spark = hopsgpu.session("elastic")
    for line in sys.stdin:
        name, kwargs = json.loads(line)
        points = getattr(import_module(name), "points", None)
        told = trained(name, kwargs, None if points is None else points(spark))
        print("TOLD " + json.dumps(told), flush=True)


main()
