"""The plan of a score: its parts and what determines the output, kept for a run that resumes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.data.calendars import check_readable
from hopsgpu.data.columns import check_names, select_columns
from hopsgpu.data.source import ParquetSource, order_digest
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.scoring.parts import Part, parts_of, place_of, plan_bounds
from hopsgpu.storage.error_messages import DAMAGED
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB

FILE = "score.json"
_SCHEMA = 1
# The plan has the first row of each part: enough for a million parts.
_MAX_PLAN_BYTES = 16 * MIB


@dataclass
class ScorePlan:
    """The parts of a score; only the schema of the output is learned later.

    Attributes:
        bounds: how it is divided, as for `parts_of`.
        columns, keep: names of the columns that are predicted from, and that are kept.
        model: URL of the version, or None.
        code: digest of the user's code.
        output: URL of the output.
        schema: schema of the output, as Arrow serialises it; empty until it is known.
    """

    source: ParquetSource
    bounds: tuple[int, ...]
    columns: tuple[str, ...]
    keep: tuple[str, ...]
    model: str | None
    code: str
    output: str
    schema: bytes = b""
    parts: tuple[Part, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = parts_of(self.source, self.bounds)

    def check(self, part: Part, rows: int, schema: bytes) -> None:
        """Check what a worker has made of a part; the first one determines the schema.

        Raises:
            HopsGpuError: rows are missing, or the schema differs from that of other parts.
        """
        if rows != part.rows:
            raise HopsGpuError(
                f"{place_of(self.source, part)} gave {rows:,} rows instead of {part.rows:,}: the"
                " data was changed during the score"
            )
        self.schema = self.schema or schema
        if schema != self.schema and not arrow_schema(schema).equals(arrow_schema(self.schema)):
            raise HopsGpuError(
                f"predict returned other columns for {place_of(self.source, part)}:"
                f" {_show_schema(schema)}; earlier parts have {_show_schema(self.schema)}: return"
                " the same names and types for all batches"
            )

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return what a run that resumes the score must have in common with it, by argument."""
        return {
            "data": [self.source.url, order_digest(self.source, "keep", 0)],
            "columns": list(self.columns),
            "keep": list(self.keep),
            "model": self.model,
        }

    def write(self, run: LakePath) -> None:
        """Write the plan to the run's directory.

        Raises:
            StoreError: the lake refused.
        """
        content = {
            "schema": _SCHEMA,
            "output": self.output,
            "bounds": self.bounds,
            "code": self.code,
            **self.identity,
        }
        (run / FILE).replace(json.dumps(content).encode())


def arrow_schema(serialized: bytes) -> Any:
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(serialized))


def _show_schema(schema: bytes) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in arrow_schema(schema))


def chosen_columns(
    source: ParquetSource,
    columns: Sequence[str] | None,
    keep: Sequence[str],
    shapes: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the columns that are predicted from, and that are kept.

    Raises:
        ConfigError: one does not exist, or cannot be read, converted or kept.
    """
    schema = source.arrow_schema
    names = tuple(column.name for column in select_columns(schema, columns, shapes))
    kept = tuple(check_names(schema, keep, what="keep")) if keep else ()
    check_readable(source.refused, (*names, *kept))
    folded = [name.casefold() for name in kept]
    if alike := [name for name in kept if folded.count(name.casefold()) > 1]:
        raise ConfigError(
            f"keep={list(kept)!r}: {', '.join(alike)} differ only in upper and lower case, so that"
            " Spark could not read the output: keep one of them"
        )
    for name in kept:
        inside = sorted(path for path in source.instants if path.startswith(f"{name}."))
        if inside and name not in source.instants:
            raise ConfigError(
                f"keep: {name!r} has timestamps of type INT96 inside ({', '.join(inside)}), which"
                " would lose their time zone: select them as columns of their own, or write the"
                " table with spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS"
            )
    return names, kept


def new_score_plan(
    source: ParquetSource,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    model: str | None,
    code: str,
    output: str,
    executors: int,
) -> ScorePlan:
    """Return the plan of a new score.

    Args:
        names: as `chosen_columns` returned them.
        model, code, output: as in `ScorePlan`.
        executors: the most executors that score at a time.
    """
    bounds = plan_bounds(source, executors)
    return ScorePlan(source, bounds, *names, model, code, output)


class EarlierPlan:
    """The plan that an earlier run of a score has left.

    Raises:
        StoreError: there is none (kind "absent"), or it is damaged.
    """

    def __init__(self, run: LakePath) -> None:
        self._file = run / FILE
        try:
            self._content: Mapping[str, Any] = json.loads(self._file.read(_MAX_PLAN_BYTES))
            if self._content["schema"] != _SCHEMA:
                raise ValueError(f"schema {self._content['schema']}")
            self.output = str(self._content["output"])
            self.code = str(self._content["code"])
            self._bounds = tuple(int(bound) for bound in self._content["bounds"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{self._file.url} is damaged, or of another version: {error}", DAMAGED
            ) from error

    def resume(
        self,
        source: ParquetSource,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        model: str | None,
    ) -> ScorePlan:
        """Return the plan of the run that resumes it, with its own code.

        Raises:
            ConfigError: data, columns or model differ.
        """
        plan = ScorePlan(source, self._bounds, *names, model, self.code, self.output)
        for argument, value in plan.identity.items():
            if value != self._content.get(argument):
                was = "" if argument == "data" else f": it was {self._content.get(argument)!r}"
                raise ConfigError(
                    f"{argument}= differs from that of the score to resume{was}; parts of both"
                    " would be in one output: start a new score without resume="
                )
        return plan
