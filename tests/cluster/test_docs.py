"""Blocks of Python in README.md and docs/, run as they stand, page by page, on the real cluster.

Excerpts of examples are not run here: the examples are. What a page takes as given is given below.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hdfs_native.fsspec import HdfsFileSystem
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.storage.lake_root import session_root
from tests.docs.pages import PAGES, ROOT, Block, blocks, name_of

# Pages of which no block is run, and why.
NOT_RUN = {
    "docs/coming-from.md": "tests/contract/test_coming_from.py runs them where no cluster is",
    "docs/laptop.md": "tests/contract/test_local.py runs its like where no cluster is",
    "docs/scoring.md": "tests/contract/test_score.py and tests/cluster/test_score.py run its like",
    "docs/python-environments.md": "tests/cluster/test_python_env.py runs its like",
}
RUN = {
    "README.md",
    "docs/data.md",
    "docs/development-cluster.md",
    "docs/elastic-gangs.md",
    "docs/models.md",
    "docs/pipeline.md",
    "docs/pytorch.md",
    "docs/serving.md",
    "docs/hyperparameter-search.md",
    "docs/usage.md",
}

# What a gang was asked for with, and is not told by each launch on it.
OF_GANGS = inspect.signature(hopsgpu.hold).parameters.keys() - {"name", "progress"}


def _blocks(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.language == "python" and not block.source and not block.not_run
    ]


def _run(page: str, **given: object) -> dict[str, Any]:
    """Runs a page's blocks one after the other, as a script would; what they leave."""
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for block in _blocks(ROOT / page):
        # At its line, so that a traceback names the page.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, page, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the files that pages name; the environment is put back."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "dir").mkdir(parents=True)
    (tmp_path / "local" / "dir" / "model.pt").write_bytes(b"weights")
    (tmp_path / "state.pt").write_bytes(b"state")
    try:
        yield tmp_path
    finally:
        # context() outside a gang makes a world of one there.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


@pytest.fixture
def lake(spark: SparkSession) -> HdfsFileSystem:
    """HDFS, without what an earlier run of these tests has left."""
    files = HdfsFileSystem(skip_instance_cache=True)
    digits = urlsplit(session_root(os.environ)).path + "/models/digits"
    for path in ("/raw", "/lake", "/user/me/hopsgpu", digits):
        if files.exists(path):
            files.rm(path, recursive=True)
    return files


def test_each_page_is_run_or_says_why_not() -> None:
    there = {name_of(page) for page in PAGES if _blocks(page)}
    assert there == RUN | NOT_RUN.keys()


def test_files_come_to_the_development_cluster(lake: HdfsFileSystem) -> None:
    spark = _run("docs/development-cluster.md")["spark"]
    rows = spark.read.parquet("hdfs:///tmp/mine").collect()
    assert {(row.x, row.y) for row in rows} == {("1", "2"), ("3", "4")}
    lake.rm("/tmp/mine", recursive=True)


def _as_on(gang: hopsgpu.Gang) -> Callable[..., hopsgpu.GangResult]:
    """A `launch` for pages that need no gang of their own, each of which would be waited for."""
    plan = hopsgpu.plan

    def launch(train_fn: Callable[..., Any], **given: Any) -> hopsgpu.GangResult:
        plan(train_fn, **given)  # what it asks for is looked at, and not asked for
        return gang.launch(train_fn, **{n: v for n, v in given.items() if n not in OF_GANGS})

    return launch


def _leaves_a_model() -> None:
    (hopsgpu.context().model_dir / f"part-{hopsgpu.context().rank}").write_text("weights")


