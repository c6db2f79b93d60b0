"""The rank of an executor that scores: it reads, predicts and writes the parts that it is handed.

Three threads work on different parts: one reads ahead, the main one calls the user's function, one
writes. So a GPU waits for the lake as little as the lake's speed allows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.artifacts.versions import ModelVersion
from hopsgpu.core import metrics
from hopsgpu.data.batches import Block, convert_chunk, rebatch
from hopsgpu.data.cache import memory_chunk
from hopsgpu.data.columns import Column, select_columns
from hopsgpu.data.prefetch import PrefetchIterator
from hopsgpu.data.reader import CONCURRENT_FETCHES, LakeReader
from hopsgpu.data.source import ParquetSource
from hopsgpu.errors import ConfigError
from hopsgpu.rank import inbox
from hopsgpu.rank.blocked_time import RankBlockedTime
from hopsgpu.rank.context import VARIABLE
from hopsgpu.scoring.part_reports import (
    BEGUN,
    DONE,
    FAILED,
    NO_PART,
    READY,
    ROWS,
    UNFIT,
    PartReport,
)
from hopsgpu.scoring.parts import Part, parts_of, shard_of, smallest_batch
from hopsgpu.scoring.predictions import first_schema, prediction_batch, with_schema
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.node_copies import ensure_copy, shared_directories
from hopsgpu.units import MIB, count_of

# Record batches that are read ahead, of 8 MiB at most.
_AHEAD = 6
_BLOCK_BYTES = 8 * MIB
# The largest row group that is fetched as a whole.
_FETCHED_BYTES = 64 * MIB
# Rows, and bytes, of a row group of the output.
_GROUP_ROWS = 128 * 1024
_GROUP_BYTES = 8 * MIB
# Row groups that wait to be written.
_LATE = 4
_REPORT_SECONDS = 0.5
_MODELS = "hopsgpu-models"
# Tells Spark that old dates use the calendar of Spark 3.0 and later. Without this key, Spark 3
# reads no date before 1582 and no timestamp before 1900.
_WRITER = {"org.apache.spark.version": "3.5.0"}

END = json.dumps({"end": True})

# Columns of a batch, by name.
Batch = dict[str, Any]
Predictor = Callable[[Batch], object]
log = logging.getLogger(__name__)


def part_line(number: int) -> str:
    """Return the line that hands a part to a rank."""
    return json.dumps({"part": number})


@dataclass(frozen=True)
class ScoreTask:
    """The values that all ranks of a score share.

    Attributes:
        bounds: how it is divided into parts, as for `parts_of`.
        columns: names of the columns that the user's function gets.
        shapes: shape of a row by column, for columns of lists.
        keep: names of the input's columns that are in the output.
        drafts: URL of the directory for files of parts.
    """

    source: ParquetSource
    bounds: tuple[int, ...]
    columns: tuple[str, ...]
    shapes: Mapping[str, Any]
    keep: tuple[str, ...]
    batch_size: int
    model: ModelVersion | None
    drafts: str


def score_parts(predict: Any, *, task: ScoreTask) -> int:
    """Score the parts that the driver hands to this rank, until it hands over the end.

    Returns:
        The number of rows.
    """
    directory = Path(os.environ[VARIABLE]).parent
    reports = directory / metrics.FILE
    predictor = predictor_of(predict, None if task.model is None else _fetch_model(task.model))
    metrics.append(reports, PartReport(NO_PART, READY).line(0, time.time()))
    with (
        tempfile.TemporaryDirectory(prefix="hopsgpu-score-") as scratch,
        ThreadPoolExecutor(1, "hopsgpu-score-write") as pool,
        _Reading(task, RankBlockedTime(directory).data) as reading,
    ):
        scorer = _Scorer(predictor, task, reports, Path(scratch), pool)
        for part, chunks in reading.parts():
            scorer.score(part, chunks)
        scorer.finish()
        return scorer.total


def predictor_of(predict: Any, model_dir: Path | None) -> Predictor:
    """Return what is called with each batch.

    Args:
        predict: a class, of which one object is made, or a function.
    """
    if inspect.isclass(predict):
        # mypy takes it for the class `object`.
        make: Any = predict
        predictor: Predictor = make() if model_dir is None else make(model_dir)
        return predictor
    if model_dir is None:
        function: Predictor = predict
        return function
    return functools.partial(predict, model_dir=model_dir)


def _fetch_model(model: ModelVersion) -> Path:
    """Return the directory with a version's files; download it if no process of the node has."""
    described = json.dumps([model.url, model.manifest], sort_keys=True)
    # The directory of the container has one for all attempts, and that one for each rank.
    container = Path(os.environ[VARIABLE]).parents[2]
    places = shared_directories(os.environ, container, _MODELS)
    digest = hashlib.sha256(described.encode()).hexdigest()[:32]

    def fill(home: Path) -> None:
        model.download(home)

    return ensure_copy(places, digest, fill)


