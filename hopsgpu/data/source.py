"""Parquet on the lake: the files, and the facts in their footers."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.data.calendars import refused_columns
from hopsgpu.data.lake_file import open_lake_file
from hopsgpu.data.parquet import instants_of, read_footer, schema_of
from hopsgpu.data.shuffle import ORDER_VERSION
from hopsgpu.data.sizes import footer_bytes
from hopsgpu.data.table_logs import (
    ICEBERG,
    ICEBERG_FOOTER_KEY,
    LoggedTable,
    find_mark,
    search_table,
)
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, FileStatus, LakePath

log = logging.getLogger(__name__)

_THREADS = 16
# The suffix of a file that `hdfs dfs -put` still writes.
_COPYING = "._COPYING_"


@dataclass(frozen=True)
class SourceFile:
    """A Parquet file.

    Attributes:
        name: path below the source's URL; "" if the URL is the file's own.
        groups: number of rows of each row group.
    """

    name: str
    size: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files with one schema.

    Attributes:
        url: URL of the directory, or of the one file.
        files: the files, sorted by name.
        row_bytes: estimated bytes of a row in memory, from the footers. The estimate is too small
            for repeated strings, and too large if only some columns are read.
        schema: schema of all files, as Arrow serialises it.
        refused: columns with dates or timestamps that cannot be converted, with the reasons.
        instants: paths of columns whose timestamps are points in time, in UTC, although their type
            has no time zone.
        unchecked: URLs that might belong to a table with a transaction log, but to which access was
            denied.
    """

    url: str
    files: tuple[SourceFile, ...]
    row_bytes: int
    schema: bytes
    refused: Mapping[str, str] = field(default_factory=dict)
    instants: frozenset[str] = frozenset()
    unchecked: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(sum(file.groups) for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def arrow_schema(self) -> Any:
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(self.schema))


def order_digest(source: ParquetSource, remainder: str, seed: int) -> str:
    """Return a digest of all that determines the rows of a rank and their order."""
    files = [(file.name, file.size, file.groups) for file in source.files]
    order = [ORDER_VERSION, files, source.row_bytes, source.schema.hex(), remainder, seed]
    return hashlib.sha256(json.dumps(order).encode()).hexdigest()


def _ignore_progress(read: int, files: int) -> None:
    return


