"""score() on a real cluster: it starts small, grows, shrinks, and each row is there once."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_record import parse
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.cluster.test_search import in_thread
from tests.conftest import gpus_become, until
from tests.contention import start_script
from tests.in_ranks import executor_jvm

ROWS, FILES = 1200, 12
Batch = dict[str, np.ndarray[Any, Any]]
quiet = functools.partial(hopsgpu.score, cores_per_worker=1, memory_per_worker="1g", progress="off")


class Watched:
    """What a score has shown, from its thread."""

    def __init__(self) -> None:
        self.all: list[hopsgpu.types.ScoreStatus] = []

    def __call__(self, status: hopsgpu.types.ScoreStatus) -> None:
        self.all.append(status)

    @property
    def last(self) -> hopsgpu.types.ScoreStatus:
        return self.all[-1]


@pytest.fixture(scope="module")
def table(spark: SparkSession) -> str:
    """A table of 1,200 rows in twelve files, each with one row group."""
    url = f"{application_of(spark).root}/tables/{uuid.uuid4().hex}"
    frame = spark.range(0, ROWS, 1, FILES).selectExpr("id", "id / 10 AS x", "'n' || id AS name")
    frame.write.parquet(url)
    return url


def rows_of(result: hopsgpu.types.ScoreResult) -> dict[str, list[Any]]:
    """The output in the order of its files."""
    files = [LakePath(result.url) / name for name in sorted(LakePath(result.url).names())]
    tables = [parquet.read_table(io.BytesIO(file.read())) for file in files]
    found: dict[str, list[Any]] = pa.concat_tables(tables).to_pydict()
    return found


def hidden(url: str) -> list[str]:
    """What is in the output's hidden directories, beside it."""
    name = url.rpartition("/")[2]
    above = LakePath(url).parent
    return [one for one in above.names(only_directories=True) if one.startswith(f".{name}-")]


def waits_for_a_word(batch: Batch, directory: str) -> Batch:
    number = int(batch["id"][0]) // (ROWS // FILES)
    Path(directory, f"at-{number}").touch()
    while not Path(directory, f"go-{number}").exists():
        time.sleep(0.05)  # nobody tells
    return {"y": 2 * batch["x"]}


@pytest.mark.soak
def test_starts_on_the_first_gpu_grows_with_the_others_and_gives_each_back(
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    nothing_warmed: None,
    table: str,
    tmp_path: Path,
) -> None:
    watched = Watched()
    predict = functools.partial(waits_for_a_word, directory=str(tmp_path))
    with hopsgpu.hold(workers=3, cores_per_worker=1, progress="off"):
        thread, found = in_thread(
            lambda: quiet(predict, table, keep=["id"], max_concurrent=4, progress=watched)
        )
        assert until(lambda: bool(watched.all) and watched.last.state == "running")
        assert until(lambda: (tmp_path / "at-0").exists())
        assert manager.gpus()[0] == 4 and watched.last.executors == 1
        held = "this application uses"
        assert until(lambda: held in watched.last.waiting_for), watched.last
    assert until(lambda: watched.last.executors == 4), watched.last
    assert until(lambda: len(list(tmp_path.glob("at-*"))) == 4)
    # All but one of those that wait may go on, and with them all parts that are left.
    last = max(int(path.name.removeprefix("at-")) for path in tmp_path.glob("at-*"))
    for number in range(FILES):
        if number != last:
            (tmp_path / f"go-{number}").touch()
    assert gpus_become(manager, 1, HANG_SECONDS), watched.last
    assert watched.last.done >= FILES - 3
    (tmp_path / f"go-{last}").touch()
    thread.join(HANG_SECONDS)
    (result,) = found
    assert isinstance(result, hopsgpu.types.ScoreResult), result
    rows = rows_of(result)
    assert rows["id"] == list(range(ROWS))
    assert rows["y"] == pytest.approx([n / 5 for n in range(ROWS)])
    assert result.timeline.released is not None
    assert 0 < result.gpu_seconds.training <= result.gpu_seconds.held
    assert gpus_become(manager, 0)


class Scaled:
    """Multiplies by what is in the model; tells where it found it."""

    def __init__(self, model_dir: Path) -> None:
        self.factor = float((model_dir / "factor").read_text())
        self.where = f"{os.uname().nodename} {model_dir}"
        self.made = f"{os.environ['CONTAINER_ID']} {os.getpid()} {time.monotonic_ns()}"

    def __call__(self, batch: Batch) -> dict[str, Any]:
        rows = len(batch["x"])
        lost = Path(f"/tmp/hopsgpu-test-{self.factor:g}")
        if 500 in batch["id"] and not lost.exists():
            lost.touch()
            os.kill(executor_jvm(), signal.SIGKILL)
            time.sleep(HANG_SECONDS)
        return {
            "y": batch["x"] * self.factor,
            "where": [self.where] * rows,
            "made": [self.made] * rows,
        }


