"""The memory of rows in a rank, which differs from their size in a file.

Sizes of arrays depend only on rows and types: the order of shuffled rows depends on the sizes, and
must be the same for rows from the lake and from the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

# A Python str or bytes object and the reference to it in an array, without the characters.
_OBJECT_BYTES = 96
# A NumPy array that is a row of another array, without its values.
_ARRAY_BYTES = 128


def fixed_bytes(kind: Any) -> int | None:
    """Return the bytes of each value of an Arrow type, or None if values differ in size."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return fixed_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return fixed_bytes(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        width = fixed_bytes(kind.value_type)
        return None if width is None else width * int(kind.list_size)
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return _OBJECT_BYTES + int(kind.byte_width)
    try:
        return 0 if pa.types.is_null(kind) else max(1, int(kind.bit_width) // 8)
    except ValueError:
        return None


def leaf_types(kind: Any) -> list[Any]:
    """Return the types of the columns that Parquet stores for an Arrow type, in order."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return leaf_types(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return [kind.value_type]
    below = [leaf_types(kind.field(number).type) for number in range(kind.num_fields)]
    return list(itertools.chain(*below)) if below else [kind]


def stored_columns(schema: Any) -> Iterator[tuple[Any, range]]:
    """Yield each field with the numbers of the columns that Parquet stores for it."""
    end = 0
    for field in schema:
        begin, end = end, end + len(leaf_types(field.type))
        yield field, range(begin, end)


class FooterSizes:
    """Computes the bytes that all rows of a file take in memory, according to its footer.

    The result is exact if all values have a fixed size. Strings and binary count with their stored
    size, which is too small if values repeat.

    Args:
        schema: schema of the files.
    """

    def __init__(self, schema: Any) -> None:
        self._row_bytes = 0
        # Columns whose values, or numbers of values, differ in size, with the bytes of a value.
        self._columns: list[tuple[int, int | None]] = []
        for field, numbers in stored_columns(schema):
            width = fixed_bytes(field.type)
            if width is None:
                width = _ARRAY_BYTES if field.type.num_fields else 0
                widths = map(fixed_bytes, leaf_types(field.type))
                self._columns += zip(numbers, widths, strict=True)
            self._row_bytes += width

    def list_lengths(self, footer: Any) -> tuple[int, ...]:
        """Return the number of values of each row, for each column of lists of fixed-size values.

        Returns:
            0 for a column whose lists differ in length, according to the footer. Lists count as
            equally long if the average length is a whole number, and is the same in all row
            groups. A null list and an empty list count as one value.
        """
        numbers = [number for number, width in self._columns if width is not None]
        lengths: dict[int, int] = {}
        for group in map(footer.row_group, range(footer.num_row_groups)) if numbers else ():
            for number in numbers if group.num_rows else ():
                length, rest = divmod(int(group.column(number).num_values), int(group.num_rows))
                if rest or lengths.setdefault(number, length) != length:
                    lengths[number] = 0
        return tuple(lengths.values())

    def bytes_of(self, footer: Any) -> int:
        size = self._row_bytes * int(footer.num_rows)
        if self._columns:
            for group in map(footer.row_group, range(footer.num_row_groups)):
                size += sum(_chunk_bytes(group.column(n), width) for n, width in self._columns)
        return size


def _chunk_bytes(chunk: Any, width: int | None) -> int:
    if width is not None:
        return int(chunk.num_values) * width
    return int(chunk.num_values) * _OBJECT_BYTES + int(chunk.total_uncompressed_size)


def memory_of(array: Any, array_bytes: int = _ARRAY_BYTES) -> int:
    """Return the bytes of an Arrow array's rows as NumPy stores them, with strings as UTF-8.

    A dictionary-encoded array counts with its decoded size.

    Args:
        array_bytes: bytes of a NumPy array for each list, without its values; 0 if lists have a
            shape, or are not converted.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if (width := fixed_bytes(kind)) is not None:
        return width * len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return memory_of(array.storage, array_bytes)
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
    elif pa.types.is_struct(kind) or pa.types.is_map(kind):
        return int(array.nbytes)  # ranks get no batches of these
    elif kind.num_fields:
        return array_bytes * len(array) + memory_of(elements(array))
    else:
        is_view = kind in (pa.string_view(), pa.binary_view())
        lengths = pc.binary_length(array.cast(pa.large_binary()) if is_view else array)
    return _OBJECT_BYTES * len(array) + int(pc.sum(lengths).as_py() or 0)


def elements(array: Any) -> Any:
    """Return the elements of an Arrow array's lists, without the elements behind null lists.

    For an array without null lists `flatten()` returns the same, but is slower.
    """
    import pyarrow as pa

    types, kind = pa.types, array.type
    if not array.null_count and types.is_fixed_size_list(kind):
        return array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
    if array.null_count or not (types.is_list(kind) or types.is_large_list(kind)):
        return array.flatten()
    offsets = array.offsets
    first = int(offsets[0].as_py())
    return array.values.slice(first, int(offsets[-1].as_py()) - first)


def split_batch(
    batch: Any, size_of: Callable[[Any], int], max_bytes: int
) -> Iterator[tuple[Any, int]]:
    """Halve a batch until each part has at most `max_bytes`, or one row; yield parts and bytes."""
    rows, size = batch.num_rows, size_of(batch)
    if rows <= 1 or size <= max_bytes:
        yield batch, size
        return
    half = 1 << ((rows - 1).bit_length() - 1)
    yield from split_batch(batch.slice(0, half), size_of, max_bytes)
    yield from split_batch(batch.slice(half), size_of, max_bytes)
