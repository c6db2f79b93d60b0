"""Repetitions and violent ends, on a cluster of their own."""

from __future__ import annotations

import contextlib
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
from hopsgpu.discovery import leases
from hopsgpu.spark.application import Application, application_of
from hopsgpu.yarn.resource_manager import ResourceManager
from tests.conftest import gone, gpus_become, until

LAUNCHES, THREADS = 21, 3
WAYS = ("returns", "raises", "exits", "killed", "cancelled", "held")


def misbehave(how: str) -> str:
    if hopsgpu.context().rank == 0:
        if how == "raises":
            raise ValueError(how)
        if how == "exits":
            os._exit(9)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    if how not in ("returns", "held"):
        time.sleep(120)
    return how


def launch_once(how: str, workers: int, wait: float) -> None:
    """One launch that ends as it is meant to; fails the test where it does not."""
    arguments = {"args": (how,), "workers": workers, "progress": "off", "acquire_timeout": "15m"}
    if how == "returns":
        assert hopsgpu.launch(misbehave, **arguments).values == (how,) * workers
    elif how == "held":
        with hopsgpu.hold(workers=workers, progress="off", acquire_timeout="15m") as gang:
            for _ in range(3):
                assert gang.launch(misbehave, (how,), progress="off").values == (how,) * workers
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


@pytest.mark.timeout(1800)
def test_many_launches_with_failures_leave_nothing(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    chance = random.Random(7)
    launches = [
        (chance.choice(WAYS), chance.randint(1, 4), chance.uniform(0, 15)) for _ in range(LAUNCHES)
    ]
    assert {how for how, _, _ in launches} == set(WAYS)
    quiet = [thread.name for thread in threading.enumerate()]
    files = len(list(Path("/proc/self/fd").iterdir()))
    application = application_of(spark)
    temporary = temporary_files()
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(launch_once, *launch) for launch in launches]:
            done.result()
    assert manager.gpus()[0] == 0
    # Whoever asks for ETL only has profile 0; there was none of it. Spark strikes an executor off
    # when its connection has ended, which comes after YARN's word that its container is free.
    assert until(lambda: not every_executor(application), 60), every_executor(application)
    left = [thread.name for thread in threading.enumerate() if thread.name not in quiet]
    assert not [name for name in left if name.startswith("hopsgpu")]
    # py4j keeps a connection for each thread that has called it; a leak of ours would be some for
    # each launch.
    assert len(list(Path("/proc/self/fd").iterdir())) < files + LAUNCHES
    assert not ranks_alive()
    assert temporary_files() == temporary
    # Of the line only the last turn is left.
    assert [name.partition("-")[0] for name in application.line.names()] == ["turn"]


def every_executor(application: Application) -> list[str]:
    """Ids of all executors that Spark knows, of whatever profile."""
    return [e for profile in range(100) for e in application.jvm.executors(profile)]


def temporary_files() -> set[Path]:
    """What hopsgpu has left on this machine, but for the nodes' leases, which are to stay."""
    return set(Path(tempfile.gettempdir()).glob("hopsgpu*")) - {leases.DIRECTORY}


def ranks_alive() -> list[str]:
    """Command lines of ranks on this machine, which is all nodes."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [line] if "hopsgpu.worker.rank" in line else []
    return found


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
    [(signal.SIGINT, "Python"), (signal.SIGKILL, "Python"), (signal.SIGKILL, "JVM")],
)
def test_a_driver_that_is_ended_gives_its_gpus_back(
    cluster_env: dict[str, str],
    manager: ResourceManager,
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
        assert until(lambda: len(rank_pids(pids)) == 2, 120)
        assert gpus_become(manager, 2)
        os.kill(driver.pid if whose == "Python" else child_of(driver.pid), number)
        began = time.monotonic()
        assert gpus_become(manager, 0, seconds=15)
        seconds = time.monotonic() - began
        print(f"{number.name} to the driver's {whose}: GPUs free {seconds:.1f} s later")
        assert until(lambda: all(map(gone, rank_pids(pids))), 15)
        _, said = driver.communicate(timeout=60)
        if number is signal.SIGINT:
            assert "KeyboardInterrupt" in said
            assert "releasing" in said
        if whose == "JVM":
            assert driver.returncode not in (0, None)
            assert "Error" in said
    finally:
        driver.kill()
        driver.communicate()
