"""The way of the JVM's log lines to a terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from hopsgpu.backends.spark.console import pass_on

LINES = [b"WARN one\n", b"\xff two\n"]


def test_lines_go_to_stderr_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    pass_on(LINES)
    assert capfd.readouterr().err.splitlines() == [
        "WARN one",
        "\\xff two",
    ]


def test_lines_go_through_a_live_display(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Proxy(io.StringIO):
        rich_proxied_file = None

    shown = Proxy()
    monkeypatch.setattr(sys, "stdout", Proxy())
    monkeypatch.setattr(sys, "stderr", shown)
    pass_on(LINES)
    assert shown.getvalue() == "WARN one\n\\xff two\n"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("problem", [RuntimeError("of the display"), ValueError("closed")])
def test_lines_are_read_and_seen_though_the_display_fails(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Proxy(io.StringIO):
        rich_proxied_file = None

        def write(self, text: str) -> int:
            raise problem

    monkeypatch.setattr(sys, "stdout", Proxy())
    monkeypatch.setattr(sys, "stderr", Proxy())
    pass_on([b"WARN one\n", b"WARN two\n"])
    assert capfd.readouterr().err == "WARN one\nWARN two\n"


def test_where_nothing_can_be_written_all_is_read(tmp_path: Path) -> None:
    left = iter(LINES)
    kept, closed = os.dup(2), os.open(tmp_path, os.O_RDONLY)
    try:
        os.dup2(closed, 2)  # a directory takes no bytes
        pass_on(left)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(closed)
    assert next(left, None) is None
