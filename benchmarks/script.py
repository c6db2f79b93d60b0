"""Scripts: `hopsgpu run`, a TorchDistributor job by spark-submit, and torchrun on this machine.

Then the steps a second of a script with and without the mirror of its snapshots.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.rivals import WORKERS
from benchmarks.table import heading, row
from hopsgpu.backends.spark.submit_command import find_spark_submit

ROUNDS = 5
MIRROR_ROUNDS = 3
OURS, RIVAL, LOCAL = "hopsgpu run", "spark-submit, TorchDistributor", "torchrun, this machine"
PLAIN, MIRRORED = "without a mirror", "with --checkpoint-dir"
# The script imports torch, as one that trains does.
FIRST_LINE = """
    import time
    print(f"FIRST {time.time()}", flush=True)
    import torch
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
"""
DISTRIBUTOR = """
    import sys
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    script, ranks = sys.argv[1], int(sys.argv[2])
    TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False).run(script)
    spark.stop()
"""
# A step takes some milliseconds. A snapshot of 40 MB replaces the last one every ten seconds.
STEPS = """
    import os, time
    import torch

    torch.set_num_threads(1)
    os.makedirs("snapshots", exist_ok=True)
    state, values = torch.randn(10_000_000), torch.randn(400, 400)
    steps, began, saved = 0, time.monotonic(), 0.0
    while (now := time.monotonic() - began) < 45:
        values = torch.tanh(values @ values / 20)
        steps += 1
        if now - saved > 10:
            saved = now
            torch.save(state, "snapshots/draft.pt")
            os.replace("snapshots/draft.pt", "snapshots/snapshot.pt")
    print(f"RATE {steps / now}", flush=True)
"""


def measure() -> Mapping[str, Sequence[float]]:
    """Return the seconds to the first line of each, and the steps a second."""
    with tempfile.TemporaryDirectory(prefix="hopsgpu-bench-script-") as directory:
        project = Path(directory)
        for name, text in (
            ("first.py", FIRST_LINE),
            ("distributor.py", DISTRIBUTOR),
            ("steps.py", STEPS),
        ):
            (project / name).write_text(textwrap.dedent(text))
        starts = _starts(project)
        rates = _rates(project)
    return {**starts, **rates}


def _starts(project: Path) -> dict[str, list[float]]:
    commands: Mapping[str, Callable[[], list[str]]] = {
        OURS: lambda: [*_run("--workers", str(WORKERS)), "first.py"],
        RIVAL: lambda: _distributor(project),
        LOCAL: lambda: [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORKERS), "first.py"),
        ],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(ROUNDS + 1):
        for name, command in commands.items():
            began = time.time()
            first = max(map(float, _printed("FIRST", project, command())))
            if number:  # the first round fills caches
                taken[name].append(first - began)
    heading(f"from the command line to the first line of {WORKERS} ranks, {ROUNDS} times, seconds")
    for name, seconds in taken.items():
        row(name, seconds)
    ours, rival = (statistics.median(taken[name]) for name in (OURS, RIVAL))
    print(f"\n{RIVAL}: {rival / ours:.1f} times as long (target: 3)", flush=True)
    return taken


def _rates(project: Path) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {PLAIN: [], MIRRORED: []}
    for _ in range(MIRROR_ROUNDS):
        for name, options in ((PLAIN, ()), (MIRRORED, ("--checkpoint-dir", "snapshots"))):
            command = [*_run("--workers", "1", *options), "steps.py"]
            rates[name] += map(float, _printed("RATE", project, command))
    heading(f"steps a second of one rank that saves 40 MB every 10 s, {MIRROR_ROUNDS} times")
    for name, values in rates.items():
        row(name, values)
    plain, mirrored = (statistics.median(rates[name]) for name in (PLAIN, MIRRORED))
    print(f"\nthe mirror costs {1 - mirrored / plain:.1%} of the steps (target: 2 %)", flush=True)
    return rates


def _run(*options: str) -> list[str]:
    # As the rival's executors, these have no GPU.
    small = ("--gpus-per-worker", "0", "--cores-per-worker", "1", "--memory-per-worker", "2g")
    return [sys.executable, "-m", "hopsgpu.cli.main", "run", *small, *options]


def _distributor(project: Path) -> list[str]:
    properties = {
        "spark.dynamicAllocation.enabled": "false",
        "spark.executor.instances": WORKERS,
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "3g",
        "spark.pyspark.python": sys.executable,
    }
    confs = [word for item in properties.items() for word in ("--conf", f"{item[0]}={item[1]}")]
    script = [str(project / "distributor.py"), str(project / "first.py"), str(WORKERS)]
    return [str(find_spark_submit(os.environ)), "--master", "yarn", *confs, *script]


def _printed(word: str, project: Path, command: Sequence[str]) -> list[str]:
    """Return the values after a word in the output of a command."""
    ran = subprocess.run(
        command,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    values = re.findall(rf"{word} (\d+\.\d+)", ran.stdout)
    if ran.returncode or not values:
        sys.exit(f"{command} ended with {ran.returncode}:\n{ran.stdout[-4000:]}")
    return values
