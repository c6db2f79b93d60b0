"""The imports of code, found in its bytecode, in its source, and while it is pickled.

Nothing is imported or run to find them.
"""

from __future__ import annotations

import ast
import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import resolve_name
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

# Sources are parsed once for all launches of a held gang.
_MOST_SOURCES = 4096
# Attempts to parse a source. Threads that parse at the same time rarely disturb each other twice.
_PARSINGS = 20


@dataclass(frozen=True)
class ImportedModules:
    """The modules that a pickled call imports, by their dotted names.

    Attributes:
        needed: modules that the pickle names; it cannot be unpickled without them.
        likely: modules that only the code in the pickle names or comes from; the call may do
            without them, because an import may stand in a branch or in `try`.
    """

    needed: frozenset[str] = frozenset()
    likely: frozenset[str] = frozenset()


@dataclass
class ImportRecorder:
    """A record of what a pickle imports, kept while the pickle is written.

    Attributes:
        needed, likely: as in `ImportedModules`.
    """

    needed: set[str] = field(default_factory=set)
    likely: set[str] = field(default_factory=set)

    def see(self, value: object, *, by_value: bool) -> None:
        """Note an object that is about to be pickled.

        Args:
            value: any object that is no number, text or built-in container.
            by_value: whether it is a function or class that is pickled by value, because a rank
                cannot import it by its name.
        """
        # Not isinstance, which asks the object for its class: a proxy may refuse to answer.
        kind = type(value)
        known: Any = value
        if issubclass(kind, ModuleType):
            registered = cloudpickle.cloudpickle.list_registry_pickle_by_value()
            if _first(known.__name__) not in map(_first, registered):
                self.needed.add(known.__name__)
        elif issubclass(kind, (type, FunctionType)) or (
            issubclass(kind, BuiltinFunctionType) and isinstance(known.__self__, ModuleType)
        ):
            # `__module__` of a class may be a property.
            home = known.__module__ if isinstance(known.__module__, str) else "builtins"
            # What is pickled with a class, or later with its objects, may refer to this module by
            # name.
            (self.likely if by_value else self.needed).add(home)
        if by_value and issubclass(kind, FunctionType):
            package = str(known.__globals__.get("__package__") or "")
            self.likely.update(imports_of_code(known.__code__, package))

    def imported(self) -> ImportedModules:
        """Return what was noted."""
        return ImportedModules(frozenset(self.needed), frozenset(self.likely - self.needed))


class Import(NamedTuple):
    """An import in a module's source.

    Attributes:
        name: dotted name of what is imported: a module, or perhaps an attribute of one.
        called: whether the import runs only when one of the module's functions is called.
    """

    name: str
    called: bool


@functools.lru_cache(maxsize=_MOST_SOURCES)
def imports_of_source(name: str, source: str, package: bool) -> tuple[Import, ...]:
    """Return the imports of a module, without those that only a type checker reads.

    Args:
        name: dotted name of the module.
        source: its text. A source that does not parse has no imports here; whoever imports it gets
            the error.
        package: whether the module is a package's own `__init__.py`.
    """
    parent = name if package else name.rpartition(".")[0]
    found: list[Import] = []
    for node, called in executed(parsed(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            after = [alias.name for alias in node.names]
            names = _from(node.module or "", node.level, after, parent)
        found += [Import(name, called) for name in names]
    return tuple(dict.fromkeys(found))


def imports_of_code(code: CodeType, package: str) -> Iterator[str]:
    """Yield the imports in a function's code, and in that of the functions inside it.

    Args:
        code: the function's code.
        package: the package to which relative imports are relative; "" for none.
    """
    for part in codes_of(code):
        # IMPORT_NAME takes the level and the names of `from` from the stack.
        loaded: list[Any] = [0, None]
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                level, names = loaded[-2:]
                yield from _from(str(instruction.argval), level, list(names or ()), package)
            elif instruction.opname.startswith("LOAD_"):
                loaded.append(instruction.argval)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source; an empty tree if the source does not parse."""
    for _ in range(_PARSINGS):
        try:
            return ast.parse(source)
        except SystemError:
            # CPython before 3.11.8 and 3.12.2 counts the depth in one number for all threads, and
            # refuses a source while another thread parses (python/cpython#106905).
            continue
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            break
    return ast.Module([], [])


def executed(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield a tree's nodes, except those for type checkers, and whether only a call runs them."""
    # Without recursion, because the tree of a long sum is too deep for it.
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, called = pending.pop()
        yield node, called
        if isinstance(node, ast.If) and _is_for_types(node.test):
            pending += [(child, called) for child in node.orelse]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += [(child, called) for child in node.decorator_list]
            pending += [(child, True) for child in node.body]
        else:
            pending += [(child, called) for child in ast.iter_child_nodes(node)]


def _is_for_types(test: ast.expr) -> bool:
    """Return whether a condition is `TYPE_CHECKING`, under whatever name its module is imported."""
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _from(module: str, level: int, names: list[str], package: str) -> list[str]:
    """Return what `from module import names` may import."""
    if level:
        if not package:
            return []
        try:
            module = resolve_name("." * level + module, package)
        except ImportError:  # beyond the top-level package: the rank that imports it reports it
            return []
    return [module, *(f"{module}.{name}" for name in names)]


def _first(name: str) -> str:
    return name.partition(".")[0]