class _Reading:
    """Reads the parts that are handed over, ahead of their use; a context manager.

    Args:
        waiting: counts the time in which the main thread waits for rows.
    """

    def __init__(self, task: ScoreTask, waiting: contextlib.AbstractContextManager[None]) -> None:
        self._task = task
        self._parts = parts_of(task.source, task.bounds)
        self._stopped = threading.Event()
        # Each part's record batches, and None at its end.
        self._items = PrefetchIterator(self._read, _AHEAD, waiting)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *problem: object) -> None:
        self._stopped.set()
        self._items.close()

    def parts(self) -> Iterator[tuple[Part, Iterator[Any]]]:
        """Yield each part with its record batches, which are to be read before the next part."""
        for part, _ in self._items:
            yield part, self._chunks()

    def _chunks(self) -> Iterator[Any]:
        for _, chunk in self._items:
            if chunk is None:
                return
            yield chunk

    def _read(self) -> Iterator[tuple[Part, Any]]:
        import pyarrow as pa

        task = self._task
        wanted = {*task.columns, *task.keep}
        schema = pa.schema([column for column in task.source.arrow_schema if column.name in wanted])
        with LakeReader(shard_of(task.source), schema, _FETCHED_BYTES) as reader:
            for line in inbox.lines(self._stopped):
                message = json.loads(line)
                if "end" in message:
                    return
                part = self._parts[message["part"]]
                yield part, None
                for chunk in reader.chunks(part.slices, CONCURRENT_FETCHES):
                    yield part, chunk
                yield part, None


@dataclass
class _Rows:
    """Rows of the output that are not given to the writer yet."""

    predictions: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    rows: int = 0
    size: int = 0

    def add(self, predictions: Any, kept: Sequence[Any]) -> None:
        """Add a batch's predictions, and the same rows of the columns that are kept."""
        self.predictions.append(predictions)
        self.kept += kept
        self.rows += predictions.num_rows
        self.size += predictions.nbytes + sum(column.nbytes for column in kept)


