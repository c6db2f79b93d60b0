"""A cloudpickle that takes more of what a script defines, and knows what belongs to `__main__`.

cloudpickle pickles by their names what it does not know to be defined in `__main__`, which then no
other process finds, or it gives a copy of what is compared by identity.
"""

from __future__ import annotations

import abc
import contextlib
import copyreg
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from hopsgpu.packaging.enum_pickling import reduce_enum
from hopsgpu.packaging.unpicklable import is_broadcast, may_be_refused, refuse

MAIN = "__main__"

_Reduced = tuple[Any, ...]


def resolved(name: str, namespace: Mapping[str, Any]) -> object:
    """What a qualified name stands for; None for nothing.

    Args:
        name: as `__qualname__` has it.
        namespace: of a module.
    """
    first, *rest = name.split(".")
    value = namespace.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value


class ReducingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what cloudpickle does, and what is listed in `_REDUCERS`."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known: dict[type, Callable[[Any], Any] | None] = {}

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        """What reduces objects of a type; None where cloudpickle does."""
        if kind is _ALIAS:
            return functools.partial(_reduce_alias, {})
        return _reduce_of_spark if may_be_refused(kind) else _REDUCERS.get(kind)

    def class_by_value(self, cls: type, reduced: _Reduced) -> _Reduced:
        """Called for each class that is pickled by value, with how."""
        return reduced

    def function_by_value(self, function: FunctionType) -> None:
        """Called for each function that is pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler` has it; called for each object but those of a few built-in types."""
        kind = type(obj)
        try:
            reducer = self._known[kind]
        except KeyError:
            reducer = self._known[kind] = self.reducer_of(kind)
        if reducer is not None:
            return reducer(obj)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented or not isinstance(obj, type):
            return reduced
        make, args, *state = reduced
        if make is internals._make_skeleton_class:
            _, name, bases, namespace, *rest = args
            bases = _typed_dict_bases(obj) if _is_typed_dict(obj) else bases
            # Without it a nested class is none, and pickle looks for it in the module.
            namespace = {**namespace, "__qualname__": obj.__qualname__}
            args = (kind, name, bases, namespace, *rest)
            return self.class_by_value(obj, (make_class, args, *state))
        if make is internals._make_skeleton_enum:
            return self.class_by_value(obj, reduce_enum(obj, reduced))
        return reduced

    def _function_reduce(self, obj: FunctionType) -> Any:
        reduced = super()._function_reduce(obj)
        if reduced is NotImplemented:
            return reduced
        if obj.__code__ is _DISPATCHER:
            return _reduce_dispatcher(obj)
        self.function_by_value(obj)
        return reduced


def make_class(
    metaclass: type,
    name: str,
    bases: tuple[Any, ...],
    namespace: Mapping[str, Any],
    tracker: str | None,
    extra: Any,
) -> type:
    """An empty class, whose members follow; as cloudpickle makes it.

    A metaclass or an `__init_subclass__` that takes keywords of the class statement, which nobody
    knows any more, is not called: what it has done to the class is among the members.
    """
    make = internals._make_skeleton_class
    try:
        made: type = make(metaclass, name, bases, namespace, tracker, extra)
        return made
    except TypeError:
        plain = abc.ABCMeta if issubclass(metaclass, abc.ABCMeta) else type
        resolved_bases = types.resolve_bases(bases)
        with _without_hooks(resolved_bases):
            for maker in (metaclass, plain):
                try:
                    made = maker.__new__(metaclass, name, resolved_bases, dict(namespace))
                except TypeError:  # the metaclass takes keywords too: the first error tells more
                    continue
                tracked: type = internals._lookup_class_or_track(tracker, made)
                return tracked
        raise


