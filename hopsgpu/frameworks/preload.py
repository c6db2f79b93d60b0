"""What a function's code tells ahead: which packages it will import, which variables it will set.

A fork server imports those of the packages that are known to be slow. Found without importing or
running anything: in the bytecode of the function and of what it refers to, and in the sources of
the user's modules that these import.
"""

from __future__ import annotations

import ast
import dis
import functools
import io
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec, resolve_name
from inspect import getattr_static
from pathlib import PurePosixPath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from hopsgpu.frameworks import variables
from hopsgpu.frameworks.variables import Setting
from hopsgpu.modules import PackedModules

# Slow to import, and known to compute nothing and to touch no GPU when they are.
PRELOADABLE = (
    "torch",
    "torchvision",
    "tensorflow",
    "keras",
    "jax",
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
# Of these the modules below too, which are as slow and as harmless.
_WHOLE = ("scipy", "pandas", "sklearn", "matplotlib", "pyspark", "optuna")
_FRAMEWORKS = ("torch", "tensorflow", "jax")
# Sources are parsed once for all launches of a held gang.
_MOST_SOURCES = 4096
# Threads that parse at the same time rarely disturb each other twice.
_PARSINGS = 20
# A function that refers to more than this is not followed to the end.
_MOST_OBJECTS = 10_000


class Foreseen(NamedTuple):
    """What a function's code tells before it runs.

    Attributes:
        imports: the packages of `PRELOADABLE` that it will import, in that order, and then dotted
            names of what may be a module in one of them, or an attribute of one. None where it
            sets variables that frameworks read while they are imported.
        sets: the environment variables that it sets.
    """

    imports: tuple[str, ...] = ()
    sets: frozenset[Setting] = frozenset()

    @property
    def has_own_master(self) -> bool:
        """Whether it has ranks meet at an address of its own."""
        return variables.has_own_master(self.sets)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of it."""
        return variables.warnings(self.sets)

    def environment(self, driver: Mapping[str, str]) -> dict[str, str]:
        """Variables that its ranks have beside the user's `env_vars`, which win over them.

        Args:
            driver: the driver's own.
        """
        return {**variables.carried(driver), **variables.environment(self.sets)}


def foresee(function: Callable[..., Any], modules: PackedModules) -> Foreseen:
    """What a function will import and set.

    It counts wherever it stands in the function, in what it refers to (globals, closures,
    defaults, what it decorates) and in the user's modules that are imported on the way, but for
    those under `if TYPE_CHECKING`. Of the modules in which these objects stand only what runs at
    their import counts: other functions there are not called. A name that only running the code
    would tell is not found: then an import takes its time in the rank.

    Args:
        function: the user's.
        modules: the user's own.
    """
    reached = _reached(function, modules)
    sets = set(reached.sets)
    for name, every in reached.modules:
        if name in reached.sources:
            sets.update(_set_by_source(reached.sources[name][0], every))
    imports = () if variables.read_at_import(sets) else _preloads(reached)
    return Foreseen(imports, frozenset(sets))


class _Reached(NamedTuple):
    """What a function comes by: modules, the user's sources, and what its functions set."""

    modules: set[_Module]
    sources: Mapping[str, tuple[str, bool]]
    sets: set[Setting]


def _reached(function: Callable[..., Any], modules: PackedModules) -> _Reached:
    sources = _sources(modules.archive)
    own = {name.partition(".")[0] for name in sources}
    sets: set[Setting] = set()
    pending = list(_imports_of(function, own | {"__main__", _home(function)}, sets))
    met: set[_Module] = set()
    while pending:
        module = pending.pop()
        if module in met:
            continue
        met.add(module)
        name = module.name
        pending += [_Module(name.rpartition(".")[0], False)] if "." in name else []
        if name in sources:
            found = _imports_of_source(name, *sources[name], module.all)
            pending += [_Module(imported, module.all) for imported in found]
    return _Reached(met, sources, sets)


def _preloads(reached: _Reached) -> tuple[str, ...]:
    met, own = reached.modules, {name.partition(".")[0] for name in reached.sources}
    firsts = {module.name.partition(".")[0] for module in met}
    # A module of the user's own that has a known name may do anything when it is imported.
    packages = [package for package in PRELOADABLE if package in firsts - own]
    below = {module.name for module in met if "." in module.name}
    whole = set(packages).intersection(_WHOLE)
    return (*packages, *sorted(name for name in below if name.partition(".")[0] in whole))


def likely_preloads() -> tuple[str, ...]:
    """What a function that is not known yet will probably import.

    The frameworks that this process has imported, else the first one that is installed here.
    """
    imported = tuple(name for name in _FRAMEWORKS if name in sys.modules)
    return imported or tuple(name for name in _FRAMEWORKS if find_spec(name) is not None)[:1]


class _Module(NamedTuple):
    """A module that will be imported; `all` where any of its functions may be called."""

    name: str
    all: bool


@functools.lru_cache(maxsize=1)
def _sources(archive: bytes) -> Mapping[str, tuple[str, bool]]:
    """Source, and whether it is a package's, of each module by its dotted name."""
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
def _imports_of_source(name: str, source: str, package: bool, functions: bool) -> tuple[str, ...]:
    tree = _parsed(source)
    parent = name if package else name.rpartition(".")[0]
    found = []
    for node in _executed(tree, functions):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found += _from(node.module or "", node.level, names, parent)
    return tuple(found)


@functools.lru_cache(maxsize=_MOST_SOURCES)
def _set_by_source(source: str, functions: bool) -> tuple[Setting, ...]:
    if variables.ENVIRON not in source and variables.PUTENV not in source:
        return ()
    return tuple(variables.of_nodes(_executed(_parsed(source), functions)))


def _parsed(source: str) -> ast.Module:
    """A source's tree; an empty one where it does not parse, of which its import will tell."""
    for _ in range(_PARSINGS):
        try:
            return ast.parse(source)
        except SystemError:
            # CPython before 3.11.8 and 3.12.2 counts the depth in one number for all threads, and
            # refuses what another thread has parsed beside it (python/cpython#106905).
            continue
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            break
    return ast.Module([], [])


def _executed(tree: ast.Module, functions: bool) -> Iterator[ast.AST]:
    """A tree's nodes without those that only a type checker reads, or only a call runs."""
    pending: list[ast.AST] = [tree]  # a long sum is a tree too deep to descend by calls
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If) and _is_for_types(node.test):
            pending += node.orelse
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions:
            pending += node.decorator_list
        else:
            pending += ast.iter_child_nodes(node)


