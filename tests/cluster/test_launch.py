"""launch() on a real cluster: values, GPUs, ETL around it, what can be launched, failures."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.linux import comm
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.in_ranks import Slow, gpus_in_use_seen_by, who_am_i, who_am_i_once_told
from tests.processes import inner_pid, processes_of

pytestmark = pytest.mark.usefixtures("nothing_warmed")
quiet = functools.partial(hopsgpu.launch, progress="off")


def requested_totals(directory: Path, spark: SparkSession) -> list[int]:
    """The numbers of GPU executors that Spark has requested, by the application master's log."""
    application = spark.sparkContext.applicationId
    (log,) = directory.glob(f"nodes/*/logs/{application}/*_01_000001/stderr")
    # Executors of ETL have the profile 0.
    pattern = r"total number of (\d+) executor\(s\) for resource profile id: (?!0\.)"
    return [int(total) for total in re.findall(pattern, log.read_text())]


def test_values_of_all_ranks_their_environment_and_their_gpus_and_what_a_person_reads_of_it(
    spark: SparkSession,
    manager: ClusterManager,
    cluster_dir: Path,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    """All GPUs are in use during the run, and back after it."""
    is_yarn = isinstance(manager, YarnManager)  # others have no application master
    before = len(requested_totals(cluster_dir, spark)) if is_yarn else 0
    seen: list[hopsgpu.types.RunStatus] = []
    run = hopsgpu.submit(
        who_am_i_once_told,
        args=(Slow(tmp_path), "hello"),
        workers=4,
        env_vars={"FLAVOUR": "salt"},
        name="read",
        progress=seen.append,
    )
    # Ranks that import are no training, whatever time that takes; each of them counts.
    assert until(lambda: run.status().state == "starting")
    assert not until(lambda: run.status().state != "starting", 1.0)
    (tmp_path / "import-1").touch()
    assert until(lambda: run.status().waiting_for == "Starting 4 ranks: 1 of them runs")
    assert run.status().timeline.started is None
    for rank in (0, 2, 3):
        (tmp_path / f"import-{rank}").touch()
    entered = time.time()
    assert until(lambda: run.status().state == "running")
    assert run.status().timeline.started == pytest.approx(entered, abs=5.0)
    assert not until(lambda: run.status().state != "running", 1.0)
    assert manager.gpus()[0] == 4
    if is_yarn:
        # By itself, Spark would have requested 1, then 3, then 4, with a second between them.
        totals = requested_totals(cluster_dir, spark)[before:]
        assert set(totals[: totals.index(4)]) <= {0, 1}
    (tmp_path / "return").touch()
    assert run.wait(HANG_SECONDS)
    assert gpus_become(manager, 0)
    result = run.result()
    check_environments(result)
    times, held = result.timeline, result.gpu_seconds
    assert times.requested < times.granted < times.started < times.returned < times.released
    assert times.returned - times.started >= 1
    assert held.held >= held.training >= 4 * 1
    assert held.idle == pytest.approx(held.held - held.training - held.publishing)
    order = list(dict.fromkeys(status.state for status in seen))
    states = ["waiting", "granted", "ready", "starting", "running", "releasing", "succeeded"]
    assert [state for state in order if state != "requested"] == states
    phases = dict(result.timeline.phases())
    assert list(phases) == ["waited", "started", "trained", "released"]
    whole = result.timeline.released - result.timeline.requested
    assert sum(phases.values()) == pytest.approx(whole, abs=0.1)
    assert phases["started"] > 1 and phases["trained"] >= 1
    shown = hopsgpu_runs("show", run.run_id)
    assert "\nstate        succeeded\n" in shown and "\ntime         waited " in shown
    record = json.loads(hopsgpu_runs("show", run.run_id, "--json"))
    assert (record["schema"], record["state"]) == (3, "succeeded")
    assert record["timeline"]["started"] == result.timeline.started


def check_environments(result: hopsgpu.GangResult) -> None:
    """What four ranks have returned, in order, of themselves."""
    ranks = result.values
    assert {r["greeting"] for r in ranks} == {"hello"}
    assert [r["rank"] for r in ranks] == [0, 1, 2, 3]
    assert result.value == ranks[0]
    assert {r["world"] for r in ranks} == {4}
    assert {r["host"] for r in ranks} == {"node1", "node2"}
    assert len({g for r in ranks for g in r["gpus"]}) == 4
    for rank, seen in enumerate(ranks):
        variables = seen["environment"]
        assert variables["RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "4"
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert variables["NODE_RANK"] == variables["GROUP_RANK"] == str(rank)
        assert variables["TORCHELASTIC_RUN_ID"] == result.run_id
        assert variables["CUDA_VISIBLE_DEVICES"] == ",".join(seen["gpus"])
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert variables["FLAVOUR"] == "salt"
        assert Path(variables["HOME"]).name == "home"
        assert variables["MASTER_PORT"] == ranks[0]["environment"]["MASTER_PORT"]
    assert [r.pid for r in result.ranks] == [r["pid"] for r in ranks]
    assert all(r.exit_code == 0 and r.peak_memory > 2**20 for r in result.ranks)


def hopsgpu_runs(*words: str) -> str:
    command = [sys.executable, "-m", "hopsgpu.cli.main", "runs", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    ).stdout


def test_gpus_are_back_after_an_exception_and_the_application_lives_with_its_etl(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    """ETL that runs beside the launch is neither refused nor run twice."""
    stop = threading.Event()
    rows = spark.sparkContext.accumulator(0)
    done: list[int] = []

    def add_rows() -> None:
        while not stop.is_set() or len(done) < 10:
            spark.sparkContext.parallelize(range(10), 2).foreach(rows.add)
            done.append(len(done))

    def etl() -> int:
        return spark.range(1000).selectExpr("id % 7 as k").groupBy("k").count().count()

    assert etl() == 7
    with ThreadPoolExecutor(1) as thread:
        jobs = thread.submit(add_rows)
        try:
            assert until(lambda: len(done) > 0)
            before = len(done)
            with pytest.raises(hopsgpu.RankFailed) as failed:
                quiet(gpus_in_use_seen_by, args=(1, tmp_path / "other"), workers=2, name="fails")
        finally:
            stop.set()
        jobs.result()
    assert gpus_become(manager, 0)
    assert len(done) > before
    assert rows.value == len(done) * sum(range(10))
    assert application_of(spark).setting("spark.dynamicAllocation.enabled") == "true"
    error = failed.value
    assert error.rank == 1
    assert error.exit_code == 1
    assert "ValueError: rank 1 has had enough" in (error.traceback or "")
    assert "hopsgpu/rank/" not in (error.traceback or "")
    assert error.container and error.container in str(error)
    assert error.result.timeline.released is not None
    stopped, first = error.result.ranks
    assert (stopped.stopped, stopped.signal) == (True, "SIGTERM")
    assert (first.stopped, first.exit_code) == (False, 1)
    assert b"rank 1 has had enough" in LakePath(error.log_url or "").read()
    assert etl() == 7
    second = quiet(who_am_i, args=("two",))
    assert etl() == 7
    assert error.result.run_id != second.run_id
    assert second.value["greeting"] == "two"
    assert {r.pid for r in error.result.ranks}.isdisjoint(r["pid"] for r in second.values)


@pytest.mark.yarn
def test_executors_import_pyspark_from_bytecode(spark: SparkSession) -> None:
    def origin_of_worker(_: int) -> tuple[str, str, int, str]:
        from importlib.util import cache_from_source

        from pyspark import worker

        assert worker.__spec__ is not None and worker.__file__ is not None
        loader: Any = worker.__spec__.loader
        bytecode = loader.get_data(cache_from_source(worker.__file__))
        file = loader.get_code(worker.__name__).co_filename
        return type(loader).__name__, worker.__file__, len(bytecode), file

    ((importer, source, size, file),) = (
        spark.sparkContext.parallelize([0], 1).map(origin_of_worker).collect()
    )
    assert importer == "BytecodeImporter" and size > 1000
    assert source == file and source.endswith("/pyspark.zip/pyspark/worker.py")


def executor_jvms(cluster_dir: Path) -> set[int]:
    return {pid for pid in processes_of(cluster_dir, b"ExecutorBackend") if comm(pid) == "java"}


def gang_jvms(cluster_dir: Path) -> set[int]:
    """Executors of gangs: one of Spark's default profile may be there, for a task of its own."""
    default = re.compile(rb"--resourceProfileId\0" rb"0\0")
    return {
        pid
        for pid in executor_jvms(cluster_dir)
        if not default.search(Path(f"/proc/{pid}/cmdline").read_bytes())
    }


def began(pid: int) -> int:
    """When a process was started, in ticks: proc(5), field 22."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])


def test_torch_ranks_reach_each_other_and_are_forked_from_what_was_warmed_before(
    spark: SparkSession, gpus_back: Callable[[], int], cluster_dir: Path
) -> None:
    def all_reduce() -> tuple[list[float], int, bool]:
        imported = "torch" in sys.modules
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        numbers = torch.arange(3.0) + dist.get_rank()
        dist.all_reduce(numbers)
        dist.destroy_process_group()
        return [float(n) for n in numbers], os.getppid(), imported

    def servers() -> set[int]:
        return processes_of(cluster_dir, b"hopsgpu.agent.fork_server")

    assert until(lambda: not servers())
    before = executor_jvms(cluster_dir)
    run = hopsgpu.submit(all_reduce, workers=2, progress="off")
    assert until(lambda: len(executor_jvms(cluster_dir) - before) == 2, step=0.05)
    # The other one has to wait for it.
    late = max(executor_jvms(cluster_dir) - before, key=began)
    os.kill(late, signal.SIGSTOP)
    try:
        assert until(lambda: len(servers()) > 0)
        warmed, seen = set(map(inner_pid, servers())), time.time()
    finally:
        os.kill(late, signal.SIGCONT)
    result = run.result()
    assert [total for total, _, _ in result.values] == [[1.0, 3.0, 5.0]] * 2
    assert warmed <= {server for _, server, _ in result.values}
    assert all(imported for _, _, imported in result.values)
    assert result.timeline.granted is not None and seen < result.timeline.granted


def test_a_running_application_is_not_told_other_settings(spark: SparkSession) -> None:
    same = {"spark.dynamicAllocation.maxExecutors": 8}
    assert hopsgpu.session("again", conf=same).sparkContext is spark.sparkContext
    with pytest.raises(hopsgpu.ConfigError, match="maxExecutors=9 .it has 8.*spark.stop"):
        hopsgpu.session("again", conf={"spark.dynamicAllocation.maxExecutors": 9})


def test_a_gang_above_the_most_executors_is_refused(spark: SparkSession) -> None:
    with pytest.raises(hopsgpu.ConfigError, match="maxExecutors=8 is below the 9 executors"):
        quiet(os.getpid, workers=9)


@pytest.mark.parametrize(
    "much", [{"memory_per_worker": "100g"}, {"cores_per_worker": 100}, {"gpus_per_worker": 3}]
)
def test_an_executor_that_yarn_can_never_grant_is_refused_at_once(
    spark: SparkSession, much: dict[str, object]
) -> None:
    """Asked for, it would end the whole application."""
    with pytest.raises(hopsgpu.CapacityError, match="fits on no node.*node1 has 2 GPUs, 7 cores"):
        quiet(os.getpid, **much)
    assert spark.range(5).count() == 5


def test_a_place_for_runs_that_is_none_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPSGPU_ROOT", "ftp://host/x")
    with pytest.raises(hopsgpu.ConfigError, match="ftp://host/x.*hdfs://"):
        hopsgpu.submit(os.getpid)


def test_plan_says_what_would_be_asked_for(
    spark: SparkSession, manager: ClusterManager, is_yarn: bool
) -> None:
    planned = hopsgpu.plan(os.getpid, workers=3, memory_per_worker="2g", model="net")
    assert (planned.executors, planned.ranks_per_executor) == (3, 1)
    assert planned.queue == ("root.default" if is_yarn else "")
    # Nodes of 7 cores and 2 GPUs: 7 // 2 - 1 for each GPU.
    assert (planned.shape.cores, planned.shape.gpus) == (2, 1)
    assert planned.environment["OMP_NUM_THREADS"] == "2"
    assert planned.environment["LOKY_MAX_CPU_COUNT"] == "2"
    assert planned.environment["MIMALLOC_PURGE_DELAY"] == "0"
    assert planned.paths["model"].endswith("/hopsgpu/models/net")
    assert manager.gpus()[0] == 0


def test_settings_are_as_before(spark: SparkSession) -> None:
    """After all of these the flag that a launch turns is as it was, and nothing is left."""
    application = application_of(spark)
    assert application.setting("spark.dynamicAllocation.enabled") == "true"

    def left() -> list[str]:
        # On Kubernetes, two threads live as long as the application: for its Lease and its pods.
        lasting = ("hopsgpu-lease", "hopsgpu-pods")
        names = [t.name for t in threading.enumerate() if t.name not in lasting]
        return [name for name in names if name.startswith("hopsgpu-")]

    assert until(lambda: not left()), left()
