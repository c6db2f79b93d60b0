"""Tables as values."""

from __future__ import annotations

import pyarrow as pa

from hopsgpu.data.source import ParquetSource, SourceFile

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.float64())])


def source(*files: tuple[int, ...], row_bytes: int = 16) -> ParquetSource:
    """A table of files with so many rows in each row group."""
    named = tuple(SourceFile(f"part-{n}.parquet", 1000, groups) for n, groups in enumerate(files))
    return ParquetSource("hdfs://lake/table", named, row_bytes, SCHEMA.serialize().to_pybytes())
