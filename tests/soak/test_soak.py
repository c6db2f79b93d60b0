"""Repetitions and violent ends, on a cluster of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, gpus_become, until
from tests.processes import processes_of

LAUNCHES, THREADS = 8, 3
WAYS = ("returns", "raises", "exits", "killed", "cancelled", "held")


def misbehave(how: str, met: Path) -> str:
    """Once all ranks are there: one that has not begun cannot be stopped by SIGTERM."""
    context = hopsgpu.context()
    Path(met, f"{context.run_id}-{context.rank}").touch()
    while len(list(met.glob(f"{context.run_id}-*"))) < context.world_size:
        time.sleep(0.05)  # nobody tells
    if context.rank == 0:
        if how == "raises":
            raise ValueError(how)
        if how == "exits":
            os._exit(9)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    if how not in ("returns", "held"):
        time.sleep(120)
    return how


def launch_once(met: Path, how: str, workers: int, wait: float) -> None:
    """One launch that ends as it is meant to; fails the test where it does not."""
    arguments = {
        "args": (how, met),
        "workers": workers,
        "progress": "off",
        "acquire_timeout": "15m",
    }
    if how == "returns":
        assert hopsgpu.launch(misbehave, **arguments).values == (how,) * workers
    elif how == "held":
        with hopsgpu.hold(workers=workers, progress="off", acquire_timeout="15m") as gang:
            for _ in range(3):
                assert gang.launch(misbehave, (how, met), progress="off").values == (how,) * workers
    elif how == "cancelled":
        run = hopsgpu.submit(misbehave, **arguments)
        # At whatever state it is by then.
        run.wait(wait)
        run.cancel()
        with pytest.raises(hopsgpu.Cancelled):
            run.result()
    else:
        with pytest.raises(hopsgpu.RankFailed) as failed:
            hopsgpu.launch(misbehave, **arguments)
        assert failed.value.rank == 0
        others = failed.value.result.ranks[1:]
        assert all(rank.stopped and rank.signal == "SIGTERM" for rank in others)


def test_many_launches_with_failures_leave_nothing(
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    cluster_dir: Path,
    tmp_path: Path,
) -> None:
    chance = random.Random(0)
    launches = [
        (chance.choice(WAYS), chance.randint(1, 4), chance.uniform(0, 15)) for _ in range(LAUNCHES)
    ]
    assert {how for how, _, _ in launches} == set(WAYS)
    quiet = [thread.name for thread in threading.enumerate()]
    files = len(list(Path("/proc/self/fd").iterdir()))
    application = application_of(spark)
    temporary = temporary_files()
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(launch_once, tmp_path, *launch) for launch in launches]:
            done.result()
    assert gpus_become(manager, 0)
    # Whoever asks for ETL only has profile 0; there was none of it. Spark strikes an executor off
    # when its connection has ended, which comes after YARN's word that its container is free.
    assert until(lambda: not every_executor(application)), every_executor(application)

    def left() -> list[str]:
        names = {thread.name for thread in threading.enumerate()}.difference(quiet)
        return [name for name in names if name.startswith("hopsgpu")]

    assert until(lambda: not left()), left()
    # py4j keeps a connection for each thread that has called it; a leak of ours would be some for
    # each launch.
    assert len(list(Path("/proc/self/fd").iterdir())) < files + LAUNCHES
    assert until(lambda: not processes_of(cluster_dir, b"hopsgpu.agent."))
    assert until(lambda: temporary_files() == temporary), temporary_files() ^ temporary
    # Of the line only the last turn is left.
    names = application.gang_queue_dir.names
    assert until(lambda: [name.partition("-")[0] for name in names()] == ["turn"]), names()


def every_executor(application: Application) -> list[str]:
    """Ids of all executors that Spark knows, of whatever profile."""
    return [e for profile in range(100) for e in application.jvm.registered_executors(profile)]


def temporary_files() -> set[Path]:
    """What hopsgpu has left for this session's driver and for its cluster's containers."""
    return set(Path(tempfile.gettempdir()).glob("hopsgpu*"))


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


def child_of(pid: int) -> int:
    """The driver's JVM, which its Python has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (jvm,) = (int(child) for child in children if "java" in Path(f"/proc/{child}/comm").read_text())
    return jvm


@pytest.mark.parametrize(
    ("number", "whose"),
    # Of both that are killed at once another tells: tests/cluster/test_killed_driver.py.
    [(signal.SIGINT, "Python"), (signal.SIGKILL, "Python"), (signal.SIGKILL, "JVM")],
)
def test_a_driver_that_is_ended_gives_its_gpus_back(
    cluster_env: dict[str, str],
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    tmp_path: Path,
    number: signal.Signals,
    whose: str,
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
        assert until(lambda: len(rank_pids(pids)) == 2)
        assert gpus_become(manager, 2, seconds=30)
        os.kill(driver.pid if whose == "Python" else child_of(driver.pid), number)
        began = time.monotonic()
        assert gpus_become(manager, 0, seconds=30)
        seconds = time.monotonic() - began
        print(f"{number.name} to the driver's {whose}: GPUs free {seconds:.1f} s later")
        assert until(lambda: all(map(gone, rank_pids(pids))))
        _, said = driver.communicate(timeout=HANG_SECONDS)
        if number is signal.SIGINT:
            assert "KeyboardInterrupt" in said
            assert "releasing" in said
        if whose == "JVM":
            assert driver.returncode not in (0, None)
            assert "Error" in said
    finally:
        driver.kill()
        driver.communicate()
