"""A rank's shard: the rows of Parquet files that the rank reads."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hopsgpu.errors import StoreError

_VERSION = 3


class Slice(NamedTuple):
    """Consecutive rows of one row group.

    Attributes:
        file: number of the file among the shard's files.
        group: number of the row group in the file.
        first: number of the first row in the row group.
    """

    file: int
    group: int
    first: int
    rows: int


class ShardFile(NamedTuple):
    """A Parquet file from which a shard has rows.

    Attributes:
        name: path below the source's URL; "" if the URL is the file's own.
        size: bytes; if the file's size differs, the file was replaced.
    """

    name: str
    size: int


@dataclass(frozen=True)
class Shard:
    """The rows of one rank, in the order in which they are read.

    Attributes:
        url: URL of the directory, or of the one file.
        files: the files that have rows of the shard.
        row_bytes, schema, refused, has_even_lists: as in `source.ParquetSource`.
    """

    url: str
    files: tuple[ShardFile, ...]
    slices: tuple[Slice, ...]
    row_bytes: int
    schema: bytes
    refused: Mapping[str, str] = field(default_factory=dict)
    has_even_lists: bool = False

    @property
    def num_rows(self) -> int:
        return sum(part.rows for part in self.slices)

    @functools.cached_property
    def arrow_schema(self) -> Any:
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(self.schema))

    def dump(self) -> bytes:
        content = {
            "version": _VERSION,
            "url": self.url,
            "files": self.files,
            "slices": [list(column) for column in zip(*self.slices, strict=True)],
            "row_bytes": self.row_bytes,
            "schema": base64.b64encode(self.schema).decode(),
            "refused": dict(self.refused),
            "has_even_lists": self.has_even_lists,
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def load(cls, dumped: bytes) -> Shard:
        """Return the shard that `dump` encoded.

        Raises:
            StoreError: the bytes are not a shard, or one of another version of hopsgpu.
        """
        try:
            content: dict[str, Any] = json.loads(dumped)
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}, not {_VERSION}")
            return cls(
                url=content["url"],
                files=tuple(ShardFile(*file) for file in content["files"]),
                slices=tuple(Slice(*part) for part in zip(*content["slices"], strict=True)),
                row_bytes=content["row_bytes"],
                schema=base64.b64decode(content["schema"]),
                refused=dict(content["refused"]),
                has_even_lists=bool(content["has_even_lists"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"this shard is of another version of hopsgpu ({error!r}): use one version at the"
                " driver and in the ranks"
            ) from error