@contextlib.contextmanager
def _without_hooks(bases: Iterable[type]) -> Iterator[None]:
    """Has the `__init_subclass__` of classes, and of their bases, do nothing meanwhile."""
    hooks = {
        cls: vars(cls)["__init_subclass__"]
        for base in bases
        for cls in base.__mro__
        if "__init_subclass__" in vars(cls) and not _is_of_python(cls)
    }
    try:
        for cls in hooks:
            type.__setattr__(cls, "__init_subclass__", classmethod(lambda cls: None))
        yield
    finally:
        for cls, hook in hooks.items():
            type.__setattr__(cls, "__init_subclass__", hook)


def _is_of_python(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names


def _is_typed_dict(cls: type) -> bool:
    # Of typing, or of typing_extensions, which has one of its own for older Pythons.
    return type(cls).__name__ == "_TypedDictMeta"


def _typed_dict_bases(cls: Any) -> tuple[Any, ...]:
    """What a TypedDict is made from; its members have those of its bases."""
    bases = vars(cls).get("__orig_bases__", ())
    typed_dict = sys.modules[type(cls).__module__].TypedDict
    return (typed_dict, *(b for b in bases if typing.get_origin(b) is typing.Generic))


def _is_importable(value: Any) -> bool:
    """Whether pickle's reference by name is found elsewhere, as cloudpickle has it of functions."""
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == MAIN:
        return False
    name = getattr(value, "__qualname__", value.__name__)
    return resolved(name, vars(module)) is value


def _unless_importable(reducer: Callable[[Any], _Reduced]) -> Callable[[Any], Any]:
    @functools.wraps(reducer)
    def reduce(value: Any) -> Any:
        return NotImplemented if _is_importable(value) else reducer(value)

    return reduce


@_unless_importable
def _reduce_cache(cache: Any) -> _Reduced:
    state = {name: value for name, value in vars(cache).items() if name != "__wrapped__"}
    return make_cache, (cache.__wrapped__, cache.cache_parameters()), state


def make_cache(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """As `functools.lru_cache` makes it, and empty."""
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(value: functools.cached_property[Any]) -> _Reduced:
    return make_cached_property, (value.func, value.attrname)


def make_cached_property(
    function: Callable[[Any], Any], name: str | None
) -> functools.cached_property[Any]:
    """A `functools.cached_property` of a class that is made already."""
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


# All functions that singledispatch() makes share their code.
_DISPATCHER = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]


def _reduce_dispatcher(function: Any) -> _Reduced:
    registry = dict(function.registry)
    default = registry.pop(object)
    # Later: they refer to the function that is made here.
    return functools.singledispatch, (default,), list(registry.items()), None, None, register_all


def register_all(function: Any, implementations: Iterable[tuple[type, Any]]) -> None:
    """Registers implementations of a function made by `functools.singledispatch`."""
    for kind, implementation in implementations:
        function.register(kind, implementation)


@_unless_importable
def _reduce_new_type(value: Any) -> _Reduced:
    return (
        make_new_type,
        (value.__name__, value.__qualname__, value.__module__),
        {"__supertype__": value.__supertype__},
    )


def make_new_type(name: str, qualname: str, module: str) -> Any:
    """A `typing.NewType`, whose supertype follows."""
    kind: Any = typing.NewType
    made = kind(name, object)
    made.__qualname__, made.__module__ = qualname, module
    return made


@_unless_importable
def _reduce_param_spec(value: Any) -> _Reduced:
    given = {
        "bound": value.__bound__,
        "covariant": value.__covariant__,
        "contravariant": value.__contravariant__,
    }
    return make_parameter, (typing.ParamSpec, value.__name__, value.__module__, given)


@_unless_importable
def _reduce_type_var_tuple(value: Any) -> _Reduced:
    return make_parameter, (typing.TypeVarTuple, value.__name__, value.__module__, {})


def make_parameter(kind: Any, name: str, module: str, given: Mapping[str, Any]) -> Any:
    """A `typing.ParamSpec` or `typing.TypeVarTuple`."""
    made = kind(name, **given)
    made.__module__ = module
    return made


def _reduce_alias(held: dict[int, list[Any]], value: Any) -> Any:
    """Of a `type` statement, which may name what it makes.

    Args:
        held: the values of those that were met, by their identities.
        value: what the statement made.
    """
    if _is_importable(value):
        return NotImplemented
    own = held.setdefault(id(value), [value.__value__])
    return make_alias, (value.__name__, value.__module__, own, value.__type_params__)


def make_alias(name: str, module: str, held: list[Any], parameters: tuple[Any, ...]) -> Any:
    """What a `type` statement makes.

    Args:
        name, module: of it.
        held: its value, which may be there later; but with parameters, at once.
        parameters: as of generic classes.
    """
    scope: dict[str, Any] = {"__name__": module, "_held": held}
    if not parameters:
        exec(f"type {name} = _held[0]", scope)  # it is the user's own code that has this name
        return scope[name]
    value = held[0] if held else typing.ForwardRef(name)
    scope |= {"_make": _ALIAS, "_given": (name, value), "_parameters": parameters}
    exec("_made = _make(*_given, type_params=_parameters)", scope)
    return scope["_made"]


def _by_name(module: types.ModuleType, name: str) -> tuple[type, Callable[[Any], _Reduced]]:
    """The type of a module's only object of it, and what refers to that."""
    return type(getattr(module, name)), lambda _: (getattr, (module, name))


# From Python 3.12 on.
_ALIAS: type | None = vars(typing).get("TypeAliasType")
_REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(lambda: None)): _reduce_cache,
    functools.cached_property: _reduce_cached_property,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_param_spec,
    typing.TypeVarTuple: _reduce_type_var_tuple,
    # dataclasses compares them by identity.
    **dict(_by_name(dataclasses, name) for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")),
}


