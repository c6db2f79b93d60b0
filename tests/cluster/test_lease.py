"""The lease on a real cluster: what it waits for, that it never deadlocks, and how it lets go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.lease_request import demand_of
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.core.run_values import RunStatus
from hopsgpu.yarn.placement import preferred_hosts
from hopsgpu.yarn.resource_manager import ResourceManager
from tests.cluster.test_launch import quiet
from tests.conftest import gone, gpus_become, until
from tests.contention import start_script
from tests.in_ranks import executor_jvm, own_gpu, where, who_and_where
from tests.processes import python_workers

pytestmark = pytest.mark.usefixtures("nothing_warmed")


def state_of(run: hopsgpu.Run) -> str:
    return run.status().state


# Before asking.


@pytest.mark.parametrize(
    ("much", "words"),
    [
        ({"workers": 5}, "5 executors.*room for 4 .node. 2, node. 2.*at most 4"),
        ({"workers": 3, "placement": "spread"}, "3 executors.*node"),
        ({"workers": 3, "gpus_per_worker": 2}, "3 executors of 2 GPUs.*room for 2"),
        ({"workers": 4, "memory_per_worker": "12g"}, "room for 2"),
        ({"workers": 8, "gpus_per_worker": 0, "cores_per_worker": 2}, "8 executors of 0 GPUs"),
    ],
)
def test_what_can_never_fit_is_refused_before_anything_is_asked_for(
    spark: SparkSession,
    manager: ResourceManager,
    gpus_back: Callable[[], int],
    much: dict[str, object],
    words: str,
) -> None:
    application = application_of(spark)
    executors = application.jvm.executors(0)
    began = time.monotonic()
    with pytest.raises(hopsgpu.CapacityError, match=words):
        quiet(os.getpid, **much)
    # Who asks first waits for minutes.
    assert time.monotonic() - began < 30
    assert manager.gpus()[0] == 0
    # One of ETL may have idled for long enough by now.
    assert set(application.jvm.executors(0)) <= set(executors)


# While it waits.


def test_it_tells_what_it_waits_for_gives_up_in_time_and_can_be_cancelled(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    holding = hopsgpu.submit(time.sleep, args=(600,), workers=3, progress="off")
    assert until(lambda: state_of(holding) == "running", 120)
    run = hopsgpu.submit(os.getpid, workers=2, acquire_timeout="8s", progress="off")
    seen: list[RunStatus] = []
    while not run.wait(0.5):
        seen.append(run.status())
    with pytest.raises(hopsgpu.GangTimeout) as late:
        run.result()
    waited = [status for status in seen if status.state == "waiting" and status.waiting_for]
    assert len(waited) > 2
    said = waited[-1].waiting_for
    assert said == (
        "held by this application (3 GPUs); queue root.default has 1 of 4 GPUs left, 2 are needed"
    )
    assert (late.value.granted, late.value.wanted) == (0, 2)
    assert said in str(late.value)
    # It seemed not to fit, so nothing was asked for that others could have used.
    assert manager.gpus()[0] == 3

    # A wait without bound goes on telling, and can be cancelled.
    with hopsgpu.hold(workers=1, progress="off"):
        run = hopsgpu.submit(os.getpid, acquire_timeout=None, progress="off")
        full = "queue root.default is at its limit (4 of 4 GPUs in use)"
        assert until(lambda: full in run.status().waiting_for, 60)
        run.cancel()
        assert run.wait(30)
        assert state_of(run) == "cancelled"
    assert gpus_become(manager, 3)

    # So can what trains.
    assert state_of(holding) == "running"
    holding.cancel()
    with pytest.raises(hopsgpu.Cancelled):
        holding.result()
    assert state_of(holding) == "cancelled"
    assert gpus_become(manager, 0)


# Release.


def test_ctrl_c_gives_back_a_held_gang_and_the_end_of_the_script_what_its_runs_hold(
    cluster_env: dict[str, str], manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    script = """
        import sys, time, traceback
        import hopsgpu
        from hopsgpu.launcher import arguments
        arguments.likely_preloads = tuple  # imports nothing ahead
        hopsgpu.session("ends early")
        run = hopsgpu.submit(time.sleep, args=(600,), workers=2, progress="off")
        try:
            with hopsgpu.hold(workers=1, progress="off") as gang:
                while run.status().state != "running":
                    assert not run.wait(0.2)
                gang.launch(lambda: print("trains", flush=True) or time.sleep(600))
        except KeyboardInterrupt:
            traceback.print_exc()
        assert sys.stdin.readline()
        print("ends", run.status().state, flush=True)
    """
    ending = start_script(cluster_env, script)
    try:
        assert ending.stdout is not None
        assert any("trains" in line for line in ending.stdout)
        assert manager.gpus()[0] == 3
        ending.send_signal(signal.SIGINT)
        assert gpus_become(manager, 2, 30)
        out, error = ending.communicate("go on\n", timeout=120)
    finally:
        ending.kill()
        ending.communicate()
    assert "ends running" in out, error
    assert "KeyboardInterrupt" in error
    assert ending.returncode == 0
    assert gpus_become(manager, 0)


def test_without_a_line_and_the_direct_kill_it_works_and_the_result_says_so(
    cluster_env: dict[str, str], manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    """The idle timeout lets the executors go."""
    script = """
        import os
        import hopsgpu
        from hopsgpu.backends.spark.jvm import Jvm
        from py4j.protocol import Py4JError

        def kill(self, executors):
            raise Py4JError("Method killExecutors does not exist")

        Jvm.kill = kill
        hopsgpu.session("no kill", conf={"spark.dynamicAllocation.executorIdleTimeout": "4s"})
        result = hopsgpu.launch(os.getpid, workers=2, progress="off")
        print(result.warnings, result.timeline.released - result.timeline.returned)
    """
    alone = start_script(cluster_env, script, HOPSGPU_LOCKS="hdfs://127.0.0.1:1/none")
    out, error = alone.communicate(timeout=200)
    assert "did not join the queue" in out and "spark.hopsgpu.locks" in out, (out, error)
    assert "could not be killed" in out and "killExecutors does not exist" in out
    assert "idle timeout has released them" in out
    assert 3 < float(out.split()[-1]) < 60


# hold().


def test_a_held_gang_serves_several_launches_and_an_error_gives_it_back(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    with pytest.raises(ValueError, match="mine"), hopsgpu.hold(workers=2, progress="off") as gang:
        assert gpus_become(manager, 2)
        first = gang.launch(where, progress="off")
        second = gang.launch(where, progress="off", env_vars={"A": "b"})
        # The same agents: nothing was acquired in between.
        assert first.values == second.values
        assert first.timeline.released is None
        assert first.gpu_seconds.held >= first.gpu_seconds.training > 0
        with pytest.raises(hopsgpu.RankFailed, match="ZeroDivisionError"):
            gang.launch(lambda: 1 / 0, progress="off")
        assert gang.launch(where, progress="off").values == first.values
        with pytest.raises(hopsgpu.ConfigError, match="train_fn"):
            gang.launch(5)
        # Launches of several threads take turns.
        with ThreadPoolExecutor(3) as threads:
            values = list(
                threads.map(lambda n: gang.launch(abs, (n,), progress="off").values, (1, 2, 3))
            )
        assert values == [(1, 1), (2, 2), (3, 3)]
        assert gpus_become(manager, 2)
        raise ValueError("mine")
    assert gpus_become(manager, 0)
    with pytest.raises(hopsgpu.ConfigError, match="closed"):
        gang.launch(where)


def test_a_gang_that_is_not_entered_launches_nothing(spark: SparkSession) -> None:
    gang = hopsgpu.hold(workers=2, progress="off")
    with pytest.raises(hopsgpu.ConfigError, match="with hopsgpu.hold"):
        gang.launch(os.getpid)


def test_a_held_gang_asks_again_only_for_what_it_lost(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    with hopsgpu.hold(workers=3, progress="off") as gang:
        before = gang.launch(where, progress="off").values
        jvm = gang.launch(executor_jvm, progress="off").values[1]
        server = gang.launch(os.getppid, progress="off").values[1]
        os.kill(jvm, signal.SIGKILL)
        # With its container all goes that was forked there.
        assert until(lambda: gone(server), 60)
        after = gang.launch(where, progress="off").values
        assert len(set(before) & set(after)) == 2
        assert len(set(after)) == 3
        assert gpus_become(manager, 3)
    assert gpus_become(manager, 0)


def test_a_held_gang_that_idles_lets_go_and_comes_again(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    with hopsgpu.hold(workers=1, idle_timeout="3s", progress="off") as gang:
        assert gang.launch(where, progress="off").value
        assert gpus_become(manager, 0, 30)
        again = gang.launch(where, progress="off")
        assert again.value
        assert gpus_become(manager, 1)
    assert gpus_become(manager, 0)


STATES = ("requested", "waiting", "granted", "ready", "starting", "running")


@pytest.mark.parametrize(
    "state",
    [pytest.param(s, marks=pytest.mark.soak if s == "ready" else ()) for s in STATES[:-1]],
)
def test_cancel_at_any_state(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int], state: str
) -> None:
    run = hopsgpu.submit(time.sleep, args=(600,), workers=2, progress="off")
    # A short state may have passed when it is looked for; then it is cancelled at the next one.
    assert until(lambda: STATES.index(state_of(run)) >= STATES.index(state), 120, 0.002)
    run.cancel()
    with pytest.raises(hopsgpu.Cancelled):
        run.result()
    assert run.status().state == "cancelled"
    assert gpus_become(manager, 0)


# ETL beside it.


def test_etl_beside_a_launch_is_neither_refused_nor_run_twice(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    stop = threading.Event()
    rows = spark.sparkContext.accumulator(0)

    done: list[int] = []

    def etl() -> None:
        while not stop.is_set() or len(done) < 10:
            spark.sparkContext.parallelize(range(10), 2).foreach(rows.add)
            done.append(len(done))

    with ThreadPoolExecutor(1) as thread:
        jobs = thread.submit(etl)
        try:
            assert until(lambda: len(done) > 0, 120)
            before = len(done)
            assert len(quiet(time.sleep, args=(1,), workers=2).values) == 2
        finally:
            stop.set()
        jobs.result()
    assert len(done) > before
    assert rows.value == len(done) * sum(range(10))
    application = application_of(spark)
    assert application.setting("spark.dynamicAllocation.enabled") == "true"
    # The cores of idle ETL executors are wanted by the tests that follow.
    application.jvm.kill(application.jvm.executors(0))


def test_the_flip_ends_whatever_happens(spark: SparkSession) -> None:
    jvm = application_of(spark).jvm
    flag = "spark.dynamicAllocation.enabled"
    with pytest.raises(Py4JError), jvm.barriers_allowed():
        assert jvm.setting(flag) == "false"
        raise Py4JError("the submission failed")
    assert jvm.setting(flag) == "true"
    inside, going = threading.Event(), threading.Event()

    def flip() -> None:
        with jvm.barriers_allowed():
            inside.set()
            going.wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(flip)
        assert inside.wait(60)
        inside.clear()
        second = threads.submit(flip)
        # Serialised: a second flip never takes the first one's value for the user's.
        assert not inside.wait(0.3)
        going.set()
        first.result()
        second.result()
    assert jvm.setting(flag) == "true"
    assert isinstance(jvm, Jvm)


# Placement, CPU gangs, memory.


def test_pack_puts_as_many_ranks_into_a_container_as_fit(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    plan = hopsgpu.plan(who_and_where, workers=4, placement="pack")
    assert (plan.executors, plan.ranks_per_executor, plan.shape.gpus) == (2, 2, 2)
    result = quiet(who_and_where, workers=4, placement="pack")
    assert [value[1:4] for value in result.values] == [
        ("0", "0", "2"),
        ("0", "1", "2"),
        ("1", "0", "2"),
        ("1", "1", "2"),
    ]
    assert [value[0] for value in result.values] == ["node1", "node1", "node2", "node2"]
    # LOCAL_RANK is the index of a rank's own GPU among those it sees.
    for value, report in zip(result.values, result.ranks, strict=True):
        assert value[4].split(",")[int(value[2])] == report.gpus[0]
    assert len({gpu for report in result.ranks for gpu in report.gpus}) == 4


def test_pack_of_a_number_that_does_not_divide_says_so(spark: SparkSession) -> None:
    plan = hopsgpu.plan(who_and_where, workers=3, placement="pack")
    assert (plan.executors, plan.ranks_per_executor) == (3, 1)
    assert "at most 1 of the 3 ranks fit in one container" in plan.warnings[0]


def test_pack_prefers_the_fullest_node_that_fits(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    """What is asked of YARN; where it then puts the container is its own choice."""
    application = application_of(spark)
    plan = hopsgpu.plan(who_and_where, workers=1, placement="pack")
    with hopsgpu.hold(workers=1, progress="off") as gang:
        taken = gang.launch(who_and_where, progress="off").value[0]
        demand = demand_of(plan.shape, plan.executors, "pack")
        assert preferred_hosts(demand, application.snapshot(0.0)) == (taken,)
        assert quiet(who_and_where, workers=1, placement="pack").value[0] in ("node1", "node2")


def test_spread_puts_one_rank_on_each_node(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    result = quiet(who_and_where, workers=2, placement="spread")
    assert {value[0] for value in result.values} == {"node1", "node2"}


def test_a_rank_has_two_gpus_and_spread_waits_for_nodes_and_gives_up_in_time(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int]
) -> None:
    with hopsgpu.hold(workers=1, gpus_per_worker=2, progress="off") as gang:
        assert len(gang.launch(own_gpu, progress="off").value) == 2
        with pytest.raises(hopsgpu.GangTimeout, match="1 of 2 nodes"):
            quiet(who_and_where, workers=2, placement="spread", acquire_timeout="5s")
        assert gpus_become(manager, 2)


def test_a_gang_on_cpus_takes_no_gpu(
    spark: SparkSession, manager: ResourceManager, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    def seen(go: Path) -> tuple[str, str, str, str, str]:
        while not go.exists():
            threading.Event().wait(0.05)  # nobody tells
        return who_and_where()

    go = tmp_path / "go"
    run = hopsgpu.submit(seen, args=(go,), workers=2, gpus_per_worker=0, progress="off")
    try:
        assert until(lambda: state_of(run) == "running", 120)
        assert manager.gpus()[0] == 0
    finally:
        go.touch()
    result = run.result()
    assert [value[4] for value in result.values] == ["", ""]
    assert result.timeline.released is not None
    assert result.gpu_seconds.held == 0


def test_a_rank_over_its_memory_is_the_failure_with_numbers(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    def hog() -> None:
        if hopsgpu.context().rank == 1:
            kept = bytearray(400 * 2**20)
            assert kept
        time.sleep(600)

    with pytest.raises(hopsgpu.RankFailed) as failed:
        quiet(hog, workers=2, memory_per_worker="256m", placement="pack")
    assert failed.value.rank == 1
    assert failed.value.signal == "SIGKILL"
    assert "exceeded its memory limit" in str(failed.value)
    assert "of 256 MiB (the limit is memory_per_worker" in str(failed.value)
    assert failed.value.result.ranks[0].stopped


def test_a_container_that_yarn_killed_is_reported_in_yarns_words(
    spark: SparkSession, gpus_back: Callable[[], int], cluster_dir: Path
) -> None:
    def behind_its_back() -> None:
        # The agent, which would have seen it.
        os.kill(max(python_workers(cluster_dir))[1], signal.SIGSTOP)
        kept = bytearray(3 * 2**30)
        time.sleep(600)
        assert kept

    with pytest.raises(hopsgpu.RankFailed, match=r"(?i)physical memory") as failed:
        quiet(behind_its_back, memory_per_worker="256m")
    assert "was lost" in str(failed.value)
    assert failed.value.container in str(failed.value)