def read_source(
    lake: LakePath, on_progress: Callable[[int, int], None] = _ignore_progress
) -> ParquetSource:
    """Read the footers of the Parquet files in a directory and below it, or of one file.

    As in Spark, files whose names begin with "_" or "." are skipped. Empty files, and files that
    `hdfs dfs -put` still writes (`._COPYING_`), are skipped too.

    Args:
        on_progress: called after each footer with the number of footers read and the number of
            files; an exception ends the reading.

    Raises:
        ConfigError: there is no row; a file is not Parquet; files have different columns; there
            are directories of partitions, whose columns are in no file; the data belongs to a
            table with a transaction log (`table_logs`); or a name has a character that ends the
            path of a URL.
        StoreError: nothing exists at the URL, or the lake refused.
    """
    status = lake.stat()
    directory = lake if status.is_directory else lake.parent
    search = search_table(directory)
    if search.table is not None:
        raise search.table.make_refusal(lake)
    if status.is_directory:
        names = sorted(_files_below(lake, ""))
    else:
        _check_complete(lake, status)
        names = [""]
    if not names:
        raise ConfigError(
            f"{lake.url} contains no Parquet file (empty files, files that are still being copied,"
            " and names that begin with '_' or '.' do not count)"
        )
    lake.with_client()
    log.debug("reads the footers of %d Parquet files in %s", len(names), lake.url)
    began = time.monotonic()
    footers = []
    with ThreadPoolExecutor(min(_THREADS, len(names))) as pool:
        try:
            for footer in pool.map(lambda name: _read_file(lake, name), names):
                footers.append(footer)
                on_progress(len(footers), len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    schema = footers[0].schema
    for file, other in ((footer.file, footer.schema) for footer in footers[1:]):
        if not other.equals(schema):
            raise ConfigError(
                f"{lake.url}: {names[0]} and {file.name} have different columns"
                f" ({_difference(schema, other)}); rewrite them with one schema"
            )
    files = tuple(footer.file for footer in footers)
    rows = sum(sum(file.groups) for file in files)
    log.info(
        "%s has %d rows in %d Parquet files; read their footers in %.1f s",
        lake.url,
        rows,
        len(files),
        time.monotonic() - began,
    )
    if not rows:
        raise ConfigError(f"{lake.url} contains Parquet files, but no rows")
    return ParquetSource(
        url=lake.url,
        files=files,
        row_bytes=max(1, sum(footer.row_bytes for footer in footers) // rows),
        schema=schema.serialize().to_pybytes(),
        # Reversed, so that the first file's reason for a column remains.
        refused={n: why for footer in reversed(footers) for n, why in footer.refused.items()},
        instants=frozenset(name for footer in footers for name in footer.instants),
        unchecked=search.unchecked,
    )


def _check_complete(lake: LakePath, status: FileStatus) -> None:
    if lake.url.endswith(_COPYING):
        raise ConfigError(f"{lake.url} is still being copied: wait until `hdfs dfs -put` ends")
    if not status.size:
        raise ConfigError(f"{lake.url} is empty: a Parquet file has at least its footer")


def _files_below(lake: LakePath, prefix: str) -> Iterator[str]:
    directory = lake / prefix.rstrip("/") if prefix else lake
    entries = directory.entries()
    if table := find_mark(directory, entries):
        raise table.make_refusal(lake)
    for entry in entries:
        is_empty = not entry.is_directory and not entry.size
        if is_empty or entry.name.startswith(("_", ".")) or entry.name.endswith(_COPYING):
            continue
        if UNSAFE_CHARACTERS.search(entry.name):
            raise ConfigError(
                f"{lake.url} contains {prefix + entry.name!r}, but data with '#', '?', ';' or"
                " control characters in its name cannot be read in place: rename it, or read it"
                " with Spark and pass the DataFrame"
            )
        if not entry.is_directory:
            yield prefix + entry.name
        elif "=" in entry.name:
            _check_partition(lake, directory / entry.name)
            raise ConfigError(
                f"{lake.url} is partitioned ({prefix}{entry.name}), and its files do not contain"
                " the partition columns: read it with Spark and pass the DataFrame"
            )
        else:
            yield from _files_below(lake, f"{prefix}{entry.name}/")


def _check_partition(lake: LakePath, directory: LakePath) -> None:
    """Check one partition of a table, down to its first file, for marks of a transaction log.

    Raises:
        ConfigError: there is a mark; Spark's own reader of Parquet would read old rows too.
    """
    entries = directory.entries()
    if table := find_mark(directory, entries):
        raise table.make_refusal(lake)
    below = (e.name for e in entries if e.is_directory and not e.name.startswith(("_", ".")))
    if name := min(below, default=""):
        _check_partition(lake, directory / name)


@dataclass(frozen=True)
class _FooterFacts:
    """The facts in a file's footer; `refused` and `instants` as in `ParquetSource`.

    Attributes:
        row_bytes: bytes of all its rows in memory.
    """

    file: SourceFile
    schema: Any
    row_bytes: int
    refused: Mapping[str, str]
    instants: tuple[str, ...]


def _read_file(lake: LakePath, name: str) -> _FooterFacts:
    file = lake / name if name else lake
    with open_lake_file(file) as (handle, opened_file):
        footer = read_footer(file, handle)
        schema = schema_of(handle, footer)
    if ICEBERG_FOOTER_KEY in (footer.metadata or {}):
        raise LoggedTable(ICEBERG, file.url, file.parent.url).make_refusal(lake)
    rows = tuple(footer.row_group(number).num_rows for number in range(footer.num_row_groups))
    return _FooterFacts(
        SourceFile(name, opened_file.size, rows),
        schema,
        footer_bytes(footer, schema),
        refused_columns(footer, schema, file.url),
        instants_of(footer),
    )


def columns_of(source: ParquetSource) -> dict[str, str]:
    """Return the names of the columns, and their types as Arrow writes them."""
    return {f.name: str(f.type) for f in source.arrow_schema}


def _difference(schema: Any, other: Any) -> str:
    mine, theirs = ({f"{f.name}: {f.type}" for f in fields} for fields in (schema, other))
    return ", ".join(sorted(mine ^ theirs)) or "in a different order"
