"""The lease on a real cluster: what it waits for, that it never deadlocks, and how it lets go."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.gang_request import demand_of
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.placement import preferred_hosts
from hopsgpu.core import queue_policy
from hopsgpu.core.run_values import RunStatus
from hopsgpu.launcher import arguments
from tests.bounds import HANG_SECONDS
from tests.cluster.test_launch import quiet
from tests.conftest import executors_of, gone, gpus_become, until
from tests.contention import start_script
from tests.in_ranks import container_and_jvm, container_and_server, own_gpu, where, who_and_where
from tests.processes import outer_pid, python_workers

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
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    much: dict[str, object],
    words: str,
) -> None:
    application = application_of(spark)
    executors = application.jvm.registered_executors(0)
    began = time.monotonic()
    with pytest.raises(hopsgpu.CapacityError, match=words):
        quiet(os.getpid, **much)
    # Who asks first waits for minutes.
    assert time.monotonic() - began < 30
    assert manager.gpus()[0] == 0
    # One of ETL may have idled for long enough by now.
    assert set(application.jvm.registered_executors(0)) <= set(executors)


# While it waits.


def test_it_tells_what_it_waits_for_gives_up_in_time_and_can_be_cancelled(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    two = {"workers": 1, "gpus_per_worker": 2, "progress": "off"}
    holding = hopsgpu.submit(time.sleep, args=(600,), **two)
    assert until(lambda: state_of(holding) == "running")
    run = hopsgpu.submit(os.getpid, workers=3, acquire_timeout="4s", progress="off")
    seen: list[RunStatus] = []
    while not run.wait(0.2):
        seen.append(run.status())
    with pytest.raises(hopsgpu.GangTimeout) as late:
        run.result()
    waited = [status for status in seen if status.state == "waiting" and status.waiting_for]
    assert len(waited) > 2
    said = waited[-1].waiting_for
    assert said == ("Needs 3 GPUs, 2 are free; this application uses 2 GPUs")
    assert waited[-1].waiting_details[0] == "used by this application (2 GPUs)"
    assert (late.value.granted, late.value.wanted) == (0, 3)
    assert said in str(late.value)
    # It seemed not to fit, so nothing was asked for that others could have used.
    assert manager.gpus()[0] == 2

    # A wait without bound goes on telling, and can be cancelled.
    with hopsgpu.hold(**two):
        run = hopsgpu.submit(os.getpid, acquire_timeout=None, progress="off")
        full = "Needs 1 GPU, 0 are free"
        assert until(lambda: full in run.status().waiting_for)
        run.cancel()
        assert run.wait(HANG_SECONDS)
        assert state_of(run) == "cancelled"
    assert gpus_become(manager, 2)

    # So can what trains.
    assert state_of(holding) == "running"
    holding.cancel()
    with pytest.raises(hopsgpu.Cancelled):
        holding.result()
    assert state_of(holding) == "cancelled"
    assert gpus_become(manager, 0)


HOLDER = """
    import sys
    import hopsgpu

    hopsgpu.session("holder")
    with hopsgpu.hold(workers=1, gpus_per_worker=2, progress="off"):
        print("holds", flush=True)
        sys.stdin.readline()
