"""Whatever is frozen (SIGSTOP, a suspended laptop): driver, agent, executor."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until
from tests.contention import start_script
from tests.in_ranks import executor_jvm
from tests.processes import family, pids_in, python_workers, signal_all


def test_a_frozen_agent_is_lost_within_the_heartbeat(
    spark: SparkSession,
    cluster_dir: Path,
    gpus_back: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOPSGPU_HEARTBEAT", "10s")

    def wait_for_the_end(directory: str) -> None:
        Path(directory, "pid").write_text(str(os.getpid()))
        threading.Event().wait(HANG_SECONDS)

    run = hopsgpu.submit(wait_for_the_end, args=(str(tmp_path),), progress="off")
    assert until(lambda: (tmp_path / "pid").exists() and python_workers(cluster_dir) != [])
    agent = max(python_workers(cluster_dir))[1]
    os.kill(agent, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(hopsgpu.RankFailed, match="no heartbeat for 10 s"):
            run.result()
    finally:
        if not gone(agent):
            os.kill(agent, signal.SIGCONT)
    print(f"given up {time.monotonic() - began:.1f} s after the agent froze")
    assert until(lambda: gone(int((tmp_path / "pid").read_text())))


WAITING = """
    import os, sys, threading
    from pathlib import Path
    import hopsgpu

    def train(directory):
        Path(directory, str(hopsgpu.context().rank)).write_text(str(os.getpid()))
        threading.Event().wait(120)

    hopsgpu.session("frozen")
    hopsgpu.launch(train, args=(sys.argv[1],), workers=2, progress="off")
"""


def test_ranks_of_a_frozen_driver_end_within_the_heartbeat(
    cluster_env: dict[str, str], gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    driver = start_script(cluster_env, WAITING, tmp_path, HOPSGPU_HEARTBEAT="10s")
    try:
        pids = pids_in(tmp_path, 2)
        signal_all(driver.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert until(lambda: all(map(gone, pids)))
        print(f"the ranks ended {time.monotonic() - began:.1f} s after the driver froze")
        signal_all(driver.pid, signal.SIGCONT)
        _, error = driver.communicate(timeout=HANG_SECONDS)
        assert "RankFailed: the executor of rank" in error
    finally:
        if driver.poll() is None:
            signal_all(driver.pid, signal.SIGCONT)
        driver.kill()
        driver.communicate()


def test_a_frozen_executor_is_replaced_in_the_next_attempt(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOPSGPU_HEARTBEAT", "10s")
    note = tmp_path / "frozen"

    def freeze_once() -> int:
        context = hopsgpu.context()
        if context.attempt == 0:
            if context.rank == 1:
                processes = family(executor_jvm())
                note.write_text(" ".join(map(str, processes)))
                # This process is one of them.
                for process in sorted(processes, key=os.getpid().__eq__):
                    # One of them may have ended by itself since.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGSTOP)
            threading.Event().wait(HANG_SECONDS)
        return context.attempt

    began = time.monotonic()
    try:
        result = hopsgpu.launch(freeze_once, workers=2, retries=1, progress="off")
    finally:
        frozen = [int(process) for process in note.read_text().split()]
        for process in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
    assert result.values == (1, 1)
    (warning,) = result.warnings
    assert "no heartbeat for 10 s" in warning
    # Spark misses the executor's heartbeat after 200 s.
    assert time.monotonic() - began < HANG_SECONDS
    # JVM, daemon, agent, process daemon, fork server and rank: YARN has killed the first.
    assert len(frozen) >= 6 and until(lambda: all(map(gone, frozen)))