@dataclasses.dataclass(frozen=True)
class BroadcastValue:
    """What a rank has of a broadcast variable of Spark.

    Attributes:
        value: as of `pyspark.Broadcast`.
    """

    value: Any


def _reduce_of_spark(value: Any) -> Any:
    return (BroadcastValue, (value.value,)) if is_broadcast(type(value)) else refuse(value)


class DigestPickler(ReducingPickler):
    """Gives equal bytes in each session for the same code."""

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        return _reduce_type_variable if kind is typing.TypeVar else super().reducer_of(kind)

    def class_by_value(self, cls: type, reduced: _Reduced) -> _Reduced:
        # A number that is new in each process.
        make, (*args, _tracker, extra), *state = reduced
        return make, (*args, None, extra), *state


def _reduce_type_variable(value: Any) -> Any:
    reduced = internals._typevar_reduce(value)
    if reduced[0] is internals._make_typevar:
        return reduced[0], (*reduced[1][:-1], None)
    return reduced


class ValuePickler(ReducingPickler):
    """Pickles what a rank returns: classes of the driver's `__main__` are the driver's again.

    Args:
        file: that is written.
        names: what came from the driver's `__main__`, by its names.
    """

    def __init__(self, file: Any, names: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._names = names

    def class_by_value(self, cls: type, reduced: _Reduced) -> _Reduced:
        if cls.__module__ != MAIN or resolved(cls.__qualname__, self._names) is not cls:
            return reduced
        return class_of_driver, (internals._get_or_create_tracker_id(cls), cls.__qualname__)


def class_of_driver(tracker: str, name: str) -> type:
    """The class that this process has sent to the rank.

    Args:
        tracker: cloudpickle's number of it.
        name: its qualified name in `__main__`, for where it is gone: a cell was run again, say.

    Raises:
        AttributeError: there is none of that name either.
    """
    sent = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    found = resolved(name, vars(sys.modules[MAIN])) if sent is None else sent
    if not isinstance(found, type):
        raise AttributeError(f"the driver's __main__ has no class {name} any more")
    return found


def reduce_singleton(value: Any) -> _Reduced:
    """An object of `__main__` whose own `__reduce__` gives but its name."""
    return copyreg.__newobj__, (type(value),), getattr(value, "__dict__", None) or None  # type: ignore[attr-defined]
