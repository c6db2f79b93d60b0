"""A process that runs Python code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_python(code: str, path: Sequence[Path], *arguments: Path | str) -> list[str]:
    """Run code with a PYTHONPATH, outside any package; return the lines that it prints."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()
