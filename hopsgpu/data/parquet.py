"""Parquet files: the driver reads their footers, the ranks read their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hopsgpu.data.sizes import stored_columns
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath


def read_footer(lake: LakePath, handle: Any) -> Any:
    """Return the footer of a Parquet file.

    Raises:
        ConfigError: the file is not a Parquet file.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_metadata(handle)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"{lake.url} is not a Parquet file: {str(error).splitlines()[0]}"
        ) from error


def parquet_file(handle: Any, footer: Any, buffer: int = 0, encoded: Iterable[str] = ()) -> Any:
    """Return a pyarrow.parquet.ParquetFile.

    Args:
        buffer: bytes of each column that are read at a time; 0 for all of a row group.
        encoded: paths of columns that stay dictionary-encoded.
    """
    from pyarrow import parquet

    return parquet.ParquetFile(
        handle,
        metadata=footer,
        buffer_size=buffer,
        # Pre-buffering would hold whole row groups in memory.
        pre_buffer=False,
        read_dictionary=list(encoded),
        # For Spark's timestamps: nanoseconds can only express times from 1677 to 2262.
        coerce_int96_timestamp_unit="us",
    )


def schema_of(footer: Any) -> Any:
    """Return a file's schema, without properties that may differ among the files of a table.

    The schema has no metadata, nullable columns without dictionaries, and small offsets. Rows are
    cast to it when they are read.
    """
    import pyarrow as pa

    # No byte is read: the footer is given.
    schema = parquet_file(pa.BufferReader(b""), footer).schema_arrow
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def instants_of(footer: Any) -> tuple[str, ...]:
    """Return the paths of columns whose timestamps are points in time, but without a time zone.

    Such columns have the type INT96, which Spark and Hive write. The path of a nested column begins
    with the name of the outermost column and a dot.
    """
    columns = (footer.schema.column(number) for number in range(len(footer.schema)))
    return tuple(column.path for column in columns if column.physical_type == "INT96")


def _plain_type(kind: Any) -> Any:
    import pyarrow as pa

    def below(field: Any) -> Any:
        return pa.field(field.name, _plain_type(field.type))

    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_large_string(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(below(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(below(kind.value_field), kind.list_size)
    if types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), below(kind.item_field))
    if types.is_struct(kind):
        return pa.struct([below(field) for field in kind])
    return kind


def text_columns(schema: Any, names: Sequence[str]) -> dict[int, bool]:
    """Return the stored columns of these fields that have strings or binary.

    Returns:
        Number of the column → whether its values are in lists.
    """
    return {
        numbers[0]: not _is_text(field.type)
        for field, numbers in stored_columns(schema)
        if field.name in names and _is_text(_innermost(field.type))
    }


def dictionary_columns(
    file: Callable[[Sequence[str]], Any],
    facts: Any,
    group: int,
    texts: Mapping[int, bool],
    longest: int,
    max_bytes: int,
) -> list[str]:
    """Return the paths of columns that should stay dictionary-encoded when they are read.

    A value that is stored once takes memory for each of its rows, whose number is in no footer. So
    such columns are decoded later, a few rows at a time. If all values of a column are short,
    decoding while reading is faster.

    Args:
        file: returns the ParquetFile in which columns with these paths stay dictionary-encoded.
        facts: the footer's facts of the row group.
        group: number of the row group.
        texts: from `text_columns`.
        longest: the most bytes of a short value.
        max_bytes: the most bytes of a column that is decoded while it is read, however long its
            values are.
    """
    import pyarrow.compute as pc

    of_rows: list[str] = []
    of_lists: list[str] = []
    for number, is_of_lists in texts.items():
        chunk = facts.column(number)
        # No value is longer than all that is stored of the column.
        largest = chunk.num_values * chunk.total_uncompressed_size
        if chunk.has_dictionary_page and largest > max_bytes:
            (of_lists if is_of_lists else of_rows).append(chunk.path_in_schema)
    if not of_rows:
        return of_lists
    # The first row has the dictionary with all values that the row group stores once.
    first = next(file(of_rows).iter_batches(1, [group], of_rows))
    lengths = (pc.max(pc.binary_length(first.column(n).dictionary)).as_py() for n in of_rows)
    return of_lists + [
        name
        for name, length in zip(of_rows, lengths, strict=True)
        if length is None or length > longest
    ]


def _innermost(kind: Any) -> Any:
    """Return the element type of nested lists; return other types unchanged."""
    import pyarrow as pa

    types = pa.types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