def _is_for_types(test: ast.expr) -> bool:
    """Whether a condition is `TYPE_CHECKING`, by whatever name its module goes."""
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _from(module: str, level: int, names: list[str], package: str) -> list[str]:
    """What `from module import names` may import."""
    if level:
        if not package:
            return []
        try:
            module = resolve_name("." * level + module, package)
        except ImportError:  # beyond the top: the rank that imports it will say so
            return []
    return [module, *(f"{module}.{name}" for name in names)]


def _imports_of(function: object, own: set[str], sets: set[Setting]) -> Iterator[_Module]:
    """Modules that a function, or what it refers to, belongs to or imports.

    Args:
        function: the user's.
        own: top-level names of the user's modules.
        sets: environment variables that these functions set are added to it.
    """
    pending, met = [function], dict[int, object]()
    while pending and len(met) < _MOST_OBJECTS:
        value = pending.pop()
        if id(value) in met:
            continue
        # Kept, or its number could be another's next.
        met[id(value)] = value
        if isinstance(value, ModuleType):
            yield _Module(value.__name__, False)
        elif isinstance(value, FunctionType):
            yield _Module(str(value.__module__), False)
            if _first(value.__module__) in own:
                package = str(value.__globals__.get("__package__") or "")
                for name in _imports_of_code(value.__code__, package):
                    yield _Module(name, True)
                for code in _codes(value.__code__):
                    sets.update(variables.of_code(code))
                pending += _referred_to(value, own)
        elif isinstance(value, type):
            yield from (_Module(kind.__module__, False) for kind in value.__mro__)
            pending += vars(value).values() if _first(value.__module__) in own else ()
        else:
            pending += _parts(value)


def _parts(value: object) -> Iterator[object]:
    """What stands behind a callable that is no plain function, and its type."""
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
    """The top-level package of a function, whatever it is wrapped in."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return _first(module)


def _first(module: object) -> str:
    """The top-level package of a module's name."""
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
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    pending: list[Mapping[str, object]] = [function.__globals__]
    met: list[Mapping[str, object]] = []
    while pending:
        known = pending.pop()
        if any(known is other for other in met):
            continue
        met.append(known)
        for name in sorted(names & known.keys()):
            yield known[name]
            # What is called by way of a module of the user's.
            if isinstance(value := known[name], ModuleType) and _first(value.__name__) in own:
                pending.append(vars(value))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _imports_of_code(code: CodeType, package: str) -> Iterator[str]:
    for part in _codes(code):
        # IMPORT_NAME takes the level and the names of `from` from the stack.
        loaded: list[Any] = [0, None]
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                level, names = loaded[-2:]
                yield from _from(str(instruction.argval), level, list(names or ()), package)
            elif instruction.opname.startswith("LOAD_"):
                loaded.append(instruction.argval)
