"""Predictions from a function's code: the packages it will import, the variables it will set.

A fork server imports those of the packages that are known to be slow. Nothing is imported or run to
predict them: they are in the bytecode of the function and of what it refers to, and in the sources
of the user's modules that these import.
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
from hopsgpu.packaging.modules import PackedModules

# Packages that are slow to import, and known to compute nothing and touch no GPU meanwhile.
PRELOADABLE = (
    "torch",
    "torchvision",
    "tensorflow",
    "keras",
    "jax",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "xgboost",
    "numpy",
    "scipy",
    "pandas",
    "sklearn",
    "pyarrow",
    "matplotlib",
    "PIL",
    "pyspark",
    "optuna",
    "pytest",
)
# Packages whose submodules are imported ahead too, as they are as slow and as harmless.
_WHOLE = ("transformers", "scipy", "pandas", "sklearn", "matplotlib", "pyspark", "optuna")
# A function that imports one of these trains with torch, whether it names torch or not.
_ON_TORCH = frozenset(
    {"torchvision", "lightning", "pytorch_lightning", "accelerate", "transformers"}
)
# torch imports it when the first optimizer or parallel module is made, and that takes as long as to
# import torch.
_TORCH_COMPILER = "torch._dynamo"
# Names in code that makes one of these.
_OPTIMIZING = frozenset({"optim", "DistributedDataParallel", "fully_shard"})
_FRAMEWORKS = ("torch", "tensorflow", "jax")
# The references of a function are not followed beyond this number of objects.
_MOST_OBJECTS = 10_000
# Sources are read once for all launches of a held gang.
_MOST_SOURCES = 4096


class StaticFindings(NamedTuple):
    """What a function's code shows before it runs.

    Attributes:
        imports: the packages of `PRELOADABLE` that it will import, in that order, and then dotted
            names of what may be a module in one of them, or an attribute of one; torch's compiler
            is among them if it makes an optimizer. Empty if it sets variables that frameworks read
            while they are imported.
        sets: the environment variables that it sets.
    """

    imports: tuple[str, ...] = ()
    sets: frozenset[Setting] = frozenset()

    @property
    def has_own_master(self) -> bool:
        """Return whether it makes ranks meet at its own address."""
        return code_variables.has_own_master(self.sets)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user about it."""
        return code_variables.warnings(self.sets)

    def environment(self, driver: Mapping[str, str]) -> dict[str, str]:
        """Return variables that its ranks get; the user's `env_vars` override them.

        Args:
            driver: the driver's own variables.
        """
        return {**code_variables.carried_variables(driver), **code_variables.environment(self.sets)}


def scan_function(function: Callable[..., Any], modules: PackedModules) -> StaticFindings:
    """Return what a function will import and set.

    An import or assignment counts wherever it stands in the function, in what the function refers
    to (globals, closures, defaults, a function that it decorates) and in the user's modules that
    are imported on the way, except under `if TYPE_CHECKING`. Of the modules that contain these
    objects only what runs at import counts: their other functions are not called. A name that only
    execution would reveal is not found: then the import takes its time in the rank.

    Args:
        function: the user's function.
        modules: the user's modules.
    """
    reached = _reached(function, modules)
    sets = set(reached.sets)
    for name, every in reached.modules:
        if name in reached.sources:
            sets.update(_set_by_source(reached.sources[name][0], every))
    imports = () if code_variables.read_at_import(sets) else _preloads(reached)
    return StaticFindings(imports, frozenset(sets))


class _Reached(NamedTuple):
    """What a function reaches: modules, the user's sources, variables its functions set, names."""

    modules: set[_Module]
    sources: Mapping[str, tuple[str, bool]]
    sets: set[Setting]
    names: set[str]


def _reached(function: Callable[..., Any], modules: PackedModules) -> _Reached:
    sources = _sources(modules.archive)
    own = {name.partition(".")[0] for name in sources}
    sets: set[Setting] = set()
    names: set[str] = set()
    pending = list(_imports_of(function, own | {"__main__", _home(function)}, sets, names))
    met: set[_Module] = set()
    while pending:
        module = pending.pop()
        if module in met:
            continue
        met.add(module)
        name = module.name
        pending += [_Module(name.rpartition(".")[0], False)] if "." in name else []
        if name in sources:
            found = imports_of_source(name, *sources[name])
            pending += [
                _Module(i.name, module.all) for i in found if module.all or not i.is_deferred
            ]
    return _Reached(met, sources, sets, names)


