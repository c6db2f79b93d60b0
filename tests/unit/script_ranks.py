"""For scripts that run as `__main__`: a function of theirs in a rank, without Spark."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.rank import files
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def drive(function: Callable[..., Any], *args: Any, hidden: bool = True) -> Any:
    """The value that a function has in a rank, which is a fresh interpreter.

    Args:
        function: of the running script.
        *args: for it.
        hidden: whether the script is removed first, where `HIDDEN` is set: nodes have no scripts.
    """
    call = pickle_call(function, args, {})
    if hidden and "HIDDEN" in os.environ:
        Path(sys.modules["__main__"].__file__ or "").unlink()
    return run(call)


def run(call: bytes) -> Any:
    """The value of a pickled call, as `drive` gives it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / files.WORK).mkdir()
        (directory / files.CALL).write_bytes(call)
        ran = subprocess.run(
            [sys.executable, "-m", "hopsgpu.rank.entry", name, str(os.getpid())],
            cwd=directory / files.WORK,
            env={"PYTHONPATH": str(ROOT), **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        outcome = json.loads((directory / files.OUTCOME).read_text())
        if outcome["status"] != "returned":
            raise AssertionError(f"{ran.stdout}\n{outcome}")
        return pickle.loads((directory / files.VALUE).read_bytes())


def told_by(script: Path, directory: Path, *args: str) -> Any:
    """What a script prints last, as JSON; it runs as a copy, which `drive` removes.

    Args:
        script: of tests/scripts.
        directory: for the copy.
        *args: of the script.
    """
    copy = Path(shutil.copy(script, directory))
    return json.loads(printed(copy, *args, HIDDEN="1").splitlines()[-1])


def printed(
    *arguments: str | Path, cwd: Path | None = None, path: str = "", **variables: str
) -> str:
    """The output of Python, which finds the checkout and, after it, the directories of `path`."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{path}".rstrip(":"), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
