"""`--begin-within` leaves out tests and says so; `--begin-at` says which is the first one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import time

def test_{first}():
    time.sleep({seconds})

def test_{second}(own_tmpdir):
    pass
"""


def ran(directory: Path, seconds: float, *options: str) -> str:
    """Say what pytest says of four tests in two files, the first of which takes some seconds."""
    one, two = directory / "test_one.py", directory / "test_two.py"
    one.write_text(TESTS.format(first="first", second="second", seconds=seconds))
    two.write_text(TESTS.format(first="third", second="fourth", seconds=0.0))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", f"--rootdir={directory}"]
    done = subprocess.run(
        [*command, "-v", "-ra", *options, str(one), str(two)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def order_of(said: str) -> list[str]:
    return re.findall(r"::test_(\w+) PASSED", said)


def test_what_has_not_begun_in_time_is_skipped_and_counted(tmp_path: Path) -> None:
    said = ran(tmp_path, 1.2, "--begin-within", "1")
    assert "1 passed, 3 skipped" in said
    assert "had not begun within 1 s" in said


def test_without_them_all_are_run_in_order(tmp_path: Path) -> None:
    assert order_of(ran(tmp_path, 0.0)) == ["first", "second", "third", "fourth"]


def test_the_tests_take_turns_to_be_the_first(tmp_path: Path) -> None:
    said = ran(tmp_path, 0.0, "--begin-at", "6", "-k", "not second")
    # Those that are not run do not count.
    assert order_of(said) == ["first", "third", "fourth"]
    assert order_of(ran(tmp_path, 0.0, "--begin-at", "7")) == ["fourth", "first", "second", "third"]
