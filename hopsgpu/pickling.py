"""The user's function as bytes, and the name of what keeps it from being pickled."""

from __future__ import annotations

import functools
import io
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import cloudpickle

from hopsgpu.enumerations import EnumPickler, dumps
from hopsgpu.errors import ConfigError

# Nested deeper than this, the culprit is named by the path so far.
_DEEPEST = 6


# What cloudpickle calls every file.
_NO_FILE = "<dynamic-code>"


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle has it, with the file's name."""
    kind, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return kind, tuple(code.co_filename if one == _NO_FILE else one for one in args)


class _NamingPickler(EnumPickler):
    """cloudpickle's, but tracebacks of what travels by value name the file that it stands in."""

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def pickle_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    files: bool = True,
) -> bytes:
    """`(function, args, kwargs)` by cloudpickle.

    Functions and classes of `__main__` travel by value; those of modules by name.

    Args:
        function: the user's.
        args: for it.
        kwargs: for it.
        files: whether to name the files in which code stands: tracebacks do then. Without, the same
            function is the same bytes in each session of a notebook.

    Raises:
        ConfigError: something cannot be pickled; the message names the attribute.
    """
    buffer = io.BytesIO()
    try:
        (_NamingPickler if files else EnumPickler)(buffer).dump((function, args, dict(kwargs)))
        return buffer.getvalue()
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        where, culprit = next(
            (
                found
                for what, value in (("train_fn", function), ("args", args), ("kwargs", kwargs))
                if (found := _culprit(value, what)) is not None
            ),
            ("train_fn", function),
        )
        raise ConfigError(
            f"train_fn={name_of(function)} cannot be sent to the ranks: {where} is"
            f" {_describe(culprit)}, which cannot be pickled ({error}). Create it inside the"
            " function, or pass what it is made from in args or kwargs"
        ) from error


def name_of(function: Callable[..., Any]) -> str:
    """A readable name of any callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _describe(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {module}{kind.__qualname__}"


def _pickles(value: object) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - any refusal means the same: it does not pickle
        return False
    return True


def _culprit(value: object, path: str, depth: int = 0) -> tuple[str, object] | None:
    """The innermost part of `value` that cannot be pickled, with a path in words."""
    if _pickles(value):
        return None
    if depth < _DEEPEST:
        for part_path, part in _parts(value, path):
            if part is not value and (found := _culprit(part, part_path, depth + 1)) is not None:
                return found
    return path, value


def _parts(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield from _parts(value.args, f"{path}.args")
        yield from _parts(value.keywords, f"{path}.keywords")
    elif isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__func__"):
        yield f"{path}.__self__", value.__self__
        yield from _parts(value.__func__, path)
    elif hasattr(value, "__code__"):
        yield from _parts_of_function(value)
    else:
        yield from _state_of(value, path)


def _parts_of_function(function: Any) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"closure variable {name!r}", cell.cell_contents
        except ValueError:  # the cell is not filled yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f"global {name!r}", function.__globals__[name]
    yield from ((f"default {d!r}", d) for d in function.__defaults__ or ())
    yield from ((f"default of {n!r}", d) for n, d in (function.__kwdefaults__ or {}).items())


def _global_names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _global_names(constant)


def _state_of(value: Any, path: str) -> Iterator[tuple[str, object]]:
    """What pickle would take of an object: a class's own members, or what it reduces to."""
    if isinstance(value, type):
        if value.__module__ == "__main__":  # others travel by name
            yield from ((f"{path}.{name}", part) for name, part in vars(value).items())
        return
    state = getattr(value, "__dict__", None)
    if state:
        yield from ((f"{path}.{name}", part) for name, part in state.items())
        return
    try:
        _, arguments, *rest = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - it does not say what it is made of: then it is the culprit
        return
    yield from _parts(arguments, f"{path} made from ")
    for part in rest:
        names = part[1] if isinstance(part, tuple) and len(part) == 2 else part
        if isinstance(names, Mapping):
            yield from ((f"{path}.{name}", slot) for name, slot in names.items())
        elif hasattr(part, "__next__"):
            yield from _parts(list(part), path)
