"""Picklers that support more of what a script defines in `__main__` than cloudpickle does.

cloudpickle pickles by name what it does not recognize as defined in `__main__`, and no other
process then finds it; or it copies objects that are compared by identity.
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
    """Return what a qualified name refers to; None if it refers to nothing.

    Args:
        name: a name in the form of `__qualname__`.
        namespace: namespace of a module.
    """
    first, *rest = name.split(".")
    value = namespace.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value


class ReducingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of what cloudpickle pickles, and of what is listed in `_REDUCERS`."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known: dict[type, Callable[[Any], Any] | None] = {}
        self._registrations = Registrations()

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        """Return what reduces objects of a type; None if cloudpickle reduces them."""
        if kind is _ALIAS:
            return functools.partial(_reduce_alias, {})
        if issubclass(kind, types.ModuleType) and kind is not types.ModuleType:
            return _reduce_special_module
        if _needs_arguments(kind):
            return _reduce_bare
        return _reduce_or_refuse if may_be_refused(kind) else _REDUCERS.get(kind)

    def class_by_value(self, cls: type, reduced: _Reduced) -> _Reduced:
        """Return how to pickle a class by value; called for each such class, with a proposal."""
        return reduced

    def function_by_value(self, function: FunctionType) -> None:
        """Handle a function that is pickled by value; called for each such function."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; `pickle.Pickler` calls this for all but a few built-in types."""
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
            # Without its qualified name a nested class would be a top-level one, and pickle would
            # look for it in the module.
            namespace = {**namespace, "__qualname__": obj.__qualname__}
            args = (kind, name, bases, namespace, *rest)
            reduced = make_class, args, *state
        elif make is internals._make_skeleton_enum:
            reduced = reduce_enum(obj, reduced)
        else:
            return reduced
        return self._registrations.carried_by(obj, self.class_by_value(obj, reduced))

    def _function_reduce(self, obj: FunctionType) -> Any:
        reduced = super()._function_reduce(obj)
        if reduced is NotImplemented:
            return reduced
        if obj.__code__ is _DISPATCHER:
            return _reduce_dispatcher(obj)
        self.function_by_value(obj)
        return self._registrations.carried_by(obj, reduced)


def _is_typed_dict(cls: type) -> bool:
    # The metaclass is that of typing, or that of typing_extensions for older Pythons.
    return type(cls).__name__ == "_TypedDictMeta"


def _typed_dict_bases(cls: Any) -> tuple[Any, ...]:
    """Return the bases to create a TypedDict with; its members include those of its bases."""
    bases = vars(cls).get("__orig_bases__", ())
    typed_dict = sys.modules[type(cls).__module__].TypedDict
    return (typed_dict, *(b for b in bases if typing.get_origin(b) is typing.Generic))


def _is_importable(value: Any) -> bool:
    """Return whether other processes find an object by name, as cloudpickle checks functions."""
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
    """Return whether pickle would create objects of a type by a call that cannot succeed.

    By default pickle calls `__new__` without arguments. An object of JAX's `custom_vjp` could not
    be loaded then.
    """
    has_own_way = any(
        getattr(kind, name, None) is not getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    )
    new = kind.__new__
    if has_own_way or not isinstance(new, FunctionType) or kind in copyreg.dispatch_table:
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
    """Return a function with an empty cache, as `functools.lru_cache` makes it."""
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(value: functools.cached_property[Any]) -> _Reduced:
    return make_cached_property, (value.func, value.attrname)


def make_cached_property(
    function: Callable[[Any], Any], name: str | None
) -> functools.cached_property[Any]:
    """Return a `functools.cached_property` for a class that exists already."""
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


# All functions that singledispatch() makes share their code.
_DISPATCHER = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]


def _reduce_dispatcher(function: Any) -> _Reduced:
    registry = dict(function.registry)
    default = registry.pop(object)
    # The implementations come later, because they refer to the function that is made here.
    return functools.singledispatch, (default,), list(registry.items()), None, None, register_all


def register_all(function: Any, implementations: Iterable[tuple[type, Any]]) -> None:
    """Register implementations of a function that `functools.singledispatch` has made."""
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
    """Return a `typing.NewType`, whose supertype follows."""
    kind: Any = typing.NewType
    made = kind(name, object)
    made.__qualname__, made.__module__ = qualname, module
    return made


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
    """Return a `typing.ParamSpec` or `typing.TypeVarTuple`."""
    made = kind(name, **options)
    made.__module__ = module
    return made