def _preloads(reached: _Reached) -> tuple[str, ...]:
    met, own = reached.modules, {name.partition(".")[0] for name in reached.sources}
    firsts = {module.name.partition(".")[0] for module in met}
    if firsts & _ON_TORCH:
        firsts.add("torch")
    # A user's module with a known name may do anything when it is imported.
    packages = [package for package in PRELOADABLE if package in firsts - own]
    dotted = {module.name for module in met if "." in module.name}
    whole = set(packages).intersection(_WHOLE)
    below = {name for name in dotted if name.partition(".")[0] in whole}
    names = reached.names.union(*(name.split(".") for name in dotted))
    if "torch" in packages and names & _OPTIMIZING:
        below.add(_TORCH_COMPILER)
    return (*packages, *sorted(below))


def likely_imports() -> tuple[str, ...]:
    """Return what a function that is not known yet will probably import.

    These are the frameworks that this process has imported, else the first one that is installed
    here.
    """
    imported = tuple(name for name in _FRAMEWORKS if name in sys.modules)
    found = imported or tuple(name for name in _FRAMEWORKS if find_spec(name) is not None)[:1]
    return (*found, _TORCH_COMPILER) if "torch" in found else found


class _Module(NamedTuple):
    """A module that will be imported; with `all`, any of its functions may be called."""

    name: str
    all: bool


@functools.lru_cache(maxsize=1)
def _sources(archive: bytes) -> Mapping[str, tuple[str, bool]]:
    """Return each module's source, and whether the module is a package, by dotted name."""
    found: dict[str, tuple[str, bool]] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
        for entry in zipped.namelist():
            path = PurePosixPath(entry)
            if path.suffix != ".py":
                continue
            _root, *parts = path.with_suffix("").parts
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            source = zipped.read(entry).decode(errors="replace")
            found.setdefault(name, (source, package))
    return found


@functools.lru_cache(maxsize=_MOST_SOURCES)
def _set_by_source(source: str, functions: bool) -> tuple[Setting, ...]:
    if code_variables.ENVIRON not in source and code_variables.PUTENV not in source:
        return ()
    nodes = walk_executed(parse_source(source))
    return tuple(code_variables.of_nodes(node for node, called in nodes if functions or not called))


def _imports_of(
    function: object, own: set[str], sets: set[Setting], names: set[str]
) -> Iterator[_Module]:
    """Yield the modules that a function, or what it refers to, belongs to or imports.

    Args:
        function: the user's function.
        own: top-level names of the user's modules.
        sets: the set to which environment variables that these functions set are added.
        names: the set to which names of attributes and globals in these functions are added.
    """
    pending, met = [function], dict[int, object]()
    while pending and len(met) < _MOST_OBJECTS:
        value = pending.pop()
        if id(value) in met:
            continue
        # Keep the object, or a later one could get its id.
        met[id(value)] = value
        if isinstance(value, ModuleType):
            yield _Module(value.__name__, False)
        elif isinstance(value, FunctionType):
            yield _Module(str(value.__module__), False)
            if _first(value.__module__) in own:
                package = str(value.__globals__.get("__package__") or "")
                for name in imports_of_code(value.__code__, package):
                    yield _Module(name, True)
                for code in codes_of(value.__code__):
                    sets.update(code_variables.of_code(code))
                    names.update(code.co_names)
                pending += _referred_to(value, own)
        elif isinstance(value, type):
            yield from (_Module(kind.__module__, False) for kind in value.__mro__)
            pending += vars(value).values() if _first(value.__module__) in own else ()
        else:
            pending += _parts(value)


def _parts(value: object) -> Iterator[object]:
    """Yield a value's type, and what the value wraps if it is a callable but no plain function."""
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


def _home(function: object) -> str:
    """Return the top-level package of a function, also of one inside `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return _first(module)


def _first(module: object) -> str:
    """Return the top-level package in a module's name."""
    return str(module).partition(".")[0]


def _referred_to(function: FunctionType, own: set[str]) -> Iterator[object]:
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
    met: list[Mapping[str, object]] = []
    while pending:
        known = pending.pop()
        if any(known is other for other in met):
            continue
        met.append(known)
        for name in sorted(names & known.keys()):
            yield known[name]
            # The function may reach these names through a user's module.
            if isinstance(value := known[name], ModuleType) and _first(value.__name__) in own:
                pending.append(vars(value))
