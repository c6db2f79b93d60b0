"""`--begin-within`, with which a slow machine leaves out tests and says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import time

def test_first():
    time.sleep({seconds})

def test_second(own_tmpdir):
    pass
"""


def ran(directory: Path, seconds: float, *options: str) -> str:
    file = directory / "test_two.py"
    file.write_text(TESTS.format(seconds=seconds))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", f"--rootdir={directory}"]
    done = subprocess.run(
        [*command, "-ra", *options, str(file)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_what_has_not_begun_in_time_is_skipped_and_listed(tmp_path: Path) -> None:
    said = ran(tmp_path, 1.2, "--begin-within", "1")
    assert "1 passed, 1 skipped" in said
    assert "had not begun within 1 s" in said


def test_without_it_all_are_run(tmp_path: Path) -> None:
    assert "2 passed" in ran(tmp_path, 0.0)
