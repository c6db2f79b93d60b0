"""Parquet on the lake: the files, and the facts in their footers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hopsgpu.data.calendars import refused_columns
from hopsgpu.data.footer_cache import FooterCache, FooterFacts
from hopsgpu.data.lake_file import open_lake_file
from hopsgpu.data.parquet import instants_of, read_footer, schema_of
from hopsgpu.data.shuffle import ORDER_VERSION
from hopsgpu.data.sizes import FooterSizes
from hopsgpu.data.table_logs import (
    ICEBERG,
    ICEBERG_FOOTER_KEY,
    LoggedTable,
    find_mark,
    search_table,
)
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, FileStatus, LakePath
from hopsgpu.units import MIB

log = logging.getLogger(__name__)

# Threads that read footers, and the most footers that one of them reads by one call.
THREADS = 16
_FOOTERS_PER_CALL = 32
# Layouts of files that are remembered: nearly always, all files of a table have the same.
_LAYOUTS = 16
# A Parquet file ends with its footer, the footer's length in four bytes, and these.
_MAGIC = b"PAR1"
_TRAILER_BYTES = 8
# The bytes that are read at the end of a file for its footer, and the most of them.
_MIN_TAIL_BYTES = 64 * 1024
_MAX_TAIL_BYTES = 4 * MIB
# The key of the schema that Arrow stores beside Parquet's.
_ARROW_SCHEMA = b"ARROW:schema"
# The suffix of a file that `hdfs dfs -put` still writes.
_COPYING = "._COPYING_"


class SourceFile(NamedTuple):
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
        has_even_lists: whether there are lists of fixed-size values, and those of each column have
            one length, according to the footers.
        unchecked: URLs that might belong to a table with a transaction log, but to which access was
            denied.
    """

    url: str
    files: tuple[SourceFile, ...]
    row_bytes: int
    schema: bytes
    refused: Mapping[str, str] = field(default_factory=dict)
    instants: frozenset[str] = frozenset()
    has_even_lists: bool = False
    unchecked: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(sum(file.groups) for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def arrow_schema(self) -> Any:
        return _load_schema(self.schema)


def order_digest(source: ParquetSource, remainder: str, seed: int) -> str:
    """Return a digest of all that determines the rows of a rank and their order."""
    files = [(file.name, file.size, file.groups) for file in source.files]
    schema = [source.schema.hex(), source.has_even_lists]
    order = [ORDER_VERSION, files, source.row_bytes, schema, remainder, seed]
    return hashlib.sha256(json.dumps(order).encode()).hexdigest()


def _ignore_progress(read: int, files: int) -> None:
    return


def read_source(
    lake: LakePath,
    on_progress: Callable[[int, int], None] = _ignore_progress,
    cache: FooterCache | None = None,
) -> ParquetSource:
    """Read the footers of the Parquet files in a directory and below it, or of one file.

    As in Spark, files whose names begin with "_" or "." are skipped. Empty files, and files that
    `hdfs dfs -put` still writes (`._COPYING_`), are skipped too.

    Args:
        on_progress: called after each footer with the number of footers read and the number of
            footers to read; an exception ends the reading.
        cache: has facts of files that were read before; the footers of files that have not changed
            since are not read again.

    Raises:
        ConfigError: there is no row; a file is not Parquet; files have different columns; there
            are directories of partitions, whose columns are in no file; the data belongs to a
            table with a transaction log (`table_logs`); or a name has a character that ends the
            path of a URL.
        StoreError: nothing exists at the URL, or the lake refused.
    """
    began, listed_at = time.monotonic(), time.time()
    status = lake.stat()
    directory = lake if status.is_directory else lake.parent
    search = search_table(directory)
    if search.table is not None:
        raise search.table.make_refusal(lake)
    if status.is_directory:
        listed = dict(sorted(_files_below(lake, "")))
    else:
        _check_complete(lake, status)
        listed = {"": status}
    if not listed:
        raise ConfigError(
            f"{lake.url} contains no Parquet file (empty files, files that are still being copied,"
            " and names that begin with '_' or '.' do not count)"
        )
    lake.with_client()
    earlier = cache.load(lake.url) if cache is not None else None
    facts = {} if earlier is None else _select_unchanged(earlier.files, listed)
    unread = [(name, entry) for name, entry in listed.items() if name not in facts]
    log.debug("reads the footers of %d of %d files in %s", len(unread), len(listed), lake.url)
    first = next(iter(facts), "")
    schema: Any = _load_schema(earlier.schema) if earlier is not None and facts else None
    with contextlib.closing(_read_footers(lake, unread)) as footers:
        for number, (read, other) in enumerate(footers, 1):
            if schema is None:
                first, schema = read.name, other
            elif other is not schema and not other.equals(schema):
                raise ConfigError(
                    f"{lake.url}: {first} and {read.name} have different columns"
                    f" ({_difference(schema, other)}); rewrite them with one schema"
                )
            facts[read.name] = read
            on_progress(number, len(unread))
    in_order = [facts[name] for name in listed]
    encoded: bytes = schema.serialize().to_pybytes()
    if cache is not None and unread:
        cache.store(lake.url, encoded, in_order, listed_at)
    source = _source_of(lake.url, in_order, encoded, search.unchecked)
    log.info(
        "%s has %d rows in %d Parquet files; read the footers of %d in %.1f s",
        lake.url,
        source.num_rows,
        len(in_order),
        len(unread),
        time.monotonic() - began,
    )
    return source


def _select_unchanged(
    earlier: Mapping[str, FooterFacts], listed: Mapping[str, FileStatus]
) -> dict[str, FooterFacts]:
    return {
        name: facts
        for name, status in listed.items()
        if (facts := earlier.get(name)) is not None
        and (facts.size, facts.modified) == (status.size, status.modified)
    }


def _load_schema(encoded: bytes) -> Any:
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(encoded))