"""


def test_a_gang_that_does_not_fit_asks_for_nothing_and_names_who_has_the_rest(
    cluster_env: dict[str, str],
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """YARN does not preempt here: what is free stays free for gangs that it suffices for."""
    # Where asking could help, the gang would ask several times within its time limit.
    monkeypatch.setattr(queue_policy, "_PROBE_SECONDS", 0.5)
    caplog.set_level(logging.INFO, "hopsgpu")
    holder = start_script(cluster_env, HOLDER)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        run = hopsgpu.submit(os.getpid, workers=4, acquire_timeout="10s", progress="off")
        in_use = set()
        while not run.wait(0.2):
            in_use.add(manager.gpus()[0])
        with pytest.raises(hopsgpu.GangTimeout, match=r"'holder' of .*2 GPUs") as late:
            run.result()
        assert late.value.granted == 0
        assert in_use == {2}
        assert "joins the queue of gangs" in caplog.text
        assert "took the turn" not in caplog.text
        # Nor does the gang keep others from what is free.
        assert len(quiet(os.getpid, workers=2).values) == 2
    finally:
        holder.kill()
        holder.wait()


# Release.


def test_ctrl_c_gives_back_a_held_gang_and_the_end_of_the_script_what_its_runs_hold(
    cluster_env: dict[str, str], manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    """Meanwhile it is told to another application that waits who holds them."""
    script = """
        import sys, time, traceback
        import hopsgpu
        from hopsgpu.launcher import arguments
        arguments.likely_imports = tuple  # imports nothing ahead
        hopsgpu.session("ends early")
        run = hopsgpu.submit(time.sleep, args=(600,), gpus_per_worker=2, progress="off")
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
        waiting = hopsgpu.submit(os.getpid, workers=2, acquire_timeout=None, progress="off")
        assert until(lambda: "'ends early' of" in waiting.status().waiting_for)
        waiting.cancel()
        assert waiting.wait(HANG_SECONDS)
        ending.send_signal(signal.SIGINT)
        assert gpus_become(manager, 2, HANG_SECONDS)
        out, error = ending.communicate("go on\n", timeout=HANG_SECONDS)
    finally:
        ending.kill()
        ending.communicate()
    assert "ends running" in out, error
    assert "KeyboardInterrupt" in error
    assert ending.returncode == 0
    assert gpus_become(manager, 0)


