from __future__ import annotations

from hopsgpu.worker.logs import LineSplitter


def test_lines_are_whole_wherever_chunks_end() -> None:
    lines = LineSplitter()
    assert lines.lines(b"one\ntw") == ["one"]
    assert lines.lines(b"o\r\n\xff\xfe\n") == ["two", "\\xff\\xfe"]
    assert lines.rest() == []
    assert lines.lines(b"last") == []
    assert lines.rest() == ["last"]
    assert lines.rest() == []


def test_a_line_without_end_is_shown_in_parts() -> None:
    lines = LineSplitter()
    shown = [text for _ in range(40) for text in lines.lines(b"x" * 50_000)] + lines.rest()
    assert sum(map(len, shown)) == 2_000_000
    assert max(map(len, shown)) <= 128 * 1024
