"""An agent whose ranks run with a Python environment, without Spark."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from hopsgpu.backends.spark.package_archive import pack_package
from hopsgpu.packaging.python_env.builder import ensure_built
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.storage.lake import LakePath
from tests.process.agent.test_agent import Gang, gang, reserve  # noqa: F401
from tests.travelling import PYTHON, whole_environment

LOOK = "[__import__('sys').executable, __import__('mine').A, __import__('hopsgpu').__file__]"


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """hopsgpu as Spark has it on a node: in a zip, before the agent starts."""
    package = pack_package(tmp_path / "package.zip")
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("LOCAL_DIRS", str(tmp_path / "disk"))
    return package


def on_lake(given: Path, tmp_path: Path) -> PythonEnv:
    return ensure_built(recipe_for(given), LakePath(f"file://{tmp_path}/lake"), threading.Event())


def test_ranks_run_in_an_interpreter_of_their_own(
    shipped: Path,
    gang: Gang,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "whole").mkdir()
    env = on_lake(whole_environment(tmp_path / "whole", {"mine": "A = 1\n"}), tmp_path)
    assert "problem" not in reserve(gang, python_env=env.as_fields()).fields
    gang.run(eval, LOOK)
    home = tmp_path / "disk/hopsgpu-environments" / env.digest
    assert pickle.loads(gang.wait_for("ended").payload) == [
        str(home / "bin" / PYTHON),
        1,
        f"{shipped}/hopsgpu/__init__.pyc",
    ]
    gang.run(eval, "1 / 0")
    told = gang.wait_for("ended")["outcome"]["traceback"]
    assert "ZeroDivisionError" in told and "hopsgpu" not in told, told
    # Forked: what needs a fresh interpreter is a warning.
    assert not [m["text"] for m in gang.seen if m.kind == "warning" and "forked" in m["text"]]


def test_environment_that_cannot_be_unpacked_is_an_error(gang: Gang, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "given").mkdir()
    (tmp_path / "given/mine.py").write_text("A = 2\n")
    env = on_lake(tmp_path / "given", tmp_path)
    told = reserve(gang, python_env={**env.as_fields(), "machine": "vax"})
    assert told["configured"] and "compiled for vax" in told["problem"]
    assert "problem" not in reserve(gang, python_env=env.as_fields()).fields
    gang.run(eval, LOOK)
    assert pickle.loads(gang.wait_for("ended").payload)[1] == 2


def test_modules_that_a_call_needs_are_looked_for_in_packages_too(
    gang: Gang,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/mine.py").write_text("A = 2\n")
    env = on_lake(tmp_path / "given", tmp_path).as_fields()
    assert reserve(gang, imports=["json", "mine", "nowhere"])["lacks"] == ["mine", "nowhere"]
    told = reserve(gang, imports=["json", "mine", "nowhere"], python_env=env)
    assert told["lacks"] == ["nowhere"]
