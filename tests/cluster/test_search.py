"""search() on a real cluster: it starts small, grows, shrinks, and loses nothing by failures."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_record import parse
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.contention import start_script
from tests.in_ranks import executor_jvm

X = {"x": optuna.distributions.FloatDistribution(-10.0, 10.0)}
quiet = functools.partial(hopsgpu.search, cores_per_worker=1, memory_per_worker="1g")


class Watched:
    """What a search has shown, from its thread."""

    def __init__(self) -> None:
        self.all: list[hopsgpu.types.SearchStatus] = []

    def __call__(self, status: hopsgpu.types.SearchStatus) -> None:
        self.all.append(status)

    @property
    def last(self) -> hopsgpu.types.SearchStatus:
        return self.all[-1]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def body() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - asserted on by the test
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, found


def waits_for_a_word(directory: str, x: float) -> float:
    trial = hopsgpu.context().trial
    assert trial is not None
    while not Path(directory, f"go-{trial.number}").exists():
        time.sleep(0.05)
    return x


def test_starts_on_the_first_gpu_grows_with_the_others_and_shrinks_at_its_tail(
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    nothing_warmed: None,
    tmp_path: Path,
) -> None:
    watched = Watched()
    with hopsgpu.hold(workers=3, cores_per_worker=1, progress="off"):
        thread, found = in_thread(
            lambda: quiet(
                waits_for_a_word,
                X,
                trials=6,
                max_concurrent=4,
                kwargs={"directory": str(tmp_path)},
                seed=1,
                progress=watched,
            )
        )
        assert until(lambda: bool(watched.all) and len(watched.last.running) == 1)
        assert manager.gpus()[0] == 4
        assert watched.last.executors == 1
        held = "this application uses"
        assert until(lambda: held in watched.last.waiting_for), watched.last
    assert until(lambda: len(watched.last.running) == 4), watched.last
    assert len({trial.gpu for trial in watched.last.running}) == 4
    for number in range(5):
        (tmp_path / f"go-{number}").touch()
    # The last trial still runs, on the one GPU that is left.
    assert gpus_become(manager, 1, HANG_SECONDS), watched.last
    assert [trial.number for trial in watched.last.running] == [5]
    (tmp_path / "go-5").touch()
    thread.join(HANG_SECONDS)
    (result,) = found
    assert isinstance(result, hopsgpu.types.SearchResult), result
    assert [trial.state for trial in result.trials] == ["complete"] * 6
    assert result.best is not None
    assert result.best.value == min(trial.value for trial in result.trials if trial.value)
    assert result.timeline.released is not None
    assert 0 < result.gpu_seconds.training <= result.gpu_seconds.held
    assert gpus_become(manager, 0)


def ends_badly(directory: str, x: float) -> float:
    """Raises, kills itself or kills its executor, once, by the trial's number."""
    trial = hopsgpu.context().trial
    assert trial is not None
    print("x is", x)
    if trial.number == 1:
        raise ValueError("this one has had enough")
    if trial.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = Path(directory, "lost")
    if trial.number == 3 and not lost.exists():
        lost.touch()
        os.kill(executor_jvm(), signal.SIGKILL)
        time.sleep(HANG_SECONDS)
    return x


