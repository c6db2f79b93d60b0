"""Picklers that support more objects of a script's `__main__` than cloudpickle does.

cloudpickle pickles some of these objects by name, and no other process finds them. It copies
others that are compared by identity.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import importlib
import inspect
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from hopsgpu.packaging.class_creation import make_bare, make_class
from hopsgpu.packaging.enum_pickling import reduce_enum
from hopsgpu.packaging.registrations import Registrations
from hopsgpu.packaging.unpicklable import is_broadcast, may_be_refused, refuse

MAIN = "__main__"

_Reduced = tuple[Any, ...]


def resolve(name: str, namespace: Mapping[str, Any]) -> object:
    """Return the object with a `__qualname__` in a module's namespace, or None."""
    first, *rest = name.split(".")
    value = namespace.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value


class ReducingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of cloudpickle's types, and of the types in `_REDUCERS`."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._reducer_cache: dict[type, Callable[[Any], Any] | None] = {}
        self._registrations = Registrations()

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        """Return the reducer for objects of a type; None for cloudpickle's."""
        if kind is _ALIAS:
            return functools.partial(_reduce_alias, {})
        if issubclass(kind, types.ModuleType) and kind is not types.ModuleType:
            return _reduce_special_module
        if _needs_arguments(kind):
            return _reduce_bare
        return _reduce_or_refuse if may_be_refused(kind) else _REDUCERS.get(kind)

    def reduce_class(self, cls: type, reduced: _Reduced) -> _Reduced:
        """Return the reduction of a class that is pickled by value, given the default one."""
        return reduced

    def on_function_by_value(self, function: FunctionType) -> None:
        """Handle a function that is pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        # pickle.Pickler calls this method for all but a few built-in types.
        kind = type(obj)
        try:
            reducer = self._reducer_cache[kind]
        except KeyError:
            reducer = self._reducer_cache[kind] = self.reducer_of(kind)
        if reducer is not None:
            return reducer(obj)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented or not isinstance(obj, type):
            return reduced
        make, args, *state = reduced
        if make is internals._make_skeleton_class:
            _, name, bases, namespace, *rest = args
            bases = _typed_dict_bases(obj) if _is_typed_dict(obj) else bases
            # Without the qualified name, pickle would look for a nested class in the module.
            namespace = {**namespace, "__qualname__": obj.__qualname__}
            args = (kind, name, bases, namespace, *rest)
            reduced = make_class, args, *state
        elif make is internals._make_skeleton_enum:
            reduced = reduce_enum(obj, reduced)
        else:
            return reduced
        return self._registrations.add_to(obj, self.reduce_class(obj, reduced))

    def _function_reduce(self, obj: FunctionType) -> Any:
        reduced = super()._function_reduce(obj)
        if reduced is NotImplemented:
            return reduced
        if obj.__code__ is _DISPATCHER:
            return _reduce_dispatcher(obj)
        self.on_function_by_value(obj)
        return self._registrations.add_to(obj, reduced)


def _is_typed_dict(cls: type) -> bool:
    # The metaclass is in typing, or in typing_extensions.
    return type(cls).__name__ == "_TypedDictMeta"


def _typed_dict_bases(cls: Any) -> tuple[Any, ...]:
    # A TypedDict has its bases' members already.
    bases = vars(cls).get("__orig_bases__", ())
    typed_dict = sys.modules[type(cls).__module__].TypedDict
    return (typed_dict, *(b for b in bases if typing.get_origin(b) is typing.Generic))


def _is_importable(value: Any) -> bool:
    """Return whether other processes find an object by name."""
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == MAIN:
        return False
    name = getattr(value, "__qualname__", value.__name__)
    return resolve(name, vars(module)) is value


def _unless_importable(reducer: Callable[[Any], _Reduced]) -> Callable[[Any], Any]:
    @functools.wraps(reducer)
    def reduce(value: Any) -> Any:
        return NotImplemented if _is_importable(value) else reducer(value)

    return reduce


def _reduce_special_module(module: types.ModuleType) -> Any:
    # For example torch.ops, or a module that imports its members on use.
    is_importable = sys.modules.get(module.__name__) is module
    return (importlib.import_module, (module.__name__,)) if is_importable else NotImplemented


def _needs_arguments(kind: type) -> bool:
    """Return whether `__new__`, which pickle calls without arguments, needs some.

    JAX's `custom_vjp` does.
    """
    is_customized = any(
        getattr(kind, name, None) is not getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    )
    new = kind.__new__
    if is_customized or not isinstance(new, FunctionType) or kind in copyreg.dispatch_table:
        return False
    if issubclass(kind, type):
        return False  # cloudpickle creates classes
    try:
        inspect.signature(new).bind(kind)
    except TypeError:
        return True
    return False


def _reduce_bare(value: Any) -> Any:
    _, _, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make_bare, (type(value),), *rest


@_unless_importable
def _reduce_cache(cache: Any) -> _Reduced:
    state = {name: value for name, value in vars(cache).items() if name != "__wrapped__"}
    return make_cache, (cache.__wrapped__, cache.cache_parameters()), state


def make_cache(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(value: functools.cached_property[Any]) -> _Reduced:
    return make_cached_property, (value.func, value.attrname)


def make_cached_property(
    function: Callable[[Any], Any], name: str | None
) -> functools.cached_property[Any]:
    """Return a `functools.cached_property` for a class that already exists."""
    prop = functools.cached_property(function)
    if name is not None:
        prop.__set_name__(object, name)
    return prop


# All functions that singledispatch() returns share this code.
_DISPATCHER = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]


def _reduce_dispatcher(function: Any) -> _Reduced:
    registry = dict(function.registry)
    default = registry.pop(object)
    # The implementations are set later, because they refer to the dispatcher.
    return functools.singledispatch, (default,), list(registry.items()), None, None, register_all


def register_all(function: Any, implementations: Iterable[tuple[type, Any]]) -> None:
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
    """Return a `typing.NewType`; the pickle sets its supertype later."""
    kind: Any = typing.NewType
    new_type = kind(name, object)
    new_type.__qualname__, new_type.__module__ = qualname, module
    return new_type


@_unless_importable
def _reduce_param_spec(value: Any) -> _Reduced:
    options = {
        "bound": value.__bound__,
        "covariant": value.__covariant__,
        "contravariant": value.__contravariant__,
    }
    return make_parameter, (typing.ParamSpec, value.__name__, value.__module__, options)


@_unless_importable
def _reduce_type_var_tuple(value: Any) -> _Reduced:
    return make_parameter, (typing.TypeVarTuple, value.__name__, value.__module__, {})


def make_parameter(kind: Any, name: str, module: str, options: Mapping[str, Any]) -> Any:
    parameter = kind(name, **options)
    parameter.__module__ = module
    return parameter


def _reduce_alias(cells: dict[int, list[Any]], value: Any) -> Any:
    """Reduce the alias of a `type` statement, which may refer to itself.

    The lists in `cells` have the values of the aliases reduced so far, by the aliases' ids.
    """
    if _is_importable(value):
        return NotImplemented
    cell = cells.setdefault(id(value), [value.__value__])
    return make_type_alias, (value.__name__, value.__module__, cell, value.__type_params__)


def make_type_alias(name: str, module: str, cell: list[Any], parameters: tuple[Any, ...]) -> Any:
    """Return the alias of a `type` statement, whose value may be added to `cell` later.

    With parameters, the value is read now, and a forward reference replaces a missing value.
    """
    scope: dict[str, Any] = {"__name__": module, "_cell": cell}
    if not parameters:
        exec(f"type {name} = _cell[0]", scope)  # the name comes from the user's own code
        return scope[name]
    value = cell[0] if cell else typing.ForwardRef(name)
    scope |= {"_make": _ALIAS, "_arguments": (name, value), "_parameters": parameters}
    exec("_made = _make(*_arguments, type_params=_parameters)", scope)
    return scope["_made"]


def _singleton_by_name(
    module: types.ModuleType, name: str
) -> tuple[type, Callable[[Any], _Reduced]]:
    return type(getattr(module, name)), lambda _: (getattr, (module, name))


# Exists from Python 3.12 on.
_ALIAS: type | None = vars(typing).get("TypeAliasType")
_REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(lambda: None)): _reduce_cache,
    functools.cached_property: _reduce_cached_property,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_param_spec,
    typing.TypeVarTuple: _reduce_type_var_tuple,
    # dataclasses compares them by identity.
    **dict(
        _singleton_by_name(dataclasses, name)
        for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
    ),
}


@dataclasses.dataclass(frozen=True)
class BroadcastValue:
    """A rank's replacement for `pyspark.Broadcast`."""

    value: Any