@pytest.mark.soak
def test_without_a_line_and_the_direct_kill_it_works_and_the_result_says_so(
    cluster_env: dict[str, str], manager: ClusterManager, gpus_back: Callable[[], int]
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
        result = hopsgpu.launch(os.getpid, progress="off")
        print(result.warnings, result.timeline.released - result.timeline.returned)
    """
    alone = start_script(cluster_env, script, HOPSGPU_LOCKS="hdfs://127.0.0.1:1/none")
    out, error = alone.communicate(timeout=HANG_SECONDS)
    assert "did not join the queue" in out and "spark.hopsgpu.locks" in out, (out, error)
    assert "could not be killed" in out and "killExecutors does not exist" in out
    assert "idle timeout has released them" in out
    assert 3 < float(out.split()[-1]) < 60


# hold().


def test_a_held_gang_serves_launches_asks_again_for_what_it_lost_and_an_error_gives_it_back(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    with pytest.raises(ValueError, match="mine"), hopsgpu.hold(workers=3, progress="off") as gang:
        assert gpus_become(manager, 3)
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
        assert values == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
        assert gpus_become(manager, 3)

        jvm = outer_pid(*gang.launch(container_and_jvm, progress="off").values[1])
        server = outer_pid(*gang.launch(container_and_server, progress="off").values[1])
        os.kill(jvm, signal.SIGKILL)
        # With its container all goes that was forked there.
        assert until(lambda: gone(server))
        after = gang.launch(where, progress="off").values
        # Only what was lost is asked for again.
        assert len(set(first.values) & set(after)) == 2
        assert len(set(after)) == 3
        assert gpus_become(manager, 3)
        processes = [
            outer_pid(*value) for value in gang.launch(container_and_jvm, progress="off").values
        ]
        application_of(spark).jvm.shut_down(executors_of(spark))
        assert all(until(lambda jvm=jvm: gone(jvm)) for jvm in processes)
        raise ValueError("mine")
    assert gpus_become(manager, 0)
    with pytest.raises(hopsgpu.ConfigError, match="closed"):
        gang.launch(where)


def test_a_gang_that_is_not_entered_launches_nothing(spark: SparkSession) -> None:
    gang = hopsgpu.hold(workers=2, progress="off")
    with pytest.raises(hopsgpu.ConfigError, match="with hopsgpu.hold"):
        gang.launch(os.getpid)


def test_a_held_gang_that_idles_lets_go_and_comes_again(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    with hopsgpu.hold(workers=1, idle_timeout="3s", progress="off") as gang:
        assert gang.launch(where, progress="off").value
        assert gpus_become(manager, 0, HANG_SECONDS)
        again = gang.launch(where, progress="off")
        assert again.value
        assert gpus_become(manager, 1)
    assert gpus_become(manager, 0)


STATES = ("requested", "waiting", "granted", "ready", "starting", "running")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(s, marks=pytest.mark.soak if s in ("granted", "ready") else ())
        for s in STATES[:-1]
    ],
)
def test_cancel_at_any_state(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int], state: str
) -> None:
    run = hopsgpu.submit(time.sleep, args=(600,), workers=2, placement="pack", progress="off")
    # A short state may have passed when it is looked for; then it is cancelled at the next one.
    assert until(lambda: STATES.index(state_of(run)) >= STATES.index(state), step=0.002)
    run.cancel()
    with pytest.raises(hopsgpu.Cancelled):
        run.result()
    assert run.status().state == "cancelled"
    assert gpus_become(manager, 0)


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
            going.wait(HANG_SECONDS)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(flip)
        assert inside.wait(HANG_SECONDS)
        inside.clear()
        second = threads.submit(flip)
        # Serialised: a second flip never takes the first one's value for the user's.
        assert not inside.wait(0.3)
        going.set()
        first.result()
        second.result()
    assert jvm.setting(flag) == "true"
    assert isinstance(jvm, Jvm)


# Spark's scheduler handles one event at a time. Here it waits for an accumulator of the user's when
# the gang's barrier job is submitted, as it would work on a large job.
BUSY_SCHEDULER = """
    import sys, threading
    import hopsgpu
    from hopsgpu.backends.spark import gang_allocator
    from hopsgpu.launcher import arguments
    from pyspark import AccumulatorParam, InheritableThread, TaskContext

    arguments.likely_imports = tuple  # imports nothing ahead
    busy_seconds, *bound = map(float, sys.argv[1:])
    if bound:
        gang_allocator.FLIP_SECONDS = bound[0]
    busy, over = threading.Event(), threading.Event()

    class Slow(AccumulatorParam):
        def zero(self, value):
            return 0

        def addInPlace(self, one, other):
            if TaskContext.get() is None and other == 7:
                # By name: executors get a copy of this class, and locks cannot be pickled.
                main = sys.modules["__main__"]
                main.busy.set()
                main.over.wait(900)
            return one + other

    context = hopsgpu.session("busy scheduler").sparkContext
    slow = context.accumulator(0, Slow())
    submitted = []
    start = gang_allocator.SparkGangAllocator._start

    def start_when_busy(owner, role, *more):
        if role == "agents":
            if not submitted:
                job = lambda: context.parallelize([7], 1).foreach(lambda n: slow.add(n))
                InheritableThread(target=job, daemon=True).start()
                assert busy.wait(100)
                threading.Timer(busy_seconds, over.set).start()
            submitted.append(role)
        return start(owner, role, *more)

    gang_allocator.SparkGangAllocator._start = start_when_busy
    result = hopsgpu.launch(lambda: 5, workers=1, progress="off")
    print("launched", result.values[0], "after", len(submitted), "barrier jobs", flush=True)
"""


@pytest.mark.parametrize(
    ("seconds", "jobs"),
    [((3,), 1), pytest.param((3, 0.5), 2, marks=pytest.mark.soak)],
)
def test_a_scheduler_that_is_busy_delays_the_gang_and_refuses_nothing(
    cluster_env: dict[str, str],
    manager: ClusterManager,
    seconds: tuple[float, ...],
    jobs: int,
) -> None:
    """Only one that answers after the bound has the gang submitted again, without a stack."""
    script = start_script(cluster_env, BUSY_SCHEDULER, *seconds)
    try:
        out, error = script.communicate(timeout=HANG_SECONDS)
    finally:
        script.kill()
        script.communicate()
    assert f"launched 5 after {jobs} barrier jobs" in out, error
    assert "SPARK-24942" not in error
    assert "Creating new stage failed" not in error
    assert gpus_become(manager, 0)


# Placement, memory.


def test_pack_of_a_number_that_does_not_divide_says_so(spark: SparkSession) -> None:
    plan = hopsgpu.plan(who_and_where, workers=3, placement="pack")
    assert (plan.executors, plan.ranks_per_executor) == (3, 1)
    assert "at most 1 of the 3 ranks fit in one container" in plan.warnings[0]


def test_pack_prefers_the_fullest_node_that_fits(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    """What is asked of YARN; where it then puts the container is its own choice."""
    application = application_of(spark)
    plan = hopsgpu.plan(who_and_where, workers=1, placement="pack")
    with hopsgpu.hold(workers=1, progress="off") as gang:
        taken = gang.launch(who_and_where, progress="off").value[0]
        demand = demand_of(plan.shape, plan.executors, "pack")
        assert preferred_hosts(demand, application.snapshot(0.0)) == (taken,)


def test_a_rank_has_two_gpus_and_spread_waits_for_nodes_and_gives_up_in_time(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    with hopsgpu.hold(workers=1, gpus_per_worker=2, progress="off") as gang:
        assert len(gang.launch(own_gpu, progress="off").value) == 2
        with pytest.raises(hopsgpu.GangTimeout, match="2 nodes with room"):
            quiet(who_and_where, workers=2, placement="spread", acquire_timeout="3s")
        assert gpus_become(manager, 2)


@pytest.fixture(scope="module")
def packed(spark: SparkSession, manager: ClusterManager) -> Iterator[hopsgpu.Gang]:
    """Two ranks in each of two containers, with all GPUs: for the tests below, which come last."""
    before = manager.gpus()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "likely_imports", tuple)
        held = hopsgpu.hold(workers=4, placement="pack", memory_per_worker="256m", progress="off")
    with held:
        yield held
    assert gpus_become(manager, before), manager.gpus()


def test_pack_puts_as_many_ranks_into_a_container_as_fit(packed: hopsgpu.Gang) -> None:
    plan = hopsgpu.plan(who_and_where, workers=4, placement="pack")
    assert (plan.executors, plan.ranks_per_executor, plan.shape.gpus) == (2, 2, 2)
    result = packed.launch(who_and_where, progress="off")
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


def test_a_rank_over_its_memory_is_the_failure_with_numbers(packed: hopsgpu.Gang) -> None:
    def hog() -> None:
        if hopsgpu.context().rank == 1:
            kept = bytearray(400 * 2**20)
            assert kept
        time.sleep(600)

    with pytest.raises(hopsgpu.RankFailed) as failed:
        packed.launch(hog, progress="off")
    assert failed.value.rank == 1
    assert failed.value.signal == "SIGKILL"
    assert "exceeded its memory limit" in str(failed.value)
    assert "of 256 MiB (the limit is memory_per_worker" in str(failed.value)
    assert failed.value.result.ranks[0].stopped


def test_a_gang_that_the_rest_cannot_hold_is_not_tried_again(packed: hopsgpu.Gang) -> None:
    def breaks() -> None:
        if hopsgpu.context().rank == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    with pytest.raises(hopsgpu.RankFailed, match="uncorrectable ECC") as raised:
        packed.launch(breaks, retries=1, progress="off")
    (note,) = raised.value.__notes__
    assert "not retried without GPU-" in note and "can never fit" in note


@pytest.mark.yarn
def test_a_container_that_yarn_killed_is_reported_in_yarns_words(
    packed: hopsgpu.Gang, cluster_dir: Path
) -> None:
    def behind_its_back() -> None:
        if hopsgpu.context().rank == 0:
            # The agent, which would have seen it.
            agent = max(python_workers(cluster_dir, os.environ["CONTAINER_ID"]))[1]
            os.kill(agent, signal.SIGSTOP)
            kept = bytearray(3 * 2**30)
            assert kept
        time.sleep(600)

    with pytest.raises(hopsgpu.RankFailed, match=r"(?i)physical memory") as failed:
        packed.launch(behind_its_back, progress="off")
    assert "was lost" in str(failed.value)
    assert failed.value.container in str(failed.value)
