"""What a rank reports of its parts, among other lines of the same file."""

from __future__ import annotations

import json

import pytest

from hopsgpu.core.metrics import MetricsChunk
from hopsgpu.scoring.part_reports import BEGUN, DONE, PartReport, PartReports

REPORTS = [PartReport(3, BEGUN), PartReport(3, DONE, 100, "3-a.parquet", 7, b"\x00schema")]
LINES = b"".join(
    [
        REPORTS[0].line(0, 1.0),
        b'{"time": 1.0, "gpu": {"uuid": "GPU-1"}}\n{"time": 1, "step": 1, "metrics": {}}\ncut o\n',
        REPORTS[1].line(100, 2.0),
    ]
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reports_are_read_from_chunks_that_end_anywhere(size: int) -> None:
    parser = PartReports()
    chunks = [LINES[at : at + size] for at in range(0, len(LINES), size)]
    assert [report for chunk in chunks for report in parser.take(chunk)] == REPORTS


def test_part_reports_are_reports_of_metrics() -> None:
    chunk = MetricsChunk()
    chunk.add(REPORTS[1].line(100, 2.0))
    told = json.loads(chunk.flush())
    assert (told["step"], told["metrics"]) == (3, {"rows": 100})
