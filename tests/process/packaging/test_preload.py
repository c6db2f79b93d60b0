"""What a fork server is told to import, for functions of a user's own modules."""

from __future__ import annotations

import ast
import functools
import importlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hopsgpu.agent.fork_servers import ForkServerProcess, find_server
from hopsgpu.agent.json_lines import JsonLineSocket
from hopsgpu.agent.rank_environment import ServerSpec
from hopsgpu.packaging.modules import PackedModules, pack_modules
from hopsgpu.packaging.preload import PRELOADABLE, likely_imports, scan_function
from tests.unit.script_ranks import printed

NONE = pack_modules([])


def preloads(function: Callable[..., Any], modules: PackedModules) -> tuple[str, ...]:
    return scan_function(function, modules).imports


Project = Callable[..., tuple[Any, PackedModules]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Writes modules, imports `own.train`, and packs them all."""

    def write(**sources: str) -> tuple[Any, PackedModules]:
        (tmp_path / "own").mkdir()
        for name, source in {"__init__": "", **sources}.items():
            (tmp_path / "own" / f"{name}.py").write_text(source)
        return importlib.import_module("own.train"), pack_modules([tmp_path])

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def nested() -> Any:
    def inner() -> Any:
        import torch.nn.functional

        return torch.nn.functional

    return [inner for _ in range(2)]


def from_inside() -> Any:
    from tensorflow import keras

    return keras


def with_global() -> Any:
    return np.zeros(1)


def nothing() -> None:
    import json

    json.dumps({})


class Trainer:
    def __call__(self) -> Any:
        import jax  # type: ignore[import-not-found]

        return jax


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (nothing, ()),
        (nested, ("torch",)),
        (from_inside, ("tensorflow",)),
        (with_global, ("numpy",)),
        (functools.partial(nested), ("torch",)),
        (functools.partial(nothing, np.float32), ("numpy",)),
        (functools.partial(nothing, np.zeros(1)), ("numpy",)),
        (logged(nested), ("torch",)),
        (functools.cache(nested), ("torch",)),
    ],
)
def test_imports_of_a_function(function: Callable[..., Any], found: tuple[str, ...]) -> None:
    assert preloads(function, NONE) == found


def test_closures_and_defaults() -> None:
    array = np.zeros(1)

    def closed() -> Any:
        return array

    def defaulted(module: Any = np) -> Any:
        return module

    assert preloads(closed, NONE) == ("numpy",)
    assert preloads(defaulted, NONE) == ("numpy",)


@pytest.mark.parametrize(
    ("train", "others", "found"),
    [
        (
            "from own import data\ndef train():\n    from .model import Net\n    return Net\n",
            {
                "data": "import sklearn.base\ndef unused():\n    import pyarrow\n",
                "model": "from .layers import *\n",
                "layers": "raise RuntimeError('nobody runs it')\nimport torch.nn as nn\n",
            },
            ("torch", "sklearn", "sklearn.base"),
        ),
        # Modules that are not imported do not count.
        (
            "def train():\n    import torch\n",
            {"other": "import tensorflow\nimport jax\n", "train2": "from . import other\n"},
            ("torch",),
        ),
        # Other functions in the same modules do not count.
        (
            "from own import other\ndef f():\n    import jax\ndef train():\n    import torch\n",
            {"other": "import pyarrow\ndef g():\n    import tensorflow\n"},
            ("torch", "pyarrow"),
        ),
        (
            "import own.other\ndef train():\n    import torch\n    own.other.f()\n",
            {"other": "def f(): import tensorflow"},
            ("torch", "tensorflow"),
        ),
        (
            "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    import tensorflow\nelse:\n    import pyarrow as tensorflow\n"
            "def train(x: tensorflow.Tensor): ...\n",
            {},
            ("pyarrow",),
        ),
        # Circles and modules that do not parse.
        (
            "def train():\n    from . import a, broken\n    return train\n",
            {
                "a": "from . import b\nimport torch\n",
                "b": "from .a import *\nfrom .... import far\n",
                "broken": "import tensorflow )\n",
            },
            ("torch",),
        ),
        # Submodules count where they take long to import.
        (
            "def train():\n    import torch.nn as nn, scipy.stats\n"
            "    from sklearn.linear_model import Ridge\n    return Ridge, nn, scipy\n",
            {},
            (
                *("torch", "scipy", "sklearn"),
                *("scipy.stats", "sklearn.linear_model", "sklearn.linear_model.Ridge"),
            ),
        ),
    ],
)
def test_imports_of_the_users_modules(
    project: Project, train: str, others: dict[str, str], found: tuple[str, ...]
) -> None:
    module, packed = project(train=train, **others)
    assert preloads(module.train, packed) == found


def test_methods_of_the_users_classes(project: Project) -> None:
    source = (
        "class Base:\n    def __call__(self):\n        return self.fit()\n"
        "class Trainer(Base):\n    def fit(self):\n        import jax\n"
        "def train():\n    return Trainer()()\n"
    )
    train, packed = project(train=source)
    assert preloads(train.train, packed) == ("jax",)
    assert preloads(train.Trainer(), packed) == ("jax",)
    assert preloads(train.Trainer().fit, packed) == ("jax",)


def test_a_sum_too_long_to_descend(project: Project) -> None:
    train, modules = project(
        train="from own import deep, long\ndef train_fn():\n    return deep, long\n",
        long=f"import pandas\ntext = {' + '.join(['1'] * 900)}\n",
        deep="",
    )
    (Path(train.__file__).parent / "deep.py").write_text(f"x = {'-' * 100_000}1\n")
    assert preloads(train.train_fn, modules) == ("pandas",)
    modules = pack_modules([Path(train.__file__).parents[1]])
    assert preloads(train.train_fn, modules) == ("pandas",), "what cannot be parsed is passed over"


def test_threads_that_parse_beside_each_other(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, modules = project(train="import pandas\ndef train_fn():\n    return pandas\n")
    parse, disturbed = ast.parse, ["once", "twice"]

    def parse_disturbed(source: str) -> ast.Module:
        if disturbed:
            raise SystemError(f"AST constructor recursion depth mismatch ({disturbed.pop()})")
        return parse(source)

    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", parse_disturbed)
        found = preloads(train.train_fn, modules)
    assert (found, disturbed) == (("pandas",), [])


def test_a_users_module_of_a_known_name(project: Project, tmp_path: Path) -> None:
    """It may do anything when it is imported, and is not the same for every function."""
    (tmp_path / "keras.py").write_text("")
    train, packed = project(train="def train():\n    import keras\n")
    assert preloads(train.train, packed) == ()


def test_a_script(tmp_path: Path) -> None:
    """What a script imports for its own use only does not count; what the function uses does."""
    (tmp_path / "mine.py").write_text("import torch\n")
    (tmp_path / "script.py").write_text(
        "import json, numpy\nimport sklearn as unused\n"
        "from hopsgpu.packaging.preload import scan_function\n"
        "from hopsgpu.packaging.modules import pack_modules, import_roots\n"
        "def net():\n    import mine\n    return numpy\n"
        "def train():\n    return net()\n"
        "print(*scan_function(train, pack_modules(import_roots(train))).imports)\n"
    )
    assert printed("script.py", cwd=tmp_path).split() == ["torch", "numpy"]


def test_nothing_heavy_is_imported_at_the_driver() -> None:
    code = (
        "import sys\nfrom hopsgpu.packaging.preload import scan_function, PRELOADABLE\n"
        "from hopsgpu.packaging.modules import pack_modules\n"
        "def train():\n    import torch, tensorflow, jax, keras, sklearn\n"
        "print(*scan_function(train, pack_modules([])).imports)\n"
        "assert not set(PRELOADABLE) & set(sys.modules)\n"
    )
    imports = printed("-c", code).split()
    assert len(imports) == 5 and imports == [p for p in PRELOADABLE if p in imports]


@pytest.mark.parametrize(
    ("source", "compiles"),
    [
        ("def train():\n    import torch\n    torch.optim.SGD([])\n", True),
        ("def train():\n    from torch.optim import SGD\n", True),
        ("def train():\n    from torch.nn.parallel import DistributedDataParallel as D\n", True),
        ("def make(t): t.optim.SGD([])\ndef train():\n    import torch\n    make(torch)\n", True),
        ("def train():\n    import torch\ndef other(t): t.optim.SGD([])\n", False),
        ("def train(solver): solver.optim()\n", False),
    ],
)
def test_torchs_compiler_is_imported_ahead_where_an_optimizer_is_made(
    project: Project, source: str, compiles: bool
) -> None:
    train, packed = project(train=source)
    assert ("torch._dynamo" in preloads(train.train, packed)) is compiles


def test_a_gang_that_is_held_for_torch_has_its_compiler_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("torch", "tensorflow", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert likely_imports() == ("torch", "torch._dynamo")
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.delitem(sys.modules, "torch")
    assert likely_imports() == ("jax",)


def test_variables_that_are_set_are_found_where_imports_are(project: Project) -> None:
    train, packed = project(
        train=(
            "import os\nfrom own import settings\nfrom own.other import unused\n"
            "def train():\n    import torch\n    helper()\n"
            "def helper():\n    os.environ['IN_HELPER'] = '1'\n"
        ),
        settings="import os\nos.environ['IN_MODULE'] = '1'\n"
        "def never():\n    os.environ['NOT_CALLED'] = '1'\n",
        other="def unused():\n    import os\n    os.environ['MASTER_PORT'] = '1'\n",
    )
    foreseen = scan_function(train.train, packed)
    assert {setting.name for setting in foreseen.settings} == {"IN_HELPER", "IN_MODULE"}
    assert foreseen.imports == ("torch",) and foreseen.warnings == ()


def test_nothing_is_imported_ahead_of_variables_that_imports_read(project: Project) -> None:
    train, packed = project(
        train=(
            "import os\ndef train():\n    os.environ['KERAS_BACKEND'] = 'torch'\n"
            "    import keras\n"
            "def quiet():\n    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n    import keras\n"
        ),
    )
    late, ahead = scan_function(train.train, packed), scan_function(train.quiet, packed)
    assert late.imports == () and ahead.imports == ("keras",)
    # So that a fork server that has imported them for others does not serve these ranks.
    assert late.environment({}) != ahead.environment({}) == {}


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import lightning as L", ("torch", "lightning")),
        ("from accelerate import Accelerator", ("torch", "accelerate")),
        ("import torchvision", ("torch", "torchvision")),
        ("from transformers import Trainer", ("torch", "transformers", "transformers.Trainer")),
        ("import xgboost", ("xgboost",)),
    ],
)
def test_what_is_built_on_torch_has_torch_imported_and_its_store_served(
    project: Project, statement: str, found: tuple[str, ...]
) -> None:
    train, packed = project(train=f"def train():\n    {statement}\n")
    assert preloads(train.train, packed) == found


def test_a_fork_server_asks_lazy_packages_for_their_attributes(tmp_path: Path) -> None:
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy" / "__init__.py").write_text(
        "def __getattr__(name):\n    from lazy.trainer import Trainer\n    return Trainer\n"
    )
    (tmp_path / "lazy" / "trainer.py").write_text("class Trainer: ...\n")
    code = (
        "import sys; from hopsgpu.agent.fork_server import _import; _import('lazy.Trainer');"
        "print('lazy.trainer' in sys.modules)"
    )
    assert printed("-c", code, path=str(tmp_path)).strip() == "True"


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("email.mime.text", True),
        ("email.mime.text.MIMEText", True),  # no module, but in one
        ("email.mime.nothing", False),
        ("nothing.below", False),
    ],
)
def test_a_fork_server_imports_what_is_a_module(name: str, has: bool) -> None:
    code = (
        "import sys; from hopsgpu.agent.fork_server import _import; _import(sys.argv[1]);"
        "print('email.mime.text' in sys.modules)"
    )
    assert printed("-c", code, name).strip() == str(has)


def test_a_fork_server_serves_who_wants_other_modules_of_its_packages(tmp_path: Path) -> None:
    def spec(*modules: str) -> ServerSpec:
        return ServerSpec(sys.executable, {}, modules)

    here, there = socket.socketpair()
    with here, there:
        wanted = spec("sklearn", "sklearn.svm")
        server = ForkServerProcess(
            wanted, 1, JsonLineSocket(here), tmp_path, None, 0.0, wanted.packages
        )
        assert find_server(spec("sklearn", "sklearn.linear_model"), [server]) is server
        assert find_server(spec("sklearn"), [server]) is server
        assert find_server(spec("sklearn", "torch"), [server]) is None
