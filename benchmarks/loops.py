"""Others' loops over the rows that benchmarks.data reads: TorchDistributor's and petastorm's.

Each is a function that goes over the rows once, or the reason for which there is none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

Loop = Callable[[], None]


def torch_distributor(table: pa.Table, local: Path, batch: int) -> Loop | str:
    """Return TorchDistributor's loop over a partition: its own dataset and torch's DataLoader."""
    try:
        from pyspark.ml.torch.data import _SparkPartitionTorchDataset
        from pyspark.sql.types import ArrayType, FloatType, StructField, StructType
        from torch.utils.data import DataLoader
    except ImportError as error:
        return f"TorchDistributor's loop: {error}"
    rows = _with_lists(table)
    with pa.ipc.new_stream(local / "stream.arrow", rows.schema) as writer:
        # Spark's spark.sql.execution.arrow.maxRecordsPerBatch.
        writer.write_table(rows, max_chunksize=10_000)
    lists, number = ArrayType(FloatType()), FloatType()
    fields = [StructField(f.name, lists if f.type.num_fields else number) for f in rows.schema]

    def loop() -> None:
        file = str(local / "stream.arrow")
        dataset = _SparkPartitionTorchDataset(file, StructType(fields), table.num_rows)
        for _ in DataLoader(dataset, batch):
            pass

    return loop


def petastorm(table: pa.Table, local: Path, batch: int, shuffled: int = 0) -> Loop | str:
    """Return petastorm's threaded reader of local Parquet files, and its loader of tensors.

    Args:
        table: the rows.
        local: a directory for them.
        batch: rows of one.
        shuffled: rows of the window that it shuffles; 0 for none.
    """
    if importlib.util.find_spec("petastorm") is None:
        return "petastorm is not installed (`pip install petastorm` beside the bench extra)"

    def loop() -> None:
        from petastorm import make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        reader = make_batch_reader(
            directory.as_uri(), reader_pool_type="thread", shuffle_row_groups=bool(shuffled)
        )
        with BatchedDataLoader(reader, batch, shuffling_queue_capacity=shuffled) as loader:
            for _ in loader:
                pass

    directory = local / "petastorm"
    directory.mkdir(exist_ok=True)
    try:
        # It knows no lists of a fixed length.
        file = str(directory / "0.parquet")
        parquet.write_table(_with_lists(table), file, row_group_size=65_536, use_dictionary=False)
        loop()
    except Exception as error:  # noqa: BLE001  of an import or of any call; it is told
        said = (str(error).splitlines() or [""])[0]
        versions = ", ".join(f"{name} {version(name)}" for name in ("petastorm", "pyarrow"))
        return f"petastorm cannot be measured ({versions}): {type(error).__name__}: {said}"
    return loop


def _with_lists(table: pa.Table) -> pa.Table:
    """Return the rows with lists as Spark writes them, of any length."""
    kinds = {f.name: pa.list_(pa.float32()) for f in table.schema if f.name == "x"}
    return table.cast(pa.schema([f.with_type(kinds.get(f.name, f.type)) for f in table.schema]))
