"""Dates and timestamps of Parquet files that were written in the hybrid calendar.

Spark 2, Spark 3 with `datetimeRebaseModeInWrite=LEGACY` and Hive count days before 1582-10-15 in
the Julian calendar; Arrow and NumPy count them in the proleptic Gregorian calendar. A file's
key-value metadata name its calendar. hopsgpu converts values exactly, as Spark does
(`RebaseDateTime` and `DataSourceUtils` of Spark 3.5), or refuses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.data.sizes import leaf_types, stored_columns
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_SPARK = "org.apache.spark."
# Spark before 2.4 wrote its schema, but not yet its version.
_SPARK_SCHEMA = "org.apache.spark.sql.parquet.row.metadata"
_HIVE_ROOT = re.compile(r"^(?:\w+ )*group (?:field_id=\S+ )?hive_schema \{", re.MULTILINE)
_UTC = re.compile(
    r"(?:Etc/)?(?:UTC|UCT|GMT|Zulu|Universal|Greenwich|GMT[+-]?0)|Z|(?:UTC|GMT)?[+-]00:00"
)
_DAY_SECONDS = 86_400
# 1582-10-15, on which the Gregorian calendar begins; days since 1970-01-01.
_GREGORIAN_DAY = -141_427
# 0000-03-01 of the Julian calendar; days since 1970-01-01.
_JULIAN_ORIGIN = -719_470
_FOUR_YEARS = 4 * 365 + 1
# 1900-01-01, since which Java's two sets of time zones agree; seconds since 1970-01-01.
_ZONES_AGREE = -2_208_988_800
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Rule:
    """The treatment of a column's old values: refused for a reason; converted without one."""

    reason: str | None = None


_CONVERT = Rule()


@dataclass(frozen=True)
class Calendars:
    """The rules for one file's values; None for values that are in Arrow's calendar.

    Attributes:
        instants: rule for timestamps that are stored as INT64.
        int96: rule for timestamps that are stored as INT96.
    """

    dates: Rule | None = None
    instants: Rule | None = None
    int96: Rule | None = None

    def rule_of(self, kind: Any, physical: str) -> Rule | None:
        """Return the rule for a stored column, by its Arrow type and its Parquet type."""
        import pyarrow as pa

        if pa.types.is_date(kind):
            return self.dates
        if not pa.types.is_timestamp(kind):
            return None
        if physical == "INT96":
            return self.int96
        # TIMESTAMP_NTZ: no writer that has this type uses the other calendar.
        return None if kind.tz is None else self.instants


def calendars_of(footer: Any) -> Calendars:
    """Return the rules for the calendars of a file's writer, from its footer."""
    metadata = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (footer.metadata or {}).items()
    }
    if f"{_SPARK}version" in metadata or _SPARK_SCHEMA in metadata:
        return _spark_calendars(metadata)
    # The text of a schema takes long to make, so it is made for files of parquet-mr only.
    if str(footer.created_by).startswith("parquet-mr") and (
        "writer.time.zone" in metadata or _HIVE_ROOT.search(str(footer.schema))
    ):
        return _hive_calendars(metadata)
    return Calendars()


def _spark_calendars(metadata: Mapping[str, str]) -> Calendars:
    match = re.match(r"(\d+)\.(\d+)", metadata.get(f"{_SPARK}version", ""))
    version = (int(match[1]), int(match[2])) if match else (2, 0)
    zone = metadata.get(f"{_SPARK}timeZone")
    timestamps = _CONVERT
    if zone is None or not _UTC.fullmatch(zone):
        timestamps = Rule(
            f"Spark wrote it with old timestamps in the legacy calendar of the time zone {zone}"
            if zone
            else "Spark 2 wrote it, in a time zone that the file does not name"
        )
    legacy = version < (3, 0) or f"{_SPARK}legacyDateTime" in metadata
    legacy_int96 = version < (3, 1) or f"{_SPARK}legacyINT96" in metadata
    return Calendars(
        dates=_CONVERT if legacy else None,
        instants=timestamps if legacy else None,
        int96=timestamps if legacy_int96 else None,
    )


def _hive_calendars(metadata: Mapping[str, str]) -> Calendars:
    proleptic = metadata.get("writer.date.proleptic")
    timestamps = Rule("Hive wrote it, whose old timestamps depend on its version and time zone")
    if proleptic == "true":
        exact = metadata.get("writer.zone.conversion.legacy") == "false"
        return Calendars(int96=None if exact else timestamps)
    unknown = Rule("Hive wrote it, and the file does not say in which calendar")
    dates = _CONVERT if proleptic == "false" else unknown
    return Calendars(dates=dates, instants=timestamps, int96=timestamps)


def refused_columns(footer: Any, schema: Any, url: str) -> dict[str, str]:
    """Return the columns that no rank can read, by row groups' statistics, with the reasons."""
    calendars = calendars_of(footer)
    refused: dict[str, str] = {}
    if calendars == Calendars():
        return refused
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    for field, numbers in stored_columns(schema):
        for number, kind in zip(numbers, leaf_types(field.type), strict=True):
            rule = calendars.rule_of(kind, footer.schema.column(number).physical_type)
            if rule is None or rule.reason is None:
                continue
            minimum = _minimum(groups, number)
            if minimum is not None and minimum < _first_safe(kind):
                refused[field.name] = _refusal(url, field.name, kind, rule.reason)
    return refused


