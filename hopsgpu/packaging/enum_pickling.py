"""Pickling of Enum classes of a script or notebook, with all of their members.

cloudpickle rebuilds such a class from its iterator. This drops aliases and combined flags, which
then cannot be created or are set twice, and attributes of members (`self.mass` of a planet).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from cloudpickle import cloudpickle as internals

_Reduced = tuple[Any, ...]

_METACLASS_ATTRIBUTES = frozenset(
    {"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_", "_hash_"}
)
_BOUNDARY = "boundary"


def reduce_enum(cls: type[enum.Enum], reduced: _Reduced) -> _Reduced:
    _, args, state, *_ = reduced
    bases, name, qualname, _, module, tracker, _ = args
    namespace, slots = state
    members = cls.__members__
    values = {name: member._value_ for name, member in members.items()}
    extra = {_BOUNDARY: cls.__dict__[key]} if (key := "_boundary_") in cls.__dict__ else None
    rest = {name: value for name, value in namespace.items() if name not in members}
    contents = {
        member._name_: attributes
        for member in members.values()
        if (attributes := {n: v for n, v in vars(member).items() if n not in _METACLASS_ATTRIBUTES})
    }
    constructor_args = (bases, name, qualname, values, module, tracker, extra)
    return make_enum, constructor_args, ((rest, slots), contents), None, None, fill_enum


def make_enum(
    bases: tuple[Any, ...],
    name: str,
    qualname: str,
    values: Mapping[str, Any],
    module: str,
    tracker: str | None,
    extra: Mapping[str, Any] | None,
) -> type[enum.Enum]:
    """Return an Enum class with its members, or this process's existing copy of it.

    Args:
        values: also of aliases.
        tracker: cloudpickle's id of the class.
        extra: the boundary of flags, if the class has one.
    """
    metaclass: Any = type(bases[-1])
    namespace = metaclass.__prepare__(name, bases)
    for member, value in values.items():
        # Without `enum.member`, a function would become a method.
        namespace[member] = enum.member(value) if hasattr(value, "__get__") else value
    cls = metaclass.__new__(metaclass, name, bases, namespace, **(extra or {}))
    cls.__module__, cls.__qualname__ = module, qualname
    tracked: type[enum.Enum] = internals._lookup_class_or_track(tracker, cls)
    return tracked


def fill_enum(cls: type[enum.Enum], state: tuple[Any, Mapping[str, Mapping[str, Any]]]) -> None:
    """Set the methods of a class that `make_enum` made, and attributes of its members."""
    class_state, contents = state
    internals._class_setstate(cls, class_state)
    for name, content in contents.items():
        vars(cls.__members__[name]).update(content)
