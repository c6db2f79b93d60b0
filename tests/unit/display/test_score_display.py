"""A score as people see it: plain lines, a terminal, a cell, and the card of its result."""

from __future__ import annotations

import pyarrow as pa

from hopsgpu.core.run_values import GpuSeconds, Timeline
from hopsgpu.core.scores import FailedPart, ScoreStatus
from hopsgpu.display.score_phrases import summary
from hopsgpu.display.score_screens import ScoreScene, lines_of, page
from hopsgpu.scoring.score_results import ScoreResult


def status(**given: object) -> ScoreStatus:
    parts: dict[str, object] = {
        "rows": 10_000_000,
        "scored": 2_500_000,
        "parts": 160,
        "done": 38,
        "rate": 250_000.0,
        "seconds_left": 30.0,
        "executors": 3,
        "most": 8,
        "waiting_for": "node2 is <full>",
    }
    return ScoreStatus("s-1", "running", 10.0, **(parts | given))  # type: ignore[arg-type]


def test_lines_tell_rows_a_second_and_the_time_left() -> None:
    said = summary(status())
    assert said.startswith("2,500,000 of 10,000,000 rows (25 %); 250,000 rows/s; 30")
    assert "left; on 3 of at most 8 executors; node2 is <full>" in said
    preparing = ScoreStatus("s-1", "preparing", 1.0, waiting_for="reading the footers of data")
    assert summary(preparing) == "preparing: reading the footers of data"
    assert summary(ScoreStatus("s-1", "waiting", 1.0)) == "waiting"
    over = ScoreStatus("s-1", "succeeded", 1.0, rows=10_000, scored=10_000)
    assert summary(over) == "succeeded: 10,000 rows"
    assert "2 parts left out" in summary(status(failed=2))


def test_a_terminal_shows_it_in_few_lines() -> None:
    scene = ScoreScene(status(), 0.0)
    scene.line(1, "node1", ["loading\x1b[31m"])
    shown = [str(line) for line in lines_of(scene.picture(0.0), 80, 10, "ascii")]
    assert shown[0].startswith("hopsgpu s-1: running") and len(shown) <= 10
    assert any("250,000 rows/s" in line for line in shown)
    assert any("[worker 1 node1] loading" in line for line in shown)


def test_a_cell_escapes_what_others_write() -> None:
    scene = ScoreScene(status(), 0.0)
    scene.line(1, "node1", ["<b>no"])
    told = page(scene.picture(0.0), "k")
    assert "&lt;b&gt;no" in told and "<b>no" not in told and "&lt;full&gt;" in told


def test_a_result_is_readable() -> None:
    result = ScoreResult(
        "s-1",
        "hdfs://lake/scored",
        9_900_000,
        pa.schema([("id", pa.int64()), ("y", pa.float64())]),
        (FailedPart(5, 100_000, "rows 5 to 100,004 of hdfs://lake/table", 3, "no"),),
        GpuSeconds(held=40.0, training=36.0, idle=4.0),
        Timeline(requested=999.0, granted=1000.0),
        warnings=("<odd>",),
    )
    assert "url='hdfs://lake/scored'" in repr(result) and "1 failed part" in repr(result)
    card = result._repr_html_()
    assert "id, y" in card and "9,900,000" in card and "&lt;odd&gt;" in card