class _Scorer:
    """Calls the user's function with the batches of parts, and has the results written.

    Args:
        scratch: local directory for files that are being written.
        pool: the thread that writes.

    Attributes:
        total: number of rows scored.
    """

    def __init__(
        self,
        predictor: Predictor,
        task: ScoreTask,
        reports: Path,
        scratch: Path,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._predictor = predictor
        self._task = task
        self._columns: list[Column] = select_columns(
            task.source.arrow_schema, task.columns, task.shapes
        )
        self._reports = reports
        self._scratch = scratch
        self._pool = pool
        self._written: deque[Future[None]] = deque()
        self._schema: Any = None
        self._reported_at = 0.0
        self.total = 0

    def score(self, part: Part, chunks: Iterator[Any]) -> None:
        """Score a part; its file may still be being written on return."""
        self._report(PartReport(part.number, BEGUN))
        kept: deque[Any] = deque()
        rows, scored = _Rows(), 0
        file = _PartFile(part, self._task, self._scratch, self._report)
        for batch in rebatch(self._blocks(chunks, kept), self._task.batch_size, False):
            size = len(next(iter(batch.values())))
            # The function may take columns out of the batch that it gets, or replace them.
            few = {} if self._schema is not None else self._first_rows(batch, size)
            predictions = prediction_batch(self._predictor(batch), size, self._task.keep)
            if self._schema is None:
                self._schema = first_schema(predictions)
                if few:
                    self._try_smallest(part, few, size)
            rows.add(with_schema(predictions, self._schema), _take_rows(kept, size))
            scored, self.total = scored + size, self.total + size
            if rows.rows >= _GROUP_ROWS or rows.size >= _GROUP_BYTES:
                self._write(functools.partial(file.write, rows))
                rows = _Rows()
            self._report_rows(part, scored)
        if rows.rows:
            self._write(functools.partial(file.write, rows))
        self._write(functools.partial(file.finish, scored))

    def _first_rows(self, batch: Batch, size: int) -> Batch:
        """Return as many rows as some part's last batch has; nothing if the batch is no larger."""
        rows = smallest_batch(self._task.bounds, self._task.batch_size)
        return {name: array[:rows] for name, array in batch.items()} if rows < size else {}

    def _try_smallest(self, part: Part, few: Batch, size: int) -> None:
        """Call the function with as few rows as some part's last batch has.

        A function that does not take them fails here, and not after all other batches. Only names,
        types and shapes of the results count.

        Args:
            size: number of rows of the batch that the function has accepted.

        Raises:
            ConfigError: the call fails twice, or returns other columns than the whole batch.
        """
        rows = len(next(iter(few.values())))
        try:
            try:
                # A second call follows, because a GPU or a service can fail once.
                predictions = self._predictor(dict(few))
            except Exception as error:  # noqa: BLE001 - the second call raises what remains
                log.info(
                    "predict failed with %s: %r; it is called again",
                    count_of(rows, "row"),
                    error,
                )
                predictions = self._predictor(few)
            with_schema(prediction_batch(predictions, rows, self._task.keep), self._schema)
        except Exception as error:
            self._report(PartReport(part.number, UNFIT))
            raise ConfigError(
                f"predict takes a batch of {count_of(size, 'row')}, but not the first"
                f" {count_of(rows, 'row')} of it alone: {type(error).__name__}: {error}; the last"
                f" batch of a part has fewer rows than batch_size, here as few as {rows}: have"
                " predict accept any number of rows (pad the batch, and return only its rows; write"
                " squeeze(-1) and not squeeze()), or choose another batch_size"
            ) from error

    def finish(self) -> None:
        """Wait until all parts are on the lake."""
        self._settle(0)

    def _blocks(
        self, chunks: Iterator[Any], kept: deque[Any]
    ) -> Generator[Block | None, None, None]:
        checked: set[Hashable] = set()
        for chunk in chunks:
            if self._task.keep:
                kept.append(kept_columns(chunk, self._task.keep, self._task.source.instants))
            yield from convert_chunk(memory_chunk(chunk), self._columns, _BLOCK_BYTES, checked)
        yield None

    def _write(self, work: Callable[[], None]) -> None:
        self._settle(_LATE)
        self._written.append(self._pool.submit(work))

    def _settle(self, late: int) -> None:
        """Wait until at most so many writes are under way; raise what one of them raised."""
        while self._written and (len(self._written) > late or self._written[0].done()):
            self._written.popleft().result()

    def _report_rows(self, part: Part, scored: int) -> None:
        now = time.monotonic()
        if now >= self._reported_at + _REPORT_SECONDS:
            self._reported_at = now
            self._report(PartReport(part.number, ROWS, scored))

    def _report(self, report: PartReport) -> None:
        metrics.append(self._reports, report.line(self.total, time.time()))


class _PartFile:
    """The file of a part: written on the node's disk, then put on the lake. For one thread.

    Args:
        report: reports that the file is on the lake, or that the part has failed.
    """

    def __init__(
        self, part: Part, task: ScoreTask, scratch: Path, report: Callable[[PartReport], None]
    ) -> None:
        self._part = part
        self._keep = task.keep
        # Another process may still write a file of the same part: it is believed to be lost.
        self._name = f"{part.number}-{uuid.uuid4().hex}.parquet"
        self._target = LakePath(task.drafts) / self._name
        self._path = scratch / self._name
        self._report = report
        self._writer: Any = None

    def write(self, rows: _Rows) -> None:
        with self._reporting_failure():
            self._write(rows)

    def finish(self, scored: int) -> None:
        """Put the file on the lake."""
        from pyarrow import parquet

        with self._reporting_failure():
            self._writer.close()
            # As it is in the file, from which a score that is resumed takes it.
            schema = parquet.read_schema(self._path).remove_metadata()
            size = self._path.stat().st_size
            self._target.upload(self._path)
            self._path.unlink()
            self._report(
                PartReport(
                    self._part.number,
                    DONE,
                    scored,
                    self._name,
                    size,
                    schema.serialize().to_pybytes(),
                )
            )

    def _write(self, rows: _Rows) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        predictions = pa.Table.from_batches(rows.predictions)
        table = predictions
        if self._keep:
            kept = pa.Table.from_batches(rows.kept).select(list(self._keep))
            names = [*kept.schema.names, *predictions.schema.names]
            table = pa.table([*kept.columns, *predictions.columns], names=names)
        if self._writer is None:
            schema = table.schema.with_metadata(_WRITER)
            self._writer = parquet.ParquetWriter(self._path, schema)
        self._writer.write_table(table, row_group_size=table.num_rows)

    @contextlib.contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The main thread is at another part by then.
            self._report(PartReport(self._part.number, FAILED))
            raise


def kept_columns(chunk: Any, names: Sequence[str], instants: frozenset[str]) -> Any:
    """Return the columns of a record batch that the output has.

    Args:
        instants: as of a `ParquetSource`: the output says that these are points in time; else Spark
            would take them for timestamps without a time zone.
    """
    import pyarrow as pa

    columns = []
    for name in names:
        column = chunk.column(name)
        if name in instants:
            column = column.cast(pa.timestamp(column.type.unit, "UTC"))
        columns.append(column)
    return pa.record_batch(columns, names=list(names))


def _take_rows(kept: deque[Any], rows: int) -> list[Any]:
    """Remove the next rows from record batches, and return them."""
    batches = []
    while kept and rows:
        batch = kept.popleft()
        batches.append(batch.slice(0, rows))
        if batch.num_rows > rows:
            kept.appendleft(batch.slice(rows))
        rows -= batches[-1].num_rows
    return batches
