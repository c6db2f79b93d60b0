"""Another user plants modules in the directory in which somebody submits or runs a command."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hopsgpu
from hopsgpu.gpu.node import devices
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("sys.executable", "spec.executable", "python", "request.spec.executable")
# A rank is started like a script, in a new directory of its own.
RANKS = {"agent/fork_servers.py", "agent/process_daemon.py"}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory in which the import of a module of a common name leaves a file."""
    directory = tmp_path / "shared"
    directory.mkdir()
    for name in ("hopsgpu", "json", "ctypes", "shlex", "tarfile", "click"):
        (directory / f"{name}.py").write_text(
            f"open({str(tmp_path / 'stolen')!r}, 'w').write({name!r})\nraise SystemExit(1)\n"
        )
    return directory


def test_hopsgpu_submit_imports_nothing_from_the_current_directory(
    planted: Path, tmp_path: Path
) -> None:
    submit = tmp_path / "spark" / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text("#!/bin/sh\nexit 7\n")
    submit.chmod(0o755)
    ran = subprocess.run(
        ["sh", str(ROOT / "yarn-scripts" / "hopsgpu-submit"), "job.py"],
        cwd=planted,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(tmp_path / "spark"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert not (tmp_path / "stolen").exists()
    assert ran.returncode == 7, ran.stderr


def test_the_query_of_a_nodes_gpus_imports_nothing_from_the_current_directory(
    planted: Path, tmp_path: Path
) -> None:
    """The nodes' Python may be too old for -P."""
    subprocess.run(
        devices._reading_program(1.0),
        cwd=planted,
        capture_output=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert not (tmp_path / "stolen").exists()


def python_commands(path: Path) -> list[list[str]]:
    """Return the constant words after the interpreter in each command of a module."""
    words = [
        node.elts if isinstance(node, ast.List) else node.args
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Call)
    ]
    return [
        [word.value if isinstance(word, ast.Constant) else "" for word in rest]
        for first, *rest in filter(None, words)
        if ast.unparse(first) in PYTHONS
    ]


def test_every_python_that_hopsgpu_starts_ignores_the_current_directory() -> None:
    package = Path(hopsgpu.__file__).parent
    commands = {
        f"{path.relative_to(package)}": words
        for path in package.rglob("*.py")
        for words in python_commands(path)
        if {"-m", "-c"} & {*words}
    }
    assert len(commands) >= 12
    unsafe = {name for name, words in commands.items() if words[0] not in ("-P", "-I")}
    assert unsafe == RANKS