@pytest.mark.soak
def test_pages(
    spark: SparkSession,
    lake: HdfsFileSystem,
    gpus_back: Callable[[], int],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Runs of other tests have no record if their driver was killed before it wrote one.
    killed = {*hopsgpu.usage().problems}
    hold, gangs = hopsgpu.hold, []
    with contextlib.ExitStack() as until_the_end:

        def kept(**given: Any) -> contextlib.AbstractContextManager[hopsgpu.Gang]:
            """The first gang that is asked for, of two ranks; all later ones are the same."""
            if not gangs:
                two = {"workers": 2, "placement": "pack"}  # in a container: they import once
                gangs.append(until_the_end.enter_context(hold(**{**given, **two})))
            return contextlib.nullcontext(gangs[0])

        monkeypatch.setattr(hopsgpu, "hold", kept)
        kept(gpu_idle_timeout="10m")
        monkeypatch.setattr(hopsgpu, "launch", _as_on(gangs[0]))

        rows = [(float(n), n % 10) for n in range(40)]
        spark.createDataFrame(rows, "pixel double, label int").write.json("hdfs:///raw")
        left = _run("README.md")
        assert [value["accuracy"] for value in left["result"].values] == [0.97] * 2
        assert (directory / "some" / "directory" / "model.pt").stat().st_size > 0

        left = _run("docs/pytorch.md")
        assert len(left["result"].values) == len(left["losses"]) == 2
        assert (left["first"].value, left["later"].value) == (1.5, 2.5)
        # tests/cluster/test_elastic.py has other sizes.
        assert _run("docs/elastic-gangs.md")["result"].values == (150.0, 150.0)

        # Of each row's image the one pixel is set that tells its label.
        rows = [([float(p == n % 10) for p in range(64)], n % 10) for n in range(600)]
        images = spark.createDataFrame(rows, "image array<float>, label long")
        images.write.parquet("hdfs:///lake/images")
        left = _run("docs/data.md")
        assert left["result"].values == (3 * 300, 3 * 300)
        # Of 300 rows the second batch of an epoch has 44.
        assert left["shapes"] == ((44, 8, 8), (44, 8, 8))
        assert all(0 < loss < 2.3 for loss in left["losses"])  # of ten labels: log(10) to begin
        assert 2.5 > left["history"][0] > left["history"][2] > 0

        rows = [(n, n / 10, n / 5 + 1) for n in range(21)]
        readings = spark.createDataFrame(rows, "id int, x double, y double")
        readings.write.json("hdfs:///raw/readings")
        left = _run("docs/pipeline.md")
        scored = spark.read.parquet("hdfs:///lake/readings-scored").collect()
        assert len(scored) == 21
        assert all(row.expected == pytest.approx(row.y, abs=0.6) for row in scored)
        assert left["models"].tags("readings") == {"production": left["version"]}
        assert left["code"] == 0

        store = hopsgpu.ModelStore()
        store.publish("local/dir", "digits")  # an older one, which the page deletes
        left = _run("docs/models.md", hopsgpu=hopsgpu, train=_leaves_a_model)
        assert set(left["result"].model.manifest["files"]) == {"part-0", "part-1"}
        assert [version.version for version in store.versions("digits")] == [2]

        left = _run("docs/serving.md")
        assert left["version"].version == 3
        assert [one.name for one in left["version"].formats] == ["skops"]

        left = _run("docs/usage.md")  # also of what the pages above have launched until now
        assert {*left["usage"].problems} <= killed
        assert left["usage"].total.gpu_hours_held > 0
        assert left["table"]["gpu_hours_held"].sum() == pytest.approx(
            left["usage"].total.gpu_hours_held
        )


def _one_at_a_time(search: Callable[..., Any]) -> Callable[..., Any]:
    """A search of pages that starts one executor for its trials, and not one for each GPU."""
    return lambda *args, **given: search(*args, **{**given, "max_concurrent": 1})


@pytest.mark.soak
def test_the_page_of_searches(
    spark: SparkSession,
    lake: HdfsFileSystem,
    gpus_back: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("search", "ablate"):
        monkeypatch.setattr(hopsgpu, name, _one_at_a_time(getattr(hopsgpu, name)))
    left = _run("docs/hyperparameter-search.md")
    assert len(left["result"].trials) == 20
    assert left["result"].run_id == "digits"
    assert left["result"].warnings == ()
    known = left["optuna"].distributions
    space = {
        "lr": known.FloatDistribution(1e-4, 1, log=True),
        "hidden": known.IntDistribution(1, 2),
    }
    more = left["go_on"](left["train"], space)
    assert len(more.trials) == 24
    assert more.trials[:20] == left["result"].trials
    whole, dropout, depth = left["ablation"]().rows
    assert (whole.component, dropout.component, depth.component) == ("", "dropout", "depth")
    assert dropout.difference == pytest.approx(-0.02)
    assert depth.difference == pytest.approx(2 / 3)
