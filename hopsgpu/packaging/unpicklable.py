"""Values that cannot be sent to ranks: their path from the function, and advice for the user."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hopsgpu.packaging.remedies import is_useless_elsewhere, package_of, remedy_for

# The search does not go deeper into values.
_MAX_DEPTH = 12

_SESSION = (
    "Ranks have no Spark. Read the data at the driver and pass it with data=, or collect it first"
    " and pass the result in args or kwargs"
)
_UDF, _UDFS = "UserDefinedFunction", "pyspark.sql.udf"
# By the name of a class of pyspark.
_SPARK_ADVICE = {
    "SparkSession": _SESSION,
    "SparkContext": _SESSION,
    "SQLContext": _SESSION,
    "StreamingContext": _SESSION,
    "DataFrame": "Pass it with data=, or collect it first (such as with toPandas()) and pass the"
    " result in args or kwargs",
    "RDD": "collect() it first and pass the result in args or kwargs, or convert it to a DataFrame"
    " and pass that with data=",
    "Column": "Compute it before the launch and pass the DataFrame with data=",
    "Accumulator": "What ranks add to it would be lost. Return the number from the function, or"
    " report it with hopsgpu.context().report()",
    _UDF: "Ranks have no Spark. Call the Python function that it wraps, which is its .func",
}
_JVM_ADVICE = "It lives in the driver's JVM. Collect what the ranks need of it first"
_DECORATE = "Decorate it inside the function"
_GIN = (
    "Define it in a module of yours; and since ranks have no bindings of the driver, pass"
    " gin.config_str() in args, and give it to gin.parse_config() inside the function"
)
_DEFAULT_ADVICE = "Create it inside the function, or pass what it is created from in args or kwargs"


class RefusedObject(Exception):
    """The error for a value that must not be sent, even if it can be pickled."""


def refusal_of(value: object) -> tuple[str, str] | None:
    """Return a description and advice for a value that must not be sent; None if it may be sent."""
    kind = type(value)
    if isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == _UDFS:
        # @udf returns a function that wraps a UserDefinedFunction.
        return (_UDF, _SPARK_ADVICE[_UDF]) if hasattr(value, "func") else None
    if not may_be_refused(kind):
        return None
    if is_useless_elsewhere(kind):
        return _name_of(kind), remedy_for(kind) or _DEFAULT_ADVICE
    if package_of(kind) == "py4j":
        return _name_of(kind), _JVM_ADVICE
    for cls in kind.__mro__:
        if cls.__name__ in _SPARK_ADVICE and package_of(cls) == "pyspark":
            return cls.__name__, _SPARK_ADVICE[cls.__name__]
    if is_broadcast(kind):
        return None
    attributes = getattr(value, "__dict__", {}).values()
    if any(package_of(type(part)) == "py4j" for part in attributes):
        return _name_of(kind), _JVM_ADVICE
    return None


def may_be_refused(kind: type) -> bool:
    """Return whether `refusal_of` may refuse some values of a type."""
    is_of_spark = any(package_of(cls) in ("pyspark", "py4j") for cls in kind.__mro__)
    return is_of_spark or is_useless_elsewhere(kind)


def is_broadcast(kind: type) -> bool:
    return kind.__name__ == "Broadcast" and package_of(kind) == "pyspark"


def refuse(value: object) -> Any:
    """Reduce as pickle does, but raise RefusedObject for a value that must not be sent."""
    if (refusal := refusal_of(value)) is not None:
        raise RefusedObject(f"{article(refusal[0])} {refusal[0]} cannot be sent")
    return NotImplemented


def refuse_own_operators(function: types.FunctionType) -> None:
    """Raise PicklingError if a function calls an operator of the script's by `torch.ops`."""
    module: Any = sys.modules.get("torch._library.custom_ops")
    names = set(_global_names(function.__code__))
    if module is None or "ops" not in names:
        return
    for name, operator in sorted(module.OPDEFS.items()):
        is_named = names.issuperset(name.split("::"))
        if is_named and operator._init_fn.__module__ == "__main__":
            raise pickle.PicklingError(
                f"it calls torch.ops.{name.replace('::', '.')}, which is registered in this process"
                " only: define the operator in a module beside the script, which ranks import"
            )


def is_wrapper(value: object) -> bool:
    """Return whether a value is a function, or a stand-in, that another module's decorator made."""
    inner = _safe_getattr(value, "__wrapped__")
    if not isinstance(inner, types.FunctionType):
        return False
    return not isinstance(value, types.FunctionType) or value.__globals__ is not inner.__globals__


