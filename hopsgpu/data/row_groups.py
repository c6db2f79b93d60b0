"""Fetches whole row groups from the lake, while other row groups are decoded."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.data.lake_file import open_lake_file
from hopsgpu.data.parquet import read_footer
from hopsgpu.data.shard import Shard, Slice
from hopsgpu.data.sizes import stored_columns
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath

_MAX_FOOTERS = 32


@dataclass(frozen=True)
class RowGroup:
    """A fetched row group of a file.

    Attributes:
        content: the bytes, as a file for pyarrow; None if there are more than `max_bytes` of the
            fetcher.
    """

    lake: LakePath
    footer: Any
    content: FileRange | None


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
        with open_lake_file(lake) as (handle, file):
            if file.size != planned.size:
                raise StoreError(
                    f"{lake.url} has changed since the launch: expected {planned.size} bytes, found"
                    f" {file.size}; do not change data while a gang reads it"
                )
            footer = self._footer(part.file, lake, handle)
            begin, end = self._range_of(footer.row_group(part.group))
            if end - begin > self._max_bytes:
                return RowGroup(lake, footer, None)
            file.seek(begin)
            return RowGroup(lake, footer, FileRange(begin, file.read(end - begin)))

    def _footer(self, number: int, lake: LakePath, handle: Any) -> Any:
        with self._lock:
            footer = self._footers.get(number)
        if footer is None:
            # Without the lock: two threads may read the same footer.
            footer = read_footer(lake, handle)
        with self._lock:
            self._footers[number] = footer
            self._footers.move_to_end(number)
            if len(self._footers) > _MAX_FOOTERS:
                self._footers.popitem(last=False)
        return footer

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