def _source_of(
    url: str, files: Sequence[FooterFacts], schema: bytes, unchecked: tuple[str, ...]
) -> ParquetSource:
    rows = sum(sum(file.groups) for file in files)
    if not rows:
        raise ConfigError(f"{url} contains Parquet files, but no rows")
    return ParquetSource(
        url=url,
        files=tuple(SourceFile(file.name, file.size, file.groups) for file in files),
        row_bytes=max(1, sum(file.row_bytes for file in files) // rows),
        schema=schema,
        # Reversed, so that the first file's reason for a column remains.
        refused={name: why for file in reversed(files) for name, why in file.refused.items()},
        instants=frozenset(name for file in files for name in file.instants),
        has_even_lists=_has_even_lists(files),
        unchecked=unchecked,
    )


def _has_even_lists(files: Sequence[FooterFacts]) -> bool:
    different = {file.list_lengths for file in files if sum(file.groups)}
    lengths = different.pop() if len(different) == 1 else ()
    return bool(lengths) and all(lengths)


def _check_complete(lake: LakePath, status: FileStatus) -> None:
    if lake.url.endswith(_COPYING):
        raise ConfigError(f"{lake.url} is still being copied: wait until `hdfs dfs -put` ends")
    if not status.size:
        raise ConfigError(f"{lake.url} is empty: a Parquet file has at least its footer")


def _files_below(lake: LakePath, prefix: str) -> Iterator[tuple[str, FileStatus]]:
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
            yield prefix + entry.name, entry
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
class _Layout:
    """Properties that files with the same layout have in common.

    Attributes:
        schema: the files' schema, without properties that may differ.
    """

    schema: Any
    sizes: FooterSizes
    instants: tuple[str, ...]


class _FooterReader:
    """Reads footers of one table's files; thread-safe."""

    def __init__(self, lake: LakePath) -> None:
        self._lake = lake
        self._tail_bytes = _MIN_TAIL_BYTES
        # The conversion of a schema takes longer than the read of a footer.
        self._layout_of = functools.lru_cache(_LAYOUTS)(_make_layout)

    def read(self, name: str, status: FileStatus) -> tuple[FooterFacts, Any]:
        """Return the facts in a file's footer, and its schema."""
        file = self._lake / name if name else self._lake
        size, footer = self._read_footer(file, status)
        metadata = footer.metadata or {}
        if ICEBERG_FOOTER_KEY in metadata:
            raise LoggedTable(ICEBERG, file.url, file.parent.url).make_refusal(self._lake)
        # Without the first line, which has the address of the object.
        text = str(footer.schema).partition("\n")[2]
        layout = self._layout_of(_LayoutKey(text, metadata.get(_ARROW_SCHEMA), footer))
        groups = tuple(footer.row_group(number).num_rows for number in range(footer.num_row_groups))
        facts = FooterFacts(
            name,
            size,
            status.modified,
            groups,
            layout.sizes.bytes_of(footer),
            layout.sizes.list_lengths(footer),
            refused_columns(footer, layout.schema, file.url),
            layout.instants,
        )
        return facts, layout.schema

    def _read_footer(self, file: LakePath, status: FileStatus) -> tuple[int, Any]:
        """Return the file's size and its footer."""
        import pyarrow as pa

        size = status.size
        # By one request if the footer is no longer than those of other files.
        tail = file.range(max(0, size - self._tail_bytes), size)
        if tail.endswith(_MAGIC):
            footer_bytes = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
            if footer_bytes <= len(tail):
                # Offsets in a footer are those in the file: only the footer is read.
                return size, read_footer(file, pa.BufferReader(tail))
            self._tail_bytes = max(self._tail_bytes, min(footer_bytes * 5 // 4, _MAX_TAIL_BYTES))
        # The footer is longer, or encrypted, or the file was replaced since the listing.
        with open_lake_file(file) as (handle, opened):
            return opened.size, read_footer(file, handle)


@dataclass(frozen=True)
class _LayoutKey:
    """A footer, compared by the text of its schema and by Arrow's own schema."""

    text: str
    arrow: bytes | None
    footer: Any = field(compare=False)


def _make_layout(key: _LayoutKey) -> _Layout:
    schema = schema_of(key.footer)
    return _Layout(schema, FooterSizes(schema), instants_of(key.footer))


def _read_footers(
    lake: LakePath, files: Sequence[tuple[str, FileStatus]]
) -> Generator[tuple[FooterFacts, Any], None, None]:
    """Yield the facts and the schema of each file, in order."""
    reader = _FooterReader(lake)
    count = max(1, min(_FOOTERS_PER_CALL, len(files) // (4 * THREADS)))
    parts = [files[first : first + count] for first in range(0, len(files), count)]
    with ThreadPoolExecutor(max(1, min(THREADS, len(parts)))) as pool:
        try:
            read = pool.map(lambda part: list(itertools.starmap(reader.read, part)), parts)
            yield from itertools.chain.from_iterable(read)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def columns_of(source: ParquetSource) -> dict[str, str]:
    """Return the names of the columns, and their types as Arrow writes them."""
    return {f.name: str(f.type) for f in source.arrow_schema}


def _difference(schema: Any, other: Any) -> str:
    mine, theirs = ({f"{f.name}: {f.type}" for f in fields} for fields in (schema, other))
    return ", ".join(sorted(mine ^ theirs)) or "in a different order"
