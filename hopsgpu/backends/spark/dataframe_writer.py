"""The writing of DataFrames as Parquet by ETL executors, before any GPU is requested."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark import InheritableThread
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.functions import col

from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.barrier_job import reason_of
from hopsgpu.backends.spark.jvm import wait_until
from hopsgpu.data.argument import Datasets
from hopsgpu.errors import Cancelled, ConfigError, HopsGpuError
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB

# Small row groups: a rank whose rows begin inside a row group decodes the rows before in vain.
_OPTIONS = {"parquet.block.size": str(8 * MIB), "compression": "snappy"}
_POLL_SECONDS = 0.2
_REPORT_SECONDS = 1.0
# Tasks of a cancelled job may still write: on a busy machine, one that starts ends seconds later.
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class WriteProgress:
    """The progress of a write.

    Attributes:
        ended: number of planned tasks that have ended.
        tasks: number of tasks that Spark has planned so far.
    """

    ended: int
    running: int
    tasks: int


def is_frame(value: object) -> bool:
    return isinstance(value, DataFrame)


def check_data(datasets: Datasets | None, application: GangApplication) -> None:
    """Check that the DataFrames can be written in this application.

    Raises:
        ConfigError: a DataFrame belongs to Spark Connect or to another application, or is a stream;
            or `spark.hopsgpu.keep_data` is not a boolean; or the root is on an object store.
    """
    if datasets is None:
        return
    _ = application.should_keep_data  # refuse an invalid value now rather than during a run
    for name, frame in datasets.frames:
        label = datasets.label(name)
        if getattr(frame, "_jdf", None) is None:
            raise ConfigError(f"{label} is a DataFrame of Spark Connect, which has no JVM to ask")
        if frame.sparkSession.sparkContext is not application.context:
            raise ConfigError(
                f"{label} is a DataFrame of a different Spark application than the launch"
            )
        if frame.isStreaming:
            raise ConfigError(f"{label} is a stream: write it to the lake, and pass the path")
        if LakePath(application.root).is_object_store:
            raise ConfigError(
                f"{label} is a DataFrame, which Spark would write below {application.root}: Spark"
                " reaches object stores by a connector and credentials of its own (s3a://)."
                " Write it as Parquet to where the ranks can read it, and pass the path"
            )


class _Write:
    """A DataFrame's write in its own thread, whose Spark job can be cancelled.

    The thread is a daemon, because it must not keep a failed script alive.
    """

    def __init__(
        self, application: GangApplication, frame: Any, url: str, tag: str, why: str
    ) -> None:
        self._context = application.context
        self._frame = frame
        self._url = url
        self._tag = tag
        self._why = why
        self.ended = threading.Event()
        self.error: Exception | None = None
        InheritableThread(target=self._run, name=tag, daemon=True).start()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._tag, self._why)
            self._context.addJobTag(self._tag)
            _with_arrays(self._frame).write.options(**_OPTIONS).parquet(self._url)
        except Exception as error:  # noqa: BLE001 - passed to the code that waits for the write
            self.error = error
        finally:
            self.ended.set()


def write_frame(
    application: GangApplication,
    frame: Any,
    url: str,
    *,
    label: str,
    tag: str,
    cancelled: threading.Event,
    report: Callable[[WriteProgress], None],
) -> None:
    """Write a DataFrame as Parquet, with row groups of about 8 MB, and wait for the end.

    Columns of Spark ML's vectors are written as lists of float64.

    Args:
        url: URL of a directory that does not exist.
        label: name of the DataFrame in error messages.
        tag: unique tag of the Spark job.

    Raises:
        ConfigError: Spark cannot write the DataFrame as Parquet.
        Cancelled: the write was cancelled; the Spark job is over.
        HopsGpuError: the Spark job failed.
    """
    with application.jvm.without_resource_warning():
        write = _Write(application, frame, url, tag, f"hopsgpu writes {label}")
        next_report = time.monotonic()
        while not write.ended.wait(_POLL_SECONDS):
            if cancelled.is_set():
                # Repeat the call: a write has no job while Spark plans it.
                application.jvm.cancel(tag)
            elif time.monotonic() >= next_report:
                report(WriteProgress(*application.jvm.progress(tag)))
                next_report = time.monotonic() + _REPORT_SECONDS
    error = write.error
    if error is None and not cancelled.is_set():
        return
    # A task that still runs could create files in the directory after its removal.
    never = threading.Event()
    wait_until(lambda: not application.jvm.active_tasks(tag), never, _STOP_SECONDS, _POLL_SECONDS)
    if cancelled.is_set():
        raise Cancelled(f"the run was cancelled while Spark wrote {label}") from error
    words = f"{label} could not be written to {url}: {reason_of(str(error))}"
    if isinstance(error, AnalysisException):
        raise ConfigError(f"{words}. Select the columns that the ranks need") from error
    raise HopsGpuError(words) from error


def _with_arrays(frame: Any) -> Any:
    """Return the DataFrame with lists in place of Spark ML's vectors (structs in Parquet)."""
    vectors = {f.name for f in frame.schema.fields if type(f.dataType).__name__ == "VectorUDT"}
    if not vectors:
        return frame
    from pyspark.ml.functions import vector_to_array

    def column(name: str) -> Any:
        quoted = col("`{}`".format(name.replace("`", "``")))
        return vector_to_array(quoted).alias(name) if name in vectors else quoted

    return frame.select(*map(column, frame.columns))
