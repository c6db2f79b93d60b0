"""The reports of a rank about the parts that it scores, as lines of its file of reports."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# The process can score; the report has no part.
READY = "ready"
NO_PART = -1
BEGUN = "begun"
ROWS = "rows"
DONE = "done"
FAILED = "failed"
# The user's function does not take a batch of the size of a part's last batch.
UNFIT = "unfit"

_KEY = "part"


@dataclass(frozen=True)
class PartReport:
    """One report of a part.

    Attributes:
        number: number of the part; NO_PART with READY.
        event: READY: the user's function and its model are loaded. BEGUN: the part's first rows are
            read. ROWS: some rows are scored. DONE: the part's file is on the lake. FAILED: the rank
            is about to fail. UNFIT: it is, because the user's function rejects small batches.
        file: name of its file, once it is done.
        schema: schema of the file, as Arrow serialises it.
    """

    number: int
    event: str
    rows: int = 0
    file: str = ""
    size: int = 0
    schema: bytes = b""

    def line(self, total: int, time: float) -> bytes:
        """Return the line, which also is a report of metrics.

        Args:
            total: number of rows that the process has scored.
        """
        part = {**vars(self), "schema": base64.b64encode(self.schema).decode()}
        content = {"time": time, "step": self.number, "metrics": {"rows": total}, _KEY: part}
        return json.dumps(content).encode() + b"\n"


class PartReports:
    """Parses the reports of a rank, from chunks of its file that may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> Iterator[PartReport]:
        """Yield the reports that the chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            report = _parse(line)
            if report is not None:
                yield report


def _parse(line: bytes) -> PartReport | None:
    try:
        content = json.loads(line)
        # Samples of GPUs and the user's own metrics are in the same file.
        fields: Mapping[str, Any] = content[_KEY]
        return PartReport(
            int(fields["number"]),
            str(fields["event"]),
            int(fields["rows"]),
            str(fields["file"]),
            int(fields["size"]),
            base64.b64decode(fields["schema"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
