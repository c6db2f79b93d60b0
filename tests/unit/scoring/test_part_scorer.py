"""What a rank makes of the parts that it is handed: files on the lake, and reports."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.core import metrics
from hopsgpu.data.source import read_source
from hopsgpu.errors import ConfigError
from hopsgpu.rank.blocked_time import BlockedTime
from hopsgpu.rank.context import VARIABLE
from hopsgpu.rank.inbox import InboxWriter
from hopsgpu.scoring.part_reports import (
    BEGUN,
    DONE,
    NO_PART,
    READY,
    UNFIT,
    PartReport,
    PartReports,
)
from hopsgpu.scoring.part_scorer import END, ScoreTask, kept_columns, part_line, score_parts
from hopsgpu.scoring.parts import plan_bounds
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB

Batch = dict[str, np.ndarray[Any, Any]]


class Rank:
    """A rank's directories, in this process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = home / "container" / "attempt" / "rank-0"
        self.directory.mkdir(parents=True)
        (home / "drafts").mkdir()
        BlockedTime(self.directory)

    def task(self, table: pa.Table, executors: int, **given: Any) -> ScoreTask:
        """A score of a table in one file, with row groups of a thousand rows."""
        path = self.home / "table.parquet"
        parquet.write_table(table, path, row_group_size=given.pop("group", 1000))
        source = read_source(LakePath(f"file://{path}"))
        fields: dict[str, Any] = {"columns": ("x",), "shapes": {}, "keep": (), "batch_size": 64}
        drafts = f"file://{self.home}/drafts"
        bounds = plan_bounds(source, executors)
        return ScoreTask(source, bounds, **(fields | given), model=None, drafts=drafts)

    def scores(self, predict: Any, task: ScoreTask) -> list[PartReport]:
        """Hand over all parts and the end; return the reports."""
        inbox = InboxWriter(self.directory)
        with contextlib.closing(inbox):
            for number in range(len(task.bounds) - 1):
                inbox.write(part_line(number))
            inbox.write(END)
            score_parts(predict, task=task)
        return list(PartReports().take((self.directory / metrics.FILE).read_bytes()))

    def file(self, report: PartReport) -> parquet.ParquetFile:
        """The file of a part that is done."""
        return parquet.ParquetFile(self.home / "drafts" / report.file)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    monkeypatch.setenv(VARIABLE, str(rank.directory / "context.json"))
    yield rank


def doubled(batch: Batch) -> Batch:
    return {"y": 2 * batch["x"]}


@pytest.mark.parametrize("group", [1000, 5000])
def test_each_part_has_a_file_with_its_rows_in_order(rank: Rank, group: int) -> None:
    table = pa.table({"x": range(5000), "id": range(5000)})
    task = rank.task(table, 2, keep=("id",), group=group)
    reports = rank.scores(doubled, task)
    done = [report for report in reports if report.event == DONE]
    assert reports[0] == PartReport(NO_PART, READY)
    parts = len(task.bounds) - 1
    assert [report.number for report in done] == list(range(parts)) and parts > 1
    assert {report.number for report in reports if report.event == BEGUN} == set(range(parts))
    rows = pa.concat_tables([rank.file(report).read() for report in done]).to_pydict()
    assert rows == {"id": list(range(5000)), "y": list(range(0, 10000, 2))}


def test_rows_with_large_columns_to_keep_are_written_few_at_a_time(rank: Rank) -> None:
    large = pa.array([bytes([n % 256]) * MIB for n in range(40)])
    task = rank.task(pa.table({"x": range(40), "large": large}), 1, keep=("large",), batch_size=1)
    reports = rank.scores(doubled, task)
    files = [rank.file(report) for report in reports if report.event == DONE]
    footers = [file.metadata.row_group(n) for file in files for n in range(file.num_row_groups)]
    assert max(footer.num_rows for footer in footers) <= 8, "MiB"
    assert sum(footer.num_rows for footer in footers) == 40