def test_failed_trials_and_a_lost_executor_take_no_others_with_them(
    spark: SparkSession, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    result = quiet(
        ends_badly,
        X,
        trials=8,
        max_concurrent=2,
        kwargs={"directory": str(tmp_path)},
        progress="off",
    )
    states = {trial.number: trial.state for trial in result.trials}
    assert states == {n: "failed" if n in (1, 2) else "complete" for n in range(8)}
    one, two, three = result.trials[1:4]
    assert "ValueError: this one has had enough" in one.error
    assert 'in ends_badly\n    raise ValueError("this one' in one.error
    assert "SIGKILL" in two.error
    assert three.tries == 2
    record = parse((LakePath(hdfs_run(spark, result.run_id)) / "run.json").read())
    assert record.search is not None
    trials = record.search.trials
    assert [trial.number for trial in trials] == list(range(8))
    assert trials[1].error == one.error and trials[4].gpu and trials[4].value is not None
    log = LakePath(result.trials[4].log) / "rank-0.log"
    assert log.read().decode().startswith("x is")


def hdfs_run(spark: SparkSession, run_id: str) -> str:
    return f"{application_of(spark).root}/runs/{run_id}"


def always_fails(x: float) -> float:
    raise ValueError(f"no {x}")


@pytest.mark.soak
def test_too_many_failures_end_the_search(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    with pytest.raises(hopsgpu.HopsGpuError, match=r"(?s)max_failures=1.*ValueError: no") as failed:
        quiet(always_fails, X, trials=20, max_concurrent=1, max_failures=1, progress="off")
    result = failed.value.result
    assert isinstance(result, hopsgpu.types.SearchResult)
    assert [trial.state for trial in result.trials][:2] == ["failed", "failed"]
    assert result.best is None


def test_a_search_that_ends_while_it_asks_leaves_nothing(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        raise KeyError("no such space")

    with pytest.raises(hopsgpu.HopsGpuError, match="Optuna failed: KeyError") as failed:
        hopsgpu.search(float, space, trials=4, max_concurrent=4, progress="off")
    assert failed.value.result.timeline.released is not None


def improves(x: float) -> float:
    context = hopsgpu.context()
    loss = abs(x)
    for step in range(200):
        context.report(step, loss=loss)
        if context.should_prune():
            return loss
        time.sleep(0.05)
        if loss < 3 and step > 4:
            break
    return loss


def search_with(pruner: optuna.pruners.BasePruner) -> hopsgpu.types.SearchResult:
    values = [1, 8, 9, 2, 7, 10]
    space = {"x": optuna.distributions.CategoricalDistribution(values)}
    sampler = optuna.samplers.GridSampler({"x": values}, seed=3)
    options: Any = {"sampler": sampler, "pruner": pruner, "progress": "off"}
    return quiet(improves, space, trials=6, max_concurrent=1, **options)


@pytest.mark.soak
def test_bad_trials_are_pruned_and_their_gpu_serves_the_next(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    result = search_with(optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=2))
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned
    assert all(trial.value is not None and abs(trial.params["x"]) > 3 for trial in pruned)
    # None ran for its 10 seconds but perhaps the first.
    assert all(trial.duration is not None and trial.duration < 6 for trial in pruned)
    assert result.study.trials[pruned[0].number].state is optuna.trial.TrialState.PRUNED


@pytest.mark.soak
@pytest.mark.parametrize(
    "pruner",
    [
        optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=2),
        # Of one bracket: in which a trial is goes by chance.
        optuna.pruners.HyperbandPruner(min_resource=2, max_resource=5, reduction_factor=3),
    ],
    ids=["asha", "hyperband"],
)
def test_optunas_other_pruners_end_trials_early(
    spark: SparkSession, gpus_back: Callable[[], int], pruner: optuna.pruners.BasePruner
) -> None:
    result = search_with(pruner)
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned and result.best is not None and result.best.value == 1
    assert {trial.state for trial in result.trials} == {"complete", "pruned"}
    # By the second report, where each alone has no one to be compared with.
    assert all(trial.step is not None and 1 <= trial.step <= 40 for trial in pruned)
    assert all(trial.duration is not None and trial.duration < 6 for trial in pruned)


def where_it_runs(x: float) -> dict[str, float]:
    context = hopsgpu.context()
    began = time.time()
    time.sleep(1.0)
    return {
        "loss": x,
        "began": began,
        "ended": time.time(),
        "world": context.world_size,
        "share": float(os.environ.get("HOPSGPU_MEMORY_SHARE", "1")),
    }


@pytest.mark.soak
def test_trials_share_a_gpu_and_others_are_gangs(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    """Two searches at a time: trials that share GPUs, and trials of two ranks each."""
    searching = functools.partial(quiet, where_it_runs, X, metric="loss", progress="off")
    thread, found = in_thread(
        lambda: searching(trials=6, max_concurrent=4, gpus_per_trial=0.5, name=None)
    )
    gangs = searching(trials=2, max_concurrent=1, workers_per_trial=2)
    thread.join(HANG_SECONDS)
    (shared,) = found
    assert isinstance(shared, hopsgpu.types.SearchResult), shared
    assert {trial.metrics["share"] for trial in shared.trials} == {0.5}
    assert {trial.metrics["world"] for trial in gangs.trials} == {2.0}
    assert all(len(trial.gpu.split(",")) == 2 for trial in gangs.trials)
    by_gpu: dict[str, list[hopsgpu.types.TrialReport]] = {}
    for trial in shared.trials:
        assert trial.state == "complete", trial.error
        by_gpu.setdefault(trial.gpu, []).append(trial)
    assert len(by_gpu) <= 2
    assert any(
        one.metrics["began"] < other.metrics["ended"]
        and other.metrics["began"] < one.metrics["ended"]
        for trials in by_gpu.values()
        for one in trials
        for other in trials
        if one is not other
    )


BROKEN = """
    import time
    from types import SimpleNamespace
    import optuna, hopsgpu
    from hopsgpu.backends import gang_request

    def train(x):
        return x

    # Each executor's discovery script refuses it.
    hopsgpu.session("broken", conf={"spark.executorEnv.HOPSGPU_LEASE_DIR": "no/absolute/path"})
    said = []

    def show(status):
        why = "; ".join((status.waiting_for, *status.waiting_details))
        if "ended unexpectedly" in why and why not in said:
            said.append(why)
            print(why, flush=True)

    def now():
        # Its time is over once it has given back.
        return time.monotonic() + 3600 * any("asks again soon" in text for text in said)

    gang_request.time = SimpleNamespace(monotonic=now)
    try:
        hopsgpu.search(
            train, {"x": optuna.distributions.FloatDistribution(0, 1)}, trials=2, max_concurrent=1,
            cores_per_worker=1, memory_per_worker="1g", acquire_timeout="1h", progress=show)
    except hopsgpu.GangTimeout as error:
        print("late:", error)
"""


@pytest.mark.soak
def test_an_executor_that_yarn_granted_too_many_gives_its_gpu_back(
    spark: SparkSession, manager: ClusterManager, tmp_path: Path
) -> None:
    """Long before Spark's idle timeout, which is a minute."""
    watched = Watched()
    kwargs = {"directory": str(tmp_path)}
    thread, found = in_thread(
        lambda: quiet(
            waits_for_a_word, X, trials=1, max_concurrent=1, kwargs=kwargs, progress=watched
        )
    )
    assert until(lambda: bool(watched.all) and len(watched.last.running) == 1), found
    backend = spark.sparkContext._jsc.sc().schedulerBackend()
    executor = backend.getExecutorIds().head()
    profile = backend.getExecutorResourceProfileId(executor)
    python_utils: Any = getattr(spark.sparkContext._jvm, "org.apache.spark.api.python.PythonUtils")

    def ask(executors: int) -> None:
        """Ask YARN as Spark's allocation manager does, whose own target stays as it is."""
        of = python_utils.toScalaMap
        backend.requestTotalExecutors(
            of({profile: executors}), of({profile: 0}), of({profile: of({})})
        )

    try:
        ask(2)
        assert until(lambda: backend.getExecutorIds().size() == 2)
        ask(1)
        assert gpus_become(manager, 1, HANG_SECONDS)
        assert until(lambda: backend.getExecutorIds().size() == 1)
        assert len(watched.last.running) == 1 and backend.getExecutorIds().head() == executor
    finally:
        (tmp_path / "go-0").touch()
        thread.join(HANG_SECONDS)
    assert isinstance(found[0], hopsgpu.types.SearchResult), found
    assert [trial.tries for trial in found[0].trials] == [1]
    assert gpus_become(manager, 0)


@pytest.mark.soak
def test_a_search_whose_executors_end_before_they_come_says_so_and_ends(
    cluster_env: dict[str, str], manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    driver = start_script(cluster_env, BROKEN)
    try:
        out, errors = driver.communicate(timeout=2 * HANG_SECONDS)
    finally:
        driver.kill()
    told = out.splitlines()
    assert told and re.search(
        r"ended unexpectedly on node\d.*see the node's log of container_", told[0]
    ), errors
    assert any("ended repeatedly; asks again soon" in line for line in told), out
    assert told[-1].startswith("late: 0 of 1 executor arrived within 3600 s"), out + errors
    assert "ended unexpectedly" in told[-1]
    assert gpus_become(manager, 0, HANG_SECONDS)
