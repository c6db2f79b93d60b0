"""Predictions from a function's code: the packages it will import, the variables it will set.

A fork server imports the slow ones among these packages. The predictions come from the bytecode of
the function and of objects that it refers to, and from the sources of the user's modules: no code
is imported or run.
"""

from __future__ import annotations

import functools
import io
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from inspect import getattr_static
from pathlib import PurePosixPath
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from hopsgpu.packaging import code_variables
from hopsgpu.packaging.code_variables import Setting
from hopsgpu.packaging.import_scan import (
    codes_of,
    imports_of_code,
    imports_of_source,
    parse_source,
    walk_executed,
)
from hopsgpu.packaging.modules import PackedModules, home_module

# Packages that are slow to import, and neither compute nor use a GPU at import.
PRELOADABLE = (
    *("torch", "torchvision", "tensorflow", "keras", "jax", "lightning", "pytorch_lightning"),
    *("accelerate", "transformers", "xgboost", "numpy", "scipy", "pandas", "sklearn", "pyarrow"),
    *("matplotlib", "PIL", "pyspark", "optuna", "pytest"),
)
# Packages whose submodules too are slow to import, and safe.
_WITH_SUBMODULES = ("transformers", "scipy", "pandas", "sklearn", "matplotlib", "pyspark", "optuna")
# Packages that import torch.
_TORCH_BASED = frozenset(
    {"torchvision", "lightning", "pytorch_lightning", "accelerate", "transformers"}
)
# torch imports this module when it creates the first optimizer or parallel module. The import takes
# as long as that of torch.
_TORCH_COMPILER = "torch._dynamo"
# Names in code that creates an optimizer or a parallel module.
_OPTIMIZER_NAMES = frozenset({"optim", "DistributedDataParallel", "fully_shard"})
_FRAMEWORKS = ("torch", "tensorflow", "jax")

_MAX_OBJECTS = 10_000
# The cache serves all launches of a held gang.
_CACHED_SOURCES = 4096


class StaticFindings(NamedTuple):
    """Predictions for a function.

    Attributes:
        imports: the packages of `PRELOADABLE` that it will import, in that order; then dotted names
            of their modules (or of attributes of these), with torch's compiler if the function
            creates an optimizer. Empty if it sets variables that frameworks read at import.
        settings: the environment variables that it sets.
    """

    imports: tuple[str, ...] = ()
    settings: frozenset[Setting] = frozenset()

    @property
    def has_own_master(self) -> bool:
        return code_variables.has_own_master(self.settings)

    @property
    def warnings(self) -> tuple[str, ...]:
        return code_variables.warnings(self.settings)

    def environment(self, driver: Mapping[str, str]) -> dict[str, str]:
        """Return variables that its ranks get; the user's `env_vars` override them."""
        return {
            **code_variables.carried_variables(driver),
            **code_variables.environment(self.settings),
        }


def scan_function(function: Callable[..., Any], modules: PackedModules) -> StaticFindings:
    """Predict the imports and settings of a function.

    The scan covers the function, objects that it refers to (globals, closures, defaults, a
    decorated function) and the user's modules that these import. Modules that only define these
    objects count with the code that runs at import. Computed names do not count.
    """
    return _findings(_reachable_code(function, modules))


def scan_script(
    source: str, modules: Mapping[str, tuple[str, bool]], name: str = "__main__"
) -> StaticFindings:
    """Predict the imports and settings of a script, and of the modules that it imports.

    Args:
        source: the script's text.
        modules: the user's modules by dotted name: text, and whether the module is a package.
        name: the script's dotted name, if it runs as a module.
    """
    imports = imports_of_source(name, source, is_package=False)
    packages = [name.rpartition(".")[0]] if "." in name else []
    pending = [_Module(imported, True) for imported in (*packages, *(i.name for i in imports))]
    names: set[str] = set()
    for node, _ in walk_executed(parse_source(source)):
        names.update(filter(None, (getattr(node, "id", None), getattr(node, "attr", None))))
    settings = set(_settings_of_source(source, True))
    return _findings(_follow_imports(pending, modules, settings, names))


def _findings(reachable: _ReachableCode) -> StaticFindings:
    settings = set(reachable.settings)
    for name, is_called in reachable.modules:
        if name in reachable.sources:
            settings.update(_settings_of_source(reachable.sources[name][0], is_called))
    if code_variables.has_import_time_settings(settings):
        return StaticFindings((), frozenset(settings))
    return StaticFindings(_preloadable_imports(reachable), frozenset(settings))


class _ReachableCode(NamedTuple):
    """Code that a function may run.

    Attributes:
        modules: modules that are imported.
        sources: the user's modules, by name: text, and whether the module is a package.
        settings: variables that functions (not modules) set.
        names: names of attributes and globals in functions.
    """

    modules: set[_Module]
    sources: Mapping[str, tuple[str, bool]]
    settings: set[Setting]
    names: set[str]


def _reachable_code(function: Callable[..., Any], modules: PackedModules) -> _ReachableCode:
    sources = _sources(modules.archive)
    own_packages = {name.partition(".")[0] for name in sources}
    settings: set[Setting] = set()
    names: set[str] = set()
    own_packages |= {"__main__", _top_package(home_module(function))}
    pending = list(_imports_of(function, own_packages, settings, names))
    return _follow_imports(pending, sources, settings, names)


