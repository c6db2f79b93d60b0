"""Runs cells as a notebook's kernel does, and prints as JSON what fails of them in a rank."""

from __future__ import annotations

import os
import sys

from IPython.core.interactiveshell import InteractiveShell

CELLS = (
    """
from __future__ import annotations
import enum, inspect, json, multiprocessing, pickle, sys
from dataclasses import dataclass
from tests.unit.script_ranks import drive
""",
    """
class Color(enum.Enum):
    RED = 1

@dataclass
class Config:
    rate: float = 0.1
""",
    """
class Net:
    def forward(self, x):
        return x + 1
    @property
    def size(self):
        return 1

def square(x):
    return x * x  # in a cell

def nested(x):
    class Inner:
        def go(self):
            return x
    return Inner
""",
    """
def train(config, net):
    def values():
        for value in (Color.RED, config, net):
            assert type(pickle.loads(pickle.dumps(value))) is type(value)
    def sources():
        assert "# in a cell" in inspect.getsource(square)
        assert "return x + 1" in inspect.getsource(Net)
        assert "RED = 1" in inspect.getsource(Color)
        assert "rate: float" in inspect.getsource(Config)
        assert "return x" in inspect.getsource(nested(1))
    def main():
        main = sys.modules["__main__"]
        assert not hasattr(main, "__file__") and main.__spec__ is None and main.square is square
    def pools():
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                assert pool.map_async(square, [2]).get(60) == [4]
                assert pool.apply_async(inspect.getsource, [Config]).get(60).startswith("@data")
                assert pool.apply_async(type, [net]).get(60) is Net
    failed = {}
    for case in (values, sources, main, pools):
        try:
            case()
        except BaseException as error:
            failed[case.__name__] = f"{type(error).__name__}: {error}"
    return failed, net
""",
    """
failed, net = drive(train, Config(), Net())
assert type(net) is Net
print(json.dumps(failed))
""",
)

if __name__ == "__main__":
    # `drive` looks at `__main__`, which is the shell's by then.
    del os.environ["HIDDEN"]
    shell = InteractiveShell.instance()
    for cell in CELLS:
        done = shell.run_cell(cell, store_history=True)
        if not done.success:
            sys.exit(f"{done.error_before_exec or done.error_in_exec!r}")