def test_a_lost_executor_repeats_its_part_and_a_model_is_there_once_on_a_node(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    table: str,
    tmp_path: Path,
) -> None:
    factor = float(time.time_ns() % 10**6 + 2)
    (tmp_path / "factor").write_text(f"{factor:g}")
    store = hopsgpu.ModelStore(f"{application_of(spark).root}/models")
    store.publish(tmp_path, "scaled", tags=["production"])
    output = f"{table}-scored"
    try:
        result = quiet(
            Scaled,
            spark.read.parquet(table).orderBy("id"),
            model="scaled@production",
            output=output,
            columns=["id", "x"],
            keep=["name", "id"],
            max_concurrent=2,
        )
    finally:
        Path(f"/tmp/hopsgpu-test-{factor:g}").unlink(missing_ok=True)
    rows = rows_of(result)
    assert result.url == output and result.rows == ROWS and hidden(output) == []
    assert rows["id"] == list(range(ROWS)) and rows["name"][7] == "n7"
    assert rows["y"] == pytest.approx([n / 10 * factor for n in range(ROWS)])
    # Containers of a node share a directory of the application.
    assert len(set(rows["where"])) <= len({one.split()[0] for one in rows["where"]}) * 2
    by_process = {one.rsplit(maxsplit=1)[0] for one in rows["made"]}
    assert len(by_process) == len(set(rows["made"])), "an object is made once in a process"
    assert result.df(spark).count() == ROWS
    run = LakePath(f"{application_of(spark).root}/runs/{result.run_id}")
    score = parse((run / "run.json").read(), run.url).score
    assert score is not None and score.is_complete and score.scored == ROWS
    assert not (run / "data").exists()


def fails(batch: Batch) -> Batch:
    if 500 in batch["id"]:
        raise LookupError("no such row")
    return {"y": batch["x"]}


@pytest.mark.soak
def test_a_part_that_fails_three_times_fails_the_call_or_is_left_out_on_cpu_executors(
    spark: SparkSession, gpus_back: Callable[[], int], table: str
) -> None:
    output = f"{table}-failed"
    options: dict[str, Any] = {"columns": ["id", "x"], "output": output}
    words = r"(?s)rows 500 to 599 of hdfs:.*failed 3 times.*LookupError: no such row"
    with pytest.raises(hopsgpu.HopsGpuError, match=words) as failed:
        quiet(fails, table, max_concurrent=1, **options)
    result = failed.value.result
    assert isinstance(result, hopsgpu.types.ScoreResult) and result.url == ""
    assert not LakePath(output).exists() and len(hidden(output)) == 1
    skipped = quiet(
        fails, table, keep=["id"], on_error="skip", max_concurrent=2, gpus_per_worker=0, **options
    )
    assert rows_of(skipped)["id"] == [n for n in range(ROWS) if not 500 <= n < 600]
    assert [(part.first, part.rows) for part in skipped.failed_parts] == [(500, 100)]
    assert skipped.gpu_seconds.held == 0 and hidden(output) == []


SCRIPT = """
    import sys, time
    import hopsgpu

    def predict(batch):
        if 700 in batch["id"]:
            time.sleep(600)
        return {"y": batch["x"]}

    if __name__ == "__main__":
        hopsgpu.session("killed")
        said = []

        def show(status):
            if not said:
                print("run", status.run_id, flush=True)
                said.append(1)
            if status.done >= 4 and len(said) == 1:
                print("kept", flush=True)
                said.append(2)

        hopsgpu.score(
            predict, "TABLE", columns=["id", "x"], keep=["id"], max_concurrent=1,
            cores_per_worker=1, memory_per_worker="1g", progress=show, output="TABLE-resumed")
"""


def mended(batch: Batch) -> Batch:
    return {"y": batch["x"]}


@pytest.mark.soak
def test_a_score_whose_driver_was_killed_is_resumed_and_shows_nothing_before(
    spark: SparkSession,
    cluster_env: dict[str, str],
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    table: str,
) -> None:
    driver = start_script(cluster_env, SCRIPT.replace("TABLE", table))
    assert driver.stdout is not None
    try:
        told = [driver.stdout.readline().split() for _ in range(2)]
        assert [one[0] for one in told] == ["run", "kept"], driver.stderr and driver.stderr.read()
    finally:
        driver.kill()
        driver.wait()
    run_id = told[0][1]
    output = f"{table}-resumed"
    assert not LakePath(output).exists() and hidden(output)
    assert gpus_become(manager, 0, HANG_SECONDS)
    attempt = functools.partial(
        quiet, mended, table, columns=["id", "x"], keep=["id"], max_concurrent=1, resume=run_id
    )

    def resumed() -> bool:
        """False while YARN still lists the application whose driver was killed."""
        try:
            found.append(attempt())
        except hopsgpu.ConfigError as error:
            assert "is still running in" in str(error)
            return False
        return True

    found: list[hopsgpu.types.ScoreResult] = []
    assert until(resumed, step=2.0)
    (result,) = found
    assert rows_of(result)["id"] == list(range(ROWS))
    assert result.run_id == run_id and any("differ" in text for text in result.warnings)
    assert hidden(output) == []


JOB = """
    import helper

    def predict(batch):
        return {"y": helper.doubled(batch["x"])}
"""


@pytest.mark.soak
def test_the_command_scores_with_a_function_of_a_file_in_cluster_mode(
    cluster_env: dict[str, str], gpus_back: Callable[[], int], table: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    (tmp_path / "helper.py").write_text("def doubled(x):\n    return 2 * x\n")
    output = f"{table}-cluster"
    command = [sys.executable, "-m", "hopsgpu.cli.main", "score", f"{tmp_path}/job.py:predict"]
    command += ["--deploy-mode", "cluster", "--data", table, "--output", output]
    command += ["--columns", "x", "--keep", "id", "--max-concurrent", "1"]
    command += ["--memory-per-worker", "1g", "--cores-per-worker", "1"]
    done = subprocess.run(
        command, env=cluster_env, capture_output=True, text=True, timeout=6 * HANG_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(LakePath(output).names())
    tables = [parquet.read_table(io.BytesIO((LakePath(output) / name).read())) for name in names]
    rows = pa.concat_tables(tables).to_pydict()
    assert rows["id"] == list(range(ROWS))
    assert rows["y"] == pytest.approx([n / 5 for n in range(ROWS)])