def _reduce_or_refuse(value: Any) -> Any:
    return (BroadcastValue, (value.value,)) if is_broadcast(type(value)) else refuse(value)


class DigestPickler(ReducingPickler):
    """A pickler that gives equal bytes for the same code in every session."""

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        return _reduce_type_variable if kind is typing.TypeVar else super().reducer_of(kind)

    def reduce_class(self, cls: type, reduced: _Reduced) -> _Reduced:
        # Leave out the tracker, which is a new number in each process.
        make, (*args, _tracker, extra), *state = reduced
        return make, (*args, None, extra), *state


def _reduce_type_variable(value: Any) -> Any:
    reduced = internals._typevar_reduce(value)
    if reduced[0] is internals._make_typevar:
        return reduced[0], (*reduced[1][:-1], None)
    return reduced


class ValuePickler(ReducingPickler):
    """A pickler of return values, which refers to the driver's classes of `__main__` by name."""

    def __init__(self, file: Any, names: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._names = names

    def reduce_class(self, cls: type, reduced: _Reduced) -> _Reduced:
        if cls.__module__ != MAIN or resolve(cls.__qualname__, self._names) is not cls:
            return reduced
        return class_of_driver, (internals._get_or_create_tracker_id(cls), cls.__qualname__)


def class_of_driver(tracker: str, name: str) -> type:
    """Return the class that this process has sent to the rank.

    If the class was deleted, for example because a cell was run again, its qualified name counts
    instead of cloudpickle's tracking id.

    Raises:
        AttributeError: there is no class with this id or name.
    """
    sent = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    cls = resolve(name, vars(sys.modules[MAIN])) if sent is None else sent
    if not isinstance(cls, type):
        raise AttributeError(f"the driver's __main__ no longer has a class {name}")
    return cls


def reduce_singleton(value: Any) -> _Reduced:
    """Reduce an object of `__main__` whose `__reduce__` returns only its name."""
    return copyreg.__newobj__, (type(value),), getattr(value, "__dict__", None) or None  # type: ignore[attr-defined]
