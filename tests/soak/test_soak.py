"""Repetitions and violent ends, on a cluster of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.yarn.resource_manager import ResourceManager
from tests.conftest import gpus_become

LAUNCHES = 12


def misbehave(how: str) -> str:
    if hopsgpu.context().rank == 0:
        if how == "raises":
            raise ValueError(how)
        if how == "exits":
            os._exit(9)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    elif how != "returns":
        time.sleep(120)
    return how


@pytest.mark.timeout(900)
def test_many_launches_with_failures_leave_nothing(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    chance = random.Random(7)
    threads = {thread.name for thread in threading.enumerate()}
    files = set(Path("/proc/self/fd").iterdir())
    for _ in range(LAUNCHES):
        how = chance.choice(["returns", "raises", "exits", "killed"])
        workers = chance.randint(1, 4)
        arguments = {"args": (how,), "workers": workers, "progress": "off"}
        if how == "returns":
            assert hopsgpu.launch(misbehave, **arguments).values == (how,) * workers
        else:
            with pytest.raises(hopsgpu.RankFailed) as failed:
                hopsgpu.launch(misbehave, **arguments)
            assert failed.value.rank == 0
            others = failed.value.result.ranks[1:]
            assert all(rank.stopped and rank.signal == "SIGTERM" for rank in others)
        assert manager.gpus()[0] == 0
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not [name for name in left if name.startswith("hopsgpu")]
    # py4j keeps a connection or two; a leak of ours would be one for each launch.
    assert len(set(Path("/proc/self/fd").iterdir())) < len(files) + LAUNCHES


SCRIPT = """
    import os, sys, time
    import hopsgpu

    def train(pids):
        with open(f"{pids}/{hopsgpu.context().rank}", "w") as file:
            file.write(str(os.getpid()))
        print("training", flush=True)
        time.sleep(600)

    hopsgpu.session("to be ended")
    hopsgpu.launch(train, args=(sys.argv[1],), workers=2)
"""


def rank_pids(directory: Path) -> list[int]:
    return [int(file.read_text()) for file in directory.iterdir() if file.read_text()]


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def await_(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)  # the ends of strangers' processes are told to nobody
    return condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_ended_gives_its_gpus_back(
    cluster_env: dict[str, str],
    manager: ResourceManager,
    gpus_back: Callable[[], int],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(textwrap.dedent(SCRIPT))
    pids.mkdir()
    driver = subprocess.Popen(
        [sys.executable, str(script), str(pids)],
        env=cluster_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert await_(lambda: len(rank_pids(pids)) == 2, 120)
        assert gpus_become(manager, 2)
        driver.send_signal(number)
        assert gpus_become(manager, 0, seconds=15)
        assert await_(lambda: all(map(gone, rank_pids(pids))), 15)
        _, said = driver.communicate(timeout=60)
        if number is signal.SIGINT:
            assert "KeyboardInterrupt" in said
            assert "releasing" in said
    finally:
        driver.kill()
        driver.communicate()
