"""An import hook that calls a function with a module once it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImport = Callable[[Any], None]


def call_when_imported(functions: Mapping[str, OnImport]) -> None:
    """Call each function with the module of its name, now or as soon as the module is imported.

    No two calls may name the same module.
    """
    later: dict[str, OnImport] = {}
    for name, function in functions.items():
        if name in sys.modules:
            function(sys.modules[name])
        else:
            later[name] = function
    sys.meta_path.insert(0, _ImportHook(later))


class _ImportHook(MetaPathFinder):
    def __init__(self, functions: Mapping[str, OnImport]) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._functions:
            return None
        # Python itself skips finders without this method.
        methods = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder != self)
        specs = (find(name, path, target) for find in methods if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute, function = spec.loader.exec_module, self._functions[name]

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                # Modules of a zip file share one loader.
                if module.__name__ == name:
                    function(module)

            spec.loader.exec_module = execute_and_call
        return spec
