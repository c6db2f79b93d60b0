"""How a score stands: rows, rate, and time left."""

from __future__ import annotations

from hopsgpu.core.scores import FailedPart
from hopsgpu.display.progress import score_progress_of
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.scoring.score_board import ScoreBoard


def board() -> ScoreBoard:
    board = ScoreBoard("s-1", PlacementTerms(0, 4), 1, score_progress_of("off"))
    board.set_parts(rows=1000, parts=10, kept_parts=2, kept_rows=200)
    return board


def test_rows_count_as_they_are_scored_and_once() -> None:
    there = board()
    there.record_rows(2, 40)
    assert there.status().scored == 240
    there.record_rows(2, 0)
    there.record_rows(3, 100)
    assert there.status().scored == 300
    there.record_kept(3, 100)
    status = there.status()
    assert (status.scored, status.done, there.rows_kept) == (300, 3, 300)


def test_left_out_parts_are_listed_in_order() -> None:
    there = board()
    for number in (7, 4):
        there.record_left_out(number, FailedPart(100 * number, 100, "somewhere", 3, "no"))
    assert [part.first for part in there.failed_parts] == [400, 700]
    assert there.status().failed == 2


def test_a_rate_is_unknown_before_there_is_one() -> None:
    there = board()
    status = there.status()
    assert status.rate is None and status.seconds_left is None