def _follow_imports(
    pending: list[_Module],
    sources: Mapping[str, tuple[str, bool]],
    settings: set[Setting],
    names: set[str],
) -> _ReachableCode:
    visited: set[_Module] = set()
    while pending:
        module = pending.pop()
        if module in visited:
            continue
        visited.add(module)
        name = module.name
        pending += [_Module(name.rpartition(".")[0], False)] if "." in name else []
        if name in sources:
            imports = imports_of_source(name, *sources[name])
            names_to_import = (i.name for i in imports if module.is_called or not i.is_deferred)
            pending += [_Module(imported, module.is_called) for imported in names_to_import]
    return _ReachableCode(visited, sources, settings, names)


def _preloadable_imports(reachable: _ReachableCode) -> tuple[str, ...]:
    own_packages = {name.partition(".")[0] for name in reachable.sources}
    top_packages = {module.name.partition(".")[0] for module in reachable.modules}
    if top_packages & _TORCH_BASED:
        top_packages.add("torch")
    # A module of the user's with one of these names may do anything at import.
    packages = [package for package in PRELOADABLE if package in top_packages - own_packages]
    dotted = {module.name for module in reachable.modules if "." in module.name}
    with_submodules = set(packages).intersection(_WITH_SUBMODULES)
    submodules = {name for name in dotted if name.partition(".")[0] in with_submodules}
    names = reachable.names.union(*(name.split(".") for name in dotted))
    if "torch" in packages and names & _OPTIMIZER_NAMES:
        submodules.add(_TORCH_COMPILER)
    return (*packages, *sorted(submodules))


def likely_imports() -> tuple[str, ...]:
    """Return imports that a function will probably need, before the function is known.

    The result has the frameworks that this process has imported, or else the first installed one.
    """
    imported = tuple(name for name in _FRAMEWORKS if name in sys.modules)
    frameworks = imported or tuple(name for name in _FRAMEWORKS if find_spec(name) is not None)[:1]
    return (*frameworks, _TORCH_COMPILER) if "torch" in frameworks else frameworks


class _Module(NamedTuple):
    """A module that will be imported; with `is_called`, its functions may be called."""

    name: str
    is_called: bool


@functools.lru_cache(maxsize=1)
def _sources(archive: bytes) -> Mapping[str, tuple[str, bool]]:
    """Return the text of each module, and whether the module is a package, by dotted name."""
    modules: dict[str, tuple[str, bool]] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
        for entry in zipped.namelist():
            path = PurePosixPath(entry)
            if path.suffix != ".py":
                continue
            _root, *parts = path.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            source = zipped.read(entry).decode(errors="replace")
            modules.setdefault(name, (source, is_package))
    return modules


@functools.lru_cache(maxsize=_CACHED_SOURCES)
def _settings_of_source(source: str, is_called: bool) -> tuple[Setting, ...]:
    if code_variables.ENVIRON not in source and code_variables.PUTENV not in source:
        return ()
    nodes = walk_executed(parse_source(source))
    running = (node for node, is_deferred in nodes if is_called or not is_deferred)
    return tuple(code_variables.settings_of_nodes(running))


def _imports_of(
    function: object, own_packages: set[str], settings: set[Setting], names: set[str]
) -> Iterator[_Module]:
    """Yield the modules that a function and the objects that it refers to come from or import.

    Args:
        own_packages: top-level names of the user's modules.
        settings, names: output: as in `_ReachableCode`.
    """
    pending, visited = [function], dict[int, object]()
    while pending and len(visited) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in visited:
            continue
        # Keep the object: a later object could get its id.
        visited[id(value)] = value
        if isinstance(value, ModuleType):
            yield _Module(value.__name__, False)
        elif isinstance(value, FunctionType):
            yield _Module(str(value.__module__), False)
            if _top_package(value.__module__) in own_packages:
                package = str(value.__globals__.get("__package__") or "")
                for name in imports_of_code(value.__code__, package):
                    yield _Module(name, True)
                for code in codes_of(value.__code__):
                    settings.update(code_variables.settings_of_code(code))
                    names.update(code.co_names)
                pending += _references_of(value, own_packages)
        elif isinstance(value, type):
            yield from (_Module(kind.__module__, False) for kind in value.__mro__)
            pending += (
                vars(value).values() if _top_package(value.__module__) in own_packages else ()
            )
        else:
            pending += _wrapped_values(value)


def _wrapped_values(value: object) -> Iterator[object]:
    yield type(value)
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(wrapped := getattr_static(value, "__wrapped__", None), FunctionType):
        yield wrapped


def _top_package(module: object) -> str:
    return str(module).partition(".")[0]


def _references_of(function: FunctionType, own_packages: set[str]) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    names = {name for code in codes_of(function.__code__) for name in code.co_names}
    pending: list[Mapping[str, object]] = [function.__globals__]
    visited: list[Mapping[str, object]] = []
    while pending:
        namespace = pending.pop()
        if any(namespace is other for other in visited):
            continue
        visited.append(namespace)
        for name in sorted(names & namespace.keys()):
            yield namespace[name]
            # The other names may be attributes of this module.
            value = namespace[name]
            if isinstance(value, ModuleType) and _top_package(value.__name__) in own_packages:
                pending.append(vars(value))
