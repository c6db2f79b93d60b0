"""Environment variables that a function's code sets, and the consequences for its ranks.

No code is run. Assignments to `os.environ` (also by methods) and calls of `putenv` are recognised
if the name is a literal.
"""

from __future__ import annotations

import ast
import dis
import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import NamedTuple

ENVIRON, PUTENV = "environ", "putenv"

# Variables that frameworks read at import. A fork server must not import frameworks for ranks that
# set one, so variables that only change logging are left out.
_AT_IMPORT = re.compile(
    r"KERAS_\w+|TF_(?!CPP_)\w+|JAX_\w+|XLA_\w+|PYTORCH_\w+|TORCH(DYNAMO_|INDUCTOR_(?!CACHE_DIR))\w+"
    r"|TORCH_(DYNAMO|COMPILER?|FX|CACHING|STRICT|FAKE_TENSOR)_\w+|(AOT|INDUCTOR|AOTINDUCTOR|PT2)_\w+"
    r"|MPL\w+|NUMBA_\w+"
    r"|(OMP|MKL|KMP|OPENBLAS|BLIS|GOTO|NUMEXPR|NPY)_\w+"
)
# Ranks with this variable get a fork server that has not imported frameworks.
_LATE_IMPORTS = {"HOPSGPU_IMPORTS_AHEAD": "none"}
# Scripts set these at their top level, which ranks do not run. They decide which code runs.
_CARRIED_VARIABLES = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "JAX_ENABLE_X64")
_MASTER = frozenset({"MASTER_ADDR", "MASTER_PORT"})
_WHOSE_GPU = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
_PLACE = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"})


class Setting(NamedTuple):
    """A variable that code sets; with `is_default`, only if the variable is not set yet."""

    name: str
    is_default: bool


def has_import_time_settings(settings: Iterable[Setting]) -> bool:
    return any(_AT_IMPORT.fullmatch(setting.name) for setting in settings)


def environment(settings: Iterable[Setting]) -> Mapping[str, str]:
    """Return additions to the environment of ranks whose function sets these variables."""
    return _LATE_IMPORTS if has_import_time_settings(settings) else {}


def carried_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables that ranks get although the user does not pass them."""
    return {name: environ[name] for name in _CARRIED_VARIABLES if name in environ}


def has_own_master(settings: Iterable[Setting]) -> bool:
    """Return whether these variables give ranks another rendezvous address than hopsgpu's."""
    return not _MASTER.isdisjoint(_overriding_names(settings))


def warnings(settings: Iterable[Setting]) -> tuple[str, ...]:
    overriding = _overriding_names(settings)
    consequences = (
        (_MASTER, "ranks of different containers do not find each other"),
        (_WHOSE_GPU, "ranks use the GPUs of others"),
        (_PLACE, "two ranks may take the same place in the group"),
    )
    return tuple(
        f"train_fn sets {' and '.join(sorted(overriding & names))}, which hopsgpu has set in every"
        f" rank: remove this, otherwise {consequence}"
        for names, consequence in consequences
        if overriding & names
    )


def _overriding_names(settings: Iterable[Setting]) -> frozenset[str]:
    return frozenset(setting.name for setting in settings if not setting.is_default)


def settings_of_code(code: CodeType) -> tuple[Setting, ...]:
    """Return the variables that a function's code sets, without functions inside it."""
    return _settings(_accesses_of_code(code))


def settings_of_nodes(nodes: Iterable[ast.AST]) -> tuple[Setting, ...]:
    return _settings(access for node in nodes for access in _accesses_of_node(node))


def _settings(accesses: Iterable[_Access]) -> tuple[Setting, ...]:
    """Return the variables that are set.

    A variable that the code also looks up counts as a default: such code respects its value.
    """
    all_accesses = list(accesses)
    looked_up = {name for kind, name in all_accesses if kind is _Kind.LOOKUP}
    return tuple(
        Setting(name, kind is _Kind.DEFAULT or name in looked_up)
        for kind, name in all_accesses
        if kind is not _Kind.LOOKUP
    )


class _Kind(enum.Enum):
    SET = enum.auto()
    DEFAULT = enum.auto()
    LOOKUP = enum.auto()


_Access = tuple[_Kind, str]
_METHODS = {
    "setdefault": _Kind.DEFAULT,
    PUTENV: _Kind.SET,
    "get": _Kind.LOOKUP,
    "getenv": _Kind.LOOKUP,
}


def _accesses_of_code(code: CodeType) -> Iterator[_Access]:
    if {ENVIRON, PUTENV}.isdisjoint(code.co_names):
        return
    is_update = False
    # The last two loaded values: a name, or a tuple of one constant.
    before: object = None
    last: object = None
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation == "STORE_SUBSCR" and before == ENVIRON:
            yield from _accesses(_Kind.SET, last)
        elif operation == "CONTAINS_OP" and last == ENVIRON:
            yield from _accesses(_Kind.LOOKUP, before)
        elif operation == "POP_TOP":
            is_update = False
        elif operation == "KW_NAMES" and is_update:  # Python 3.11's dis does not resolve it
            yield from _accesses(_Kind.SET, code.co_consts[instruction.arg or 0])
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            is_update = is_update or (value == "update" and last == ENVIRON)
            last = value  # an attribute replaces the object that it is looked up in
        elif operation.startswith("LOAD_"):
            loaded = (value,) if operation == "LOAD_CONST" else value
            kind = _Kind.SET if is_update else _METHODS.get(str(last))
            if kind is not None:
                yield from _accesses(kind, loaded)
            before, last = last, loaded


def _accesses(kind: _Kind, constants: object) -> Iterator[_Access]:
    for constant in constants if isinstance(constants, tuple) else ():
        if isinstance(constant, str):
            yield kind, constant
        else:
            yield from _accesses(kind, constant)


def _accesses_of_node(node: ast.AST) -> Iterator[_Access]:
    match node:
        case ast.Assign():
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _accesses_of_names(_Kind.SET, [target.slice])
        case ast.Compare():
            if any(map(_is_environ, node.comparators)):
                yield from _accesses_of_names(_Kind.LOOKUP, [node.left])
        case ast.Call(func=ast.Attribute(attr="update", value=value)) if _is_environ(value):
            keys = [key for argument in node.args for key in getattr(argument, "keys", ())]
            yield from _accesses_of_names(_Kind.SET, keys)
            yield from ((_Kind.SET, named.arg) for named in node.keywords if named.arg)
        case ast.Call(func=ast.Attribute(attr=method)) if method in _METHODS:
            yield from _accesses_of_names(_METHODS[method], node.args[:1])


def _accesses_of_names(kind: _Kind, nodes: Iterable[ast.expr | None]) -> Iterator[_Access]:
    for node in nodes:
        if isinstance(node, ast.Constant):
            yield from _accesses(kind, (node.value,))


def _is_environ(node: ast.expr) -> bool:
    return ENVIRON in (getattr(node, "id", None), getattr(node, "attr", None))