def _safe_getattr(value: object, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - a `__getattr__` of the user's may raise any error
        return None


def _module_of_decorator(wrapper: Any) -> str:
    return str(getattr(wrapper, "__globals__", {}).get("__name__") or "")


def describe_value(value: Any) -> str:
    if is_wrapper(value):
        return f"a function decorated by {_module_of_decorator(value) or _name_of(type(value))}"
    name = _safe_getattr(value, "name")
    is_file = isinstance(name, str) and _safe_getattr(value, "fileno") is not None
    file_name = f" ({name!r})" if is_file else ""
    kind = _name_of(type(value))
    return f"{article(kind)} {kind}{file_name}"


def advice_on(value: object) -> str:
    if is_wrapper(value):
        return _GIN if _module_of_decorator(value).startswith("gin.") else _DECORATE
    return remedy_for(type(value)) or _DEFAULT_ADVICE


def advice_on_load(value: object) -> str:
    if isinstance(value, type):
        return "Define the class in a module beside the script, which ranks import"
    if value is None:
        return _DEFAULT_ADVICE
    target = "" if type(value).__module__ == "__main__" else " a subclass"
    return (
        f"{_DEFAULT_ADVICE}; or give{target or ' its class'} a method __reduce__ that says how to"
        " create it again"
    )


def article(name: str) -> str:
    return "an" if name[0] in "AEIOaeio" or name.startswith("RDD") else "a"


def _name_of(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


class Search:
    """A search for the innermost part of a value that cannot be sent.

    Args:
        can_be_pickled: checks a value with all of its parts.
        is_culprit: recognises a culprit without its parts.
    """

    def __init__(
        self,
        can_be_pickled: Callable[[object], bool],
        is_culprit: Callable[[object], bool] = lambda value: refusal_of(value) is not None,
    ) -> None:
        self._can_be_pickled = can_be_pickled
        self._is_culprit = is_culprit
        # Keep the objects: a later object could get the id of a deleted one.
        self._visited: dict[int, object] = {}

    def culprit(self, value: object, path: str, depth: int = 0) -> tuple[str, object] | None:
        """Return the path to the culprit, as text, and the culprit; None if there is none."""
        if id(value) in self._visited:
            return None
        self._visited[id(value)] = value
        if self._is_culprit(value):
            return path, value
        if self._can_be_pickled(value):
            return None
        if depth < _MAX_DEPTH and remedy_for(type(value)) is None:
            for part_path, part in _parts(value, path):
                culprit = self.culprit(part, part_path, depth + 1)
                if culprit is not None:
                    return culprit
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
    elif isinstance(value, (staticmethod, classmethod)):
        yield path, value.__func__
    elif isinstance(value, property):
        yield from ((path, part) for part in (value.fget, value.fset, value.fdel))
    elif hasattr(value, "__func__"):
        yield f"{path}.__self__", value.__self__
        yield from _parts(value.__func__, path)
    elif is_wrapper(value):
        # Other attributes of a decorator's wrapper mean nothing to the user.
        yield path, value.__wrapped__
    elif hasattr(value, "__code__"):
        yield from _parts_of_function(value, "" if path == "train_fn" else f"{path}: ")
    else:
        yield from _state_of(value, path)


def _parts_of_function(function: Any, where: str) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{where}closure variable {name!r}", cell.cell_contents
        except ValueError:  # the cell is not filled yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f"{where}global {name!r}", function.__globals__[name]
    yield from ((f"{where}default {d!r}", d) for d in function.__defaults__ or ())
    yield from ((f"{where}default of {n!r}", d) for n, d in (function.__kwdefaults__ or {}).items())
    yield from ((f"{where}attribute {n!r}", part) for n, part in vars(function).items())


def _global_names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _global_names(constant)


def _state_of(value: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield the parts that pickle saves: members of a class, or an object's state."""
    if isinstance(value, type):
        yield from ((f"{path}.{name}", part) for name, part in vars(value).items())
        return
    if is_broadcast(type(value)):
        return
    state = getattr(value, "__dict__", None)
    if state:
        yield from ((f"{path}.{name}", part) for name, part in state.items())
        yield f"{path}: its class", type(value)
        return
    try:
        _, arguments, *rest = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - its parts are unknown: the object itself is the culprit
        return
    yield from _parts(arguments, f"{path} made from ")
    for part in rest:
        names = part[1] if isinstance(part, tuple) and len(part) == 2 else part
        if isinstance(names, Mapping):
            yield from ((f"{path}.{name}", slot) for name, slot in names.items())
        elif hasattr(part, "__next__"):
            yield from _parts(list(part), path)
