"""What a script or a notebook defines is in ranks under its names, with its sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.ordinary import NAMES
from tests.unit.script_ranks import printed, told_by

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return told_by(SCRIPTS / "ordinary.py", tmp_path_factory.mktemp("ordinary"))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_script_defines_is_in_ranks_as_under_python(ordinary: Any, name: str) -> None:
    assert name not in ordinary["failed"], ordinary["failed"][name]


def test_values_of_a_scripts_classes_are_of_the_drivers_own(ordinary: Any) -> None:
    assert ordinary["not of the driver"] == []


def test_what_only_the_arguments_are_made_of_is_in_spawned_processes_too(ordinary: Any) -> None:
    assert ordinary["deep"] == "Deep"


MODULE = """
from hopsgpu.packaging.pickling import pickle_call
from tests.unit.script_ranks import run

def train():
    import sys
    from . import beside
    from multiprocessing import get_context
    with get_context("spawn").Pool(1) as pool:
        spawned = pool.apply_async(name).get(60)
    main = sys.modules["__main__"]
    return beside.VALUE, main.__spec__.name, main.__package__, spawned

def name():
    return __spec__.name

if __name__ == "__main__":
    print(*run(pickle_call(train, (), {})))
"""


def test_a_module_that_runs_as_main_is_that_of_its_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for file, source in (("__init__", ""), ("beside", "VALUE = 1"), ("job", MODULE)):
        (package / f"{file}.py").write_text(source)
    words = printed("-m", "package.job", path=str(tmp_path)).split()
    assert words == ["1", "package.job", "package", "package.job"]


def test_a_notebooks_cells_are_in_ranks(tmp_path: Path) -> None:
    assert told_by(SCRIPTS / "notebook.py", tmp_path) == {}


ALIASES = """
import json, pickle
from tests.unit.script_ranks import drive
type Vector[T] = list[T]
type Tree = dict[str, Tree]
class Box[T]:
    def __init__(self, item: T): self.item = item
def first[T](values: Vector[T], tree: Tree | None = None) -> T: return values[0]
def train():
    for one in (Vector, Tree, Box):
        assert pickle.loads(pickle.dumps(one)) is one
    assert Tree.__value__.__args__[1] is Tree
    return first([1])
if __name__ == "__main__":
    print(json.dumps(drive(train)))
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has type statements")
def test_aliases_of_types_are_in_ranks(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "aliases.py").write_text(ALIASES)
    assert told_by(tmp_path / "given" / "aliases.py", tmp_path) == 1
