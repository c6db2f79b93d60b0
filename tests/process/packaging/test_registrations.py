"""What a script registers in libraries at its top is registered in its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.script_ranks import printed, told_by

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "registered.py"


@pytest.mark.parametrize("library", ["python", "torch", "keras", "jax"])
def test_registrations_of_a_script_are_in_ranks(library: str, tmp_path: Path) -> None:
    told = told_by(SCRIPT, tmp_path, library)
    assert told["there"] == told["here"]
    if library == "jax":
        key = "FlattenedIndexKey(key=0)"
        assert told["back"] == [f"[(({key},), 1.0)]", f"[(({key},), 3.0)]"]


def test_no_library_is_imported_for_its_registrations() -> None:
    code = (
        "import sys\n"
        "from hopsgpu.packaging.pickling import pickle_call\n"
        "class Own: pass\n"
        "pickle_call(lambda: Own(), (Own(),), {})\n"
        "assert not {'jax', 'torch', 'keras', 'flax'} & sys.modules.keys()\n"
    )
    printed("-c", code)


OPERATOR = """
import torch
from hopsgpu import ConfigError
from hopsgpu.packaging.pickling import pickle_call

@torch.library.custom_op("mine::add_one", mutates_args=())
def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1

def direct():
    return add_one(torch.ones(1))

def by_name():
    return torch.ops.mine.add_one(torch.ones(1))

def other():
    return torch.ops.aten.add(torch.ones(1), 1)

if __name__ == "__main__":
    pickle_call(other, (), {})
    for function in (direct, by_name):
        try:
            pickle_call(function, (), {})
        except ConfigError as error:
            print(error)
"""


def test_an_operator_of_a_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OPERATOR)
    direct, by_name = printed(tmp_path / "script.py").splitlines()
    assert "'add_one' is a torch._library.custom_ops.CustomOpDef" in direct
    assert "torch.ops.mine.add_one, " in by_name
    for message in (direct, by_name):
        assert "the operator in a module" in message