def test_the_schema_that_is_told_is_the_files(rank: Rank) -> None:
    def timed(batch: Batch) -> Batch:
        return {"at": batch["x"].astype("M8[s]"), "vector": np.zeros((len(batch["x"]), 2))}

    reports = rank.scores(timed, rank.task(pa.table({"x": range(10)}), 1))
    (done,) = [report for report in reports if report.event == DONE]
    file = rank.file(done)
    told = pa.ipc.read_schema(pa.py_buffer(done.schema))
    assert told.equals(file.schema_arrow) and told.metadata is None
    # Spark 3 refuses old dates of unknown writers.
    assert file.metadata.metadata[b"org.apache.spark.version"] == b"3.5.0"


def test_points_in_time_are_kept_as_such() -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    chunk = pa.record_batch({"local": [now], "at": [now], "x": [1]})
    kept = kept_columns(chunk, ("at", "local"), frozenset({"at", "other"}))
    assert kept.schema.names == ["at", "local"]
    assert kept.schema.field("at").type == pa.timestamp("us", "UTC")
    assert kept.schema.field("local").type == pa.timestamp("us")
    assert kept.column("at")[0].as_py() == now.replace(tzinfo=datetime.UTC)


class Sizes:
    """Notes how many rows each batch has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, batch: Batch) -> Batch:
        self.sizes.append(len(batch["x"]))
        return doubled(batch)


@pytest.mark.parametrize(
    ("rows", "group", "tried"), [(65, 65, [1]), (130, 130, [2]), (128, 128, []), (10, 10, [])]
)
def test_the_smallest_batch_is_tried_once_after_the_first_where_it_is_smaller(
    rank: Rank, rows: int, group: int, tried: list[int]
) -> None:
    noted = Sizes()
    reports = rank.scores(noted, rank.task(pa.table({"x": range(rows)}), 1, group=group))
    first = min(rows, 64)
    rest = [min(64, rows - at) for at in range(first, rows, 64)]
    assert noted.sizes == [first, *tried, *rest]
    (done,) = [report for report in reports if report.event == DONE]
    assert rank.file(done).read().to_pydict() == {"y": list(range(0, 2 * rows, 2))}


def squeezed(batch: Batch) -> Batch:
    return {"y": batch["x"][:, None].squeeze()}


def of_fixed_size(batch: Batch) -> Batch:
    return {"y": batch["x"].reshape(64)}


def with_other_columns(batch: Batch) -> Batch:
    return {"y" if len(batch["x"]) > 1 else "z": batch["x"]}


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        (squeezed, r"of shape \(\) for a batch of 1 row:.*use squeeze\(-1\)"),
        (of_fixed_size, "ValueError: cannot reshape.*as few as 1: have predict accept any number"),
        (with_other_columns, "returned the columns z, but y for an earlier batch"),
    ],
)
def test_a_function_that_fails_with_few_rows_fails_at_the_first_batch(
    rank: Rank, predict: Any, said: str
) -> None:
    task = rank.task(pa.table({"x": range(64 * 500 + 1)}), 1, group=64 * 500 + 1)
    with pytest.raises(ConfigError, match=f"64 rows, .* 1 row.*{said}"):
        rank.scores(predict, task)
    reports = list(PartReports().take((rank.directory / metrics.FILE).read_bytes()))
    assert [report.event for report in reports] == [READY, BEGUN, UNFIT]


def changes_its_batch(batch: Batch) -> Batch:
    y = batch.pop("x") + 1
    batch["y"] = y
    return {"y": y}


class FailsOnce:
    """A function whose second call fails, as a GPU or a service can."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Batch) -> Batch:
        self.calls += 1
        if self.calls == 2:
            raise OSError("503")
        return {"y": batch["x"] + 1}


@pytest.mark.parametrize("predict", [changes_its_batch, FailsOnce()])
def test_the_extra_call_changes_nothing(rank: Rank, predict: Any) -> None:
    reports = rank.scores(predict, rank.task(pa.table({"x": range(65)}), 1, group=65))
    (done,) = [report for report in reports if report.event == DONE]
    assert rank.file(done).read().to_pydict() == {"y": list(range(1, 66))}
