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

# The cache serves all launches of a held gang.
_CACHED_SOURCES = 4096
# Concurrent parsers rarely disturb each other twice, see `parse_source`.
_PARSE_ATTEMPTS = 20


@dataclass(frozen=True)
class ImportedModules:
    """The modules that a pickled call imports, by their dotted names.

    Attributes:
        needed: the call cannot be unpickled without these modules.
        likely: only code in the pickle names these modules or comes from them. The call may not
            need them, because an import may be in a branch or in `try`.
    """

    needed: frozenset[str] = frozenset()
    likely: frozenset[str] = frozenset()


@dataclass
class ImportRecorder:
    """A recorder of `ImportedModules` while a pickle is written."""

    needed: set[str] = field(default_factory=set)
    likely: set[str] = field(default_factory=set)

    def record(self, value: object, *, is_by_value: bool) -> None:
        """Record an object that is about to be pickled.

        Args:
            value: any object except numbers, texts and built-in containers.
            is_by_value: whether it is a function or class that is pickled by value, because a rank
                cannot import it by its name.
        """
        # Not isinstance, which asks the object for its class: a proxy may refuse to answer.
        kind = type(value)
        item: Any = value
        if issubclass(kind, ModuleType):
            registered = cloudpickle.cloudpickle.list_registry_pickle_by_value()
            if _first(item.__name__) not in map(_first, registered):
                self.needed.add(item.__name__)
        elif issubclass(kind, (type, FunctionType)) or (
            issubclass(kind, BuiltinFunctionType) and isinstance(item.__self__, ModuleType)
        ):
            # `__module__` of a class may be a property.
            home = item.__module__ if isinstance(item.__module__, str) else "builtins"
            # Members of a class, and its objects, may refer to this module by name.
            (self.likely if is_by_value else self.needed).add(home)
        if is_by_value and issubclass(kind, FunctionType):
            package = str(item.__globals__.get("__package__") or "")
            self.likely.update(imports_of_code(item.__code__, package))

    def modules(self) -> ImportedModules:
        return ImportedModules(frozenset(self.needed), frozenset(self.likely - self.needed))


class Import(NamedTuple):
    """An import of a module, or of an attribute of a module, by dotted name.

    A deferred import runs only when one of the importing module's functions is called.
    """

    name: str
    is_deferred: bool


@functools.lru_cache(maxsize=_CACHED_SOURCES)
def imports_of_source(name: str, source: str, is_package: bool) -> tuple[Import, ...]:
    """Return the imports of a module, without those that only a type checker reads.

    If the source does not parse, the result is empty: the rank that imports the module raises the
    error.
    """
    parent = name if is_package else name.rpartition(".")[0]
    imports: list[Import] = []
    for node, is_deferred in walk_executed(parse_source(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            members = [alias.name for alias in node.names]
            names = _imported_names(node.module or "", node.level, members, parent)
        imports += [Import(name, is_deferred) for name in names]
    return tuple(dict.fromkeys(imports))


def imports_of_code(code: CodeType, package: str) -> Iterator[str]:
    """Yield the imports of a function and of the functions inside it.

    Relative imports start from `package`; they are left out if it is "".
    """
    for part in codes_of(code):
        # IMPORT_NAME takes the level and the names after `import` from the stack.
        stack: list[Any] = [0, None]
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                level, names = stack[-2:]
                module = str(instruction.argval)
                yield from _imported_names(module, level, list(names or ()), package)
            elif instruction.opname.startswith("LOAD_"):
                stack.append(instruction.argval)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def parse_source(source: str) -> ast.Module:
    """Return the syntax tree, which is empty if the source does not parse."""
    for _ in range(_PARSE_ATTEMPTS):
        try:
            return ast.parse(source)
        except SystemError:
            # CPython before 3.11.8 and 3.12.2 counts the depth of all threads together, so a source
            # may be refused while another thread parses (python/cpython#106905).
            continue
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            break
    return ast.Module([], [])


def walk_executed(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes that run, and whether they run only when a function is called.

    Nodes under `TYPE_CHECKING` do not run.
    """
    # No recursion: the tree of a long sum is too deep.
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, is_deferred = pending.pop()
        yield node, is_deferred
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            pending += [(child, is_deferred) for child in node.orelse]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += [(child, is_deferred) for child in node.decorator_list]
            pending += [(child, True) for child in node.body]
        else:
            pending += [(child, is_deferred) for child in ast.iter_child_nodes(node)]


def _is_type_checking(test: ast.expr) -> bool:
    # The module may be imported under any name.
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _imported_names(module: str, level: int, names: list[str], package: str) -> list[str]:
    """Return what `from module import names` may import: the module, and submodules of it."""
    if level:
        if not package:
            return []
        try:
            module = resolve_name("." * level + module, package)
        except ImportError:  # above the top-level package: the rank's import raises the error
            return []
    return [module, *(f"{module}.{name}" for name in names)]


def _first(name: str) -> str:
    return name.partition(".")[0]
