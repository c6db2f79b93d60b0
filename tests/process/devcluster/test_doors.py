"""`make demo` and `make test` on a machine whose Python has no packages yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).parents[3]
_MAKES_OWN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")


def checks(**variables: str) -> subprocess.CompletedProcess[str]:
    """Return the first commands of both, for a Python without site-packages."""
    # As from a shell, although `make test` may run this.
    environ = {name: value for name, value in os.environ.items() if name not in _MAKES_OWN}
    return subprocess.run(
        ["make", "--no-print-directory", "java", f"PYTHON={sys.executable} -S"],
        cwd=ROOT,
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_a_python_without_packages_is_enough_to_look_for_java() -> None:
    ran = checks()
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_that_there_is_no_java_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    (tmp_path / "make").symlink_to("/usr/bin/make")
    ran = checks(PATH=str(tmp_path), SHELL="/bin/sh")
    assert ran.returncode == 2
    assert "hopsgpu: JAVA_HOME is not set and there is no java on the PATH" in ran.stderr
    assert "Traceback" not in ran.stderr