def _reduce_alias(held: dict[int, list[Any]], value: Any) -> Any:
    """Reduce what a `type` statement made, which may refer to itself.

    Args:
        held: values of the aliases met so far, by the aliases' identities.
        value: what the statement made.
    """
    if _is_importable(value):
        return NotImplemented
    own = held.setdefault(id(value), [value.__value__])
    return make_alias, (value.__name__, value.__module__, own, value.__type_params__)


def make_alias(name: str, module: str, held: list[Any], parameters: tuple[Any, ...]) -> Any:
    """Return what a `type` statement makes.

    Args:
        name, module: those of the alias.
        held: a list with its value. The value may be added later; but with parameters it is read at
            once, and a forward reference replaces a value that is missing.
        parameters: type parameters, as of generic classes.
    """
    scope: dict[str, Any] = {"__name__": module, "_held": held}
    if not parameters:
        exec(f"type {name} = _held[0]", scope)  # the name comes from the user's own code
        return scope[name]
    value = held[0] if held else typing.ForwardRef(name)
    scope |= {"_make": _ALIAS, "_arguments": (name, value), "_parameters": parameters}
    exec("_made = _make(*_arguments, type_params=_parameters)", scope)
    return scope["_made"]


def _by_name(module: types.ModuleType, name: str) -> tuple[type, Callable[[Any], _Reduced]]:
    """Return the type of a module's singleton, and a reducer that refers to it by name."""
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
    **dict(_by_name(dataclasses, name) for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")),
}


@dataclasses.dataclass(frozen=True)
class BroadcastValue:
    """What a rank gets in place of a broadcast variable of Spark.

    Attributes:
        value: the same as in `pyspark.Broadcast`.
    """

    value: Any


def _reduce_or_refuse(value: Any) -> Any:
    return (BroadcastValue, (value.value,)) if is_broadcast(type(value)) else refuse(value)


class DigestPickler(ReducingPickler):
    """A pickler that gives equal bytes for the same code in every session."""

    def reducer_of(self, kind: type) -> Callable[[Any], Any] | None:
        return _reduce_type_variable if kind is typing.TypeVar else super().reducer_of(kind)

    def class_by_value(self, cls: type, reduced: _Reduced) -> _Reduced:
        # The tracker is left out: it is a new number in each process.
        make, (*args, _tracker, extra), *state = reduced
        return make, (*args, None, extra), *state


def _reduce_type_variable(value: Any) -> Any:
    reduced = internals._typevar_reduce(value)
    if reduced[0] is internals._make_typevar:
        return reduced[0], (*reduced[1][:-1], None)
    return reduced


class ValuePickler(ReducingPickler):
    """A pickler of what a rank returns: the driver gets classes of its own `__main__` back.

    Args:
        file: the file to write.
        names: what came from the driver's `__main__`, by its names there.
    """

    def __init__(self, file: Any, names: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._names = names

    def class_by_value(self, cls: type, reduced: _Reduced) -> _Reduced:
        if cls.__module__ != MAIN or resolve(cls.__qualname__, self._names) is not cls:
            return reduced
        return class_of_driver, (internals._get_or_create_tracker_id(cls), cls.__qualname__)


def class_of_driver(tracker: str, name: str) -> type:
    """Return the class that this process has sent to the rank.

    Args:
        tracker: cloudpickle's tracking id of the class.
        name: its qualified name in `__main__`, used if the class itself is gone, for example
            because a cell was run again.

    Raises:
        AttributeError: there is no class of that name either.
    """
    sent = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    found = resolve(name, vars(sys.modules[MAIN])) if sent is None else sent
    if not isinstance(found, type):
        raise AttributeError(f"the driver's __main__ no longer has a class {name}")
    return found


def reduce_singleton(value: Any) -> _Reduced:
    """Reduce an object of `__main__` whose own `__reduce__` returns only its name."""
    return copyreg.__newobj__, (type(value),), getattr(value, "__dict__", None) or None  # type: ignore[attr-defined]
