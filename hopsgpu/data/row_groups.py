"""Fetches whole row groups from the lake, while other row groups are decoded."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hopsgpu.data.lake_file import open_lake_file
from hopsgpu.data.parquet import read_footer
from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.sizes import stored_columns
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath

T = TypeVar("T")

# The most bytes of a file that is read as a whole: to read its footer first would take longer.
SMALL_FILE_BYTES = 256 * 1024
# With the contents of small files that have several row groups.
_MAX_FOOTERS = 32


@dataclass(frozen=True)
class RowGroup:
    """A fetched row group of a file.

    Attributes:
        content: the bytes; None if there are more than `max_bytes` of the fetcher.
        is_small: whether the content is the whole file, of at most `SMALL_FILE_BYTES`.
    """

    lake: LakePath
    footer: Any
    content: FileRange | bytes | None

    @property
    def is_small(self) -> bool:
        return isinstance(self.content, bytes)

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Yield a pyarrow.NativeFile with the file's offsets, of the content if there is some."""
        import pyarrow as pa

        if isinstance(self.content, bytes):
            yield pa.BufferReader(self.content)
        elif self.content is not None:
            yield pa.PythonFile(self.content, mode="r")
        else:
            with open_lake_file(self.lake) as (handle, _):
                yield handle


class Fetcher:
    """Fetches some columns of row groups; thread-safe.

    Args:
        max_bytes: the most bytes of a row group that is fetched as a whole.
    """

    def __init__(self, shard: Shard, columns: Sequence[str], max_bytes: int) -> None:
        self._shard = shard
        self._numbers = [
            number
            for field, numbers in stored_columns(shard.arrow_schema)
            if field.name in columns
            for number in numbers
        ]
        self._max_bytes = max_bytes
        self._stopped = threading.Event()
        self._root = LakePath(shard.url, stop=self._stopped).with_client()
        self._footers: OrderedDict[int, Any] = OrderedDict()
        self._small_files: OrderedDict[int, RowGroup] = OrderedDict()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Stop the retries of fetches."""
        self._stopped.set()

    def fetch(self, part: Slice) -> RowGroup:
        """Return the row group of a slice.

        Raises:
            StoreError: the lake refused, or the file has changed since the shards were planned.
        """
        planned = self._shard.files[part.file]
        lake = self._root / planned.name if planned.name else self._root
        if planned.size <= SMALL_FILE_BYTES:
            return self._fetch_small(part.file, lake, planned)
        with open_lake_file(lake) as (handle, file):
            _check_unchanged(file.size, planned, lake)
            footer = self._footer(part.file, lake, handle)
            begin, end = self._range_of(footer.row_group(part.group))
            if end - begin > self._max_bytes:
                return RowGroup(lake, footer, None)
            file.seek(begin)
            return RowGroup(lake, footer, FileRange(begin, file.read(end - begin)))

    def _fetch_small(self, number: int, lake: LakePath, planned: ShardFile) -> RowGroup:
        import pyarrow as pa

        with self._lock:
            latest = self._small_files.get(number)
        if latest is not None:
            return latest
        # One byte more than there was, so that a file that has grown is noticed.
        content = lake.range(0, planned.size + 1)
        _check_unchanged(len(content), planned, lake)
        fetched = RowGroup(lake, read_footer(lake, pa.BufferReader(content)), content)
        if fetched.footer.num_row_groups > 1:
            self._remember(self._small_files, number, fetched)
        return fetched

    def _footer(self, number: int, lake: LakePath, handle: Any) -> Any:
        with self._lock:
            footer = self._footers.get(number)
        if footer is None:
            # Without the lock: two threads may read the same footer.
            footer = read_footer(lake, handle)
        self._remember(self._footers, number, footer)
        return footer

    def _remember(self, latest: OrderedDict[int, T], number: int, value: T) -> None:
        with self._lock:
            latest[number] = value
            latest.move_to_end(number)
            if len(latest) > _MAX_FOOTERS:
                latest.popitem(last=False)

    def _range_of(self, group: Any) -> tuple[int, int]:
        """Return the offsets in the file at which the columns begin and end."""
        ranges = []
        for number in self._numbers:
            column = group.column(number)
            begin = column.data_page_offset
            if column.has_dictionary_page:
                begin = min(begin, column.dictionary_page_offset)
            ranges.append((begin, begin + column.total_compressed_size))
        return min(begin for begin, _ in ranges), max(end for _, end in ranges)


def _check_unchanged(size: int, planned: ShardFile, lake: LakePath) -> None:
    if size != planned.size:
        raise StoreError(
            f"{lake.url} has changed since the launch: expected {planned.size} bytes, found"
            f" {size}; do not change data while a gang reads it"
        )


class FileRange:
    """A range of a file in memory, with the methods that pyarrow requires of a Python file.

    Offsets are those in the whole file.
    """

    def __init__(self, begin: int, content: memoryview) -> None:
        self._begin = begin
        self._content = content
        self._at = 0
        self.closed = False

    def read(self, size: int = -1) -> memoryview:
        first = self._at - self._begin
        end = len(self._content) if size < 0 else first + size
        part = self._content[first:end] if first >= 0 else self._content[:0]
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = self._begin + len(self._content)
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: end}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True
