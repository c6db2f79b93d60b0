"""A DataFrame's write: what is told of it, and how it ends; Spark is played."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import AnalysisException

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark import dataframe_writer
from hopsgpu.backends.spark.dataframe_writer import WriteProgress, check_data, write_frame
from hopsgpu.data.argument import datasets_of
from hopsgpu.errors import Cancelled, ConfigError, HopsGpuError
from tests.bounds import HANG_SECONDS


class Spark:
    """A context with its JVM, and a DataFrame whose write takes until it is let go or cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = threading.Event()
        self.cancelled: list[str] = []
        self.written: list[tuple[dict[str, str], str]] = []
        self.tags: list[str] = []
        self.running = 1
        self.context = SimpleNamespace(setJobGroup=self.group, addJobTag=self.tags.append)
        self.jvm = SimpleNamespace(
            cancel=self.cancel,
            progress=lambda tag: (1, 1, 2),
            active_tasks=self.active,
            without_resource_warning=contextlib.nullcontext,
        )
        self.schema = SimpleNamespace(fields=[SimpleNamespace(name="n", dataType=3)])
        self.write = SimpleNamespace(options=self.options)

    def group(self, tag: str, why: str) -> None:
        self.tags += [tag, why]

    def cancel(self, tag: str) -> None:
        self.cancelled.append(tag)
        self.error = RuntimeError("SparkException: Job 3 cancelled")
        self.ended.set()

    def active(self, tag: str) -> int:
        # A task that was cancelled takes a moment.
        self.running -= 1
        return max(self.running, 0)

    def options(self, **options: str) -> Any:
        def parquet(url: str) -> None:
            self.ended.wait(HANG_SECONDS)
            if self.error is not None:
                raise self.error
            self.written.append((options, url))

        return SimpleNamespace(parquet=parquet)


@pytest.fixture(autouse=True)
def plain_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark's inherit properties from a JVM that is not here."""
    monkeypatch.setattr(dataframe_writer, "InheritableThread", threading.Thread)


def write(
    spark: Spark, cancelled: threading.Event, told: Callable[[WriteProgress], None] = lambda _: None
) -> None:
    write_frame(
        cast(GangApplication, spark),
        spark,
        "hdfs://nn/x",
        label="data.train",
        tag="fit-1-data.train",
        cancelled=cancelled,
        report=told,
    )


def test_it_is_written_with_small_row_groups_and_told_of() -> None:
    spark, told = Spark(), list[WriteProgress]()

    def tell(written: WriteProgress) -> None:
        told.append(written)
        spark.ended.set()

    write(spark, threading.Event(), tell)
    ((options, url),) = spark.written
    assert options == {"parquet.block.size": str(8 * 2**20), "compression": "snappy"}
    assert url == "hdfs://nn/x" and told == [WriteProgress(1, 1, 2)]
    assert spark.tags == ["fit-1-data.train", "hopsgpu writes data.train", "fit-1-data.train"]


def test_a_cancelled_write_ends_its_job_first() -> None:
    spark, cancelled = Spark(), threading.Event()
    spark.running = 3
    with pytest.raises(Cancelled, match="cancelled while Spark wrote data.train"):
        write(spark, cancelled, lambda _: cancelled.set())
    assert spark.cancelled == ["fit-1-data.train"] and spark.running == 0
    assert not spark.written


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            AnalysisException("[COLUMN_ALREADY_EXISTS] The column `n` already exists"),
            ConfigError,
            r"data\.train could not be written to hdfs://nn/x: .*ALREADY.*Select the columns",
        ),
        (ValueError("my ETL"), HopsGpuError, r"data\.train could not be written .*: my ETL$"),
    ],
)
def test_a_write_that_fails_says_why(error: Exception, kind: type[Exception], words: str) -> None:
    spark = Spark(error)
    spark.ended.set()
    with pytest.raises(kind, match=words) as raised:
        write(spark, threading.Event())
    assert raised.value.__cause__ is error


def test_frames_of_other_applications_are_refused() -> None:
    context = object()
    given = {"context": context, "should_keep_data": False, "root": "hdfs:///user/ann/hopsgpu"}
    application = cast(GangApplication, SimpleNamespace(**given))
    session = SimpleNamespace(sparkContext=context)

    def check(**frame: Any) -> None:
        given = datasets_of({"train": SimpleNamespace(**frame)}, lambda _: True)
        check_data(given, application)

    check_data(None, application)
    check(_jdf=1, sparkSession=session, isStreaming=False)
    other = SimpleNamespace(sparkContext=3)
    for frame, words in (
        ({}, "data.train is a DataFrame of Spark Connect"),
        ({"_jdf": 1, "sparkSession": other}, "data.train is a DataFrame of a different Spark"),
        ({"_jdf": 1, "sparkSession": session, "isStreaming": True}, "data.train is a stream"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(**frame)
    given["root"] = "s3://bucket/hopsgpu"
    application = cast(GangApplication, SimpleNamespace(**given))
    with pytest.raises(ConfigError, match="train is a DataFrame, which Spark would write below s3"):
        check(_jdf=1, sparkSession=session, isStreaming=False)