def _minimum(groups: Iterable[Any], number: int) -> int | None:
    """Return a column's minimum in the statistics, or None. INT96 has none: it has no order."""
    minima = []
    for group in groups:
        chunk = group.column(number)
        statistics = None if chunk.physical_type == "INT96" else chunk.statistics
        if statistics is not None and statistics.has_min_max:
            minima.append(int(statistics.min_raw))
    return min(minima, default=None)


def check_readable(refused: Mapping[str, str], columns: Iterable[str]) -> None:
    """Check that the columns are not among those of `refused_columns`.

    Raises:
        ConfigError: a column has values whose meaning only their writer knows.
    """
    problems = [refused[name] for name in columns if name in refused]
    if problems:
        raise ConfigError("; ".join(problems))


def _refusal(url: str, column: str, kind: Any, reason: str) -> str:
    import pyarrow as pa

    is_date = pa.types.is_date(kind)
    what, before = ("dates", "1582-10-15") if is_date else ("timestamps", "1900-01-01")
    return (
        f"column {column!r} of {url} has {what} before {before}, which would be shifted: {reason}."
        " Leave the column out of columns=, or read the files with Spark (spark.read.option("
        "'datetimeRebaseMode', 'LEGACY').option('int96RebaseMode', 'LEGACY').parquet(…), in the"
        " session time zone of their writer), set spark.sql.parquet.datetimeRebaseModeInWrite and"
        " int96RebaseModeInWrite to CORRECTED, and pass the DataFrame"
    )


def to_gregorian(batches: Iterator[Any], footer: Any, schema: Any, url: str) -> Iterator[Any]:
    """Return a file's record batches with all dates and timestamps in Arrow's calendar.

    Raises:
        ConfigError: from the iterator: a value cannot be converted exactly.
    """
    calendars = calendars_of(footer)
    if calendars == Calendars():
        return batches
    rules: dict[str, list[Rule | None]] = {
        field.name: [
            calendars.rule_of(kind, footer.schema.column(number).physical_type)
            for number, kind in zip(numbers, leaf_types(field.type), strict=True)
        ]
        for field, numbers in stored_columns(schema)
    }
    if not any(rule for of_field in rules.values() for rule in of_field):
        return batches
    return (_convert_batch(batch, rules, url) for batch in batches)


def _convert_batch(batch: Any, rules: Mapping[str, list[Rule | None]], url: str) -> Any:
    import pyarrow as pa

    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if any(rules[field.name]):
            column = _convert_array(column, iter(rules[field.name]), field.name, url)
        columns.append(column)
    return pa.record_batch(columns, schema=batch.schema)


def _convert_array(array: Any, rules: Iterator[Rule | None], column: str, url: str) -> Any:
    """Return an Arrow array with converted values, by the rules of its leaves, in order."""
    import pyarrow as pa

    kind, types = array.type, pa.types
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        below = [_convert_array(array.field(n), rules, column, url) for n in range(kind.num_fields)]
        return pa.StructArray.from_arrays(below, fields=fields, mask=array.is_null())
    if types.is_map(kind):
        keys = _convert_array(array.keys, rules, column, url)
        items = _convert_array(array.items, rules, column, url)
        entries = pa.StructArray.from_arrays(
            [keys, items], fields=[kind.key_field, kind.item_field]
        )
        return _with_children(array, entries, 2)
    if types.is_list(kind) or types.is_large_list(kind):
        return _with_children(array, _convert_array(array.values, rules, column, url), 2)
    if types.is_fixed_size_list(kind):
        return _with_children(array, _convert_array(array.values, rules, column, url), 1)
    rule = next(rules)
    return array if rule is None else _convert_values(array, rule, column, url)


def _with_children(array: Any, below: Any, buffers: int) -> Any:
    import pyarrow as pa

    own_buffers = array.buffers()[:buffers]
    return pa.Array.from_buffers(
        array.type, len(array), own_buffers, array.null_count, array.offset, [below]
    )


def _first_safe(kind: Any) -> int:
    """Return the first value, in the type's unit, that means the same in both calendars."""
    import pyarrow as pa

    if pa.types.is_date(kind):
        return _GREGORIAN_DAY
    return _ZONES_AGREE * _PER_SECOND[str(kind.unit)]


def _convert_values(array: Any, rule: Rule, column: str, url: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    is_date = pa.types.is_date(kind)
    per_day = 1 if is_date else _DAY_SECONDS * _PER_SECOND[str(kind.unit)]
    limit = _first_safe(kind) if rule.reason is not None else _GREGORIAN_DAY * per_day
    integer = pa.int32() if is_date else pa.int64()
    numbers = array.cast(integer)
    minimum = pc.min(numbers).as_py()
    if minimum is None or minimum >= limit:
        return array
    if rule.reason is not None:
        raise ConfigError(_refusal(url, column, kind, rule.reason))
    values = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
    shifted = values + _shifts(values // per_day) * per_day
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    return pa.array(shifted, integer, mask=nulls).cast(kind)


def _shifts(days: Array) -> Array:
    """Return what to add to days since 1970-01-01 of the hybrid calendar, to keep their dates.

    A day that the Gregorian calendar does not have, such as 1500-02-29, becomes the next day.
    """
    import numpy as np

    # Years begin in March here, so that a leap day is the last day of its year.
    wide = days.astype(np.int64)
    years = (4 * (wide - _JULIAN_ORIGIN) + 3) // _FOUR_YEARS
    shifts = years // 400 - years // 100 + 2
    return np.where(wide < _GREGORIAN_DAY, shifts, 0).astype(days.dtype)
