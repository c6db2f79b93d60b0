"""Pickling of Enum classes of a script or notebook, with all of their members.

cloudpickle rebuilds such a class from what iterating over it yields. That omits aliases and
combined flags, which then cannot be created or are set twice, and it omits the attributes that
members have beside their value (`self.mass` of a planet).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from cloudpickle import cloudpickle as internals

_Reduced = tuple[Any, ...]

# Attributes that the metaclass itself gives a member.
_OF_METACLASS = frozenset(
    {"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_", "_hash_"}
)
_BOUNDARY = "boundary"


def reduce_enum(cls: type[enum.Enum], reduced: _Reduced) -> _Reduced:
    """Return how to rebuild an Enum class that is pickled by value, with all of its members.

    Args:
        cls: the class.
        reduced: cloudpickle's own reduction of it.
    """
    _, args, state, *_ = reduced
    bases, name, qualname, _, module, tracker, _ = args
    namespace, slots = state
    members = cls.__members__
    values = {name: member._value_ for name, member in members.items()}
    extra = {_BOUNDARY: cls.__dict__[key]} if (key := "_boundary_") in cls.__dict__ else None
    rest = {name: value for name, value in namespace.items() if name not in members}
    contents = {
        member._name_: own
        for member in members.values()
        if (own := {n: v for n, v in vars(member).items() if n not in _OF_METACLASS})
    }
    made = (bases, name, qualname, values, module, tracker, extra)
    return make_enum, made, ((rest, slots), contents), None, None, fill_enum


def make_enum(
    bases: tuple[Any, ...],
    name: str,
    qualname: str,
    values: Mapping[str, Any],
    module: str,
    tracker: str | None,
    extra: Mapping[str, Any] | None,
) -> type[enum.Enum]:
    """Return an Enum class with its members, or the copy of it that this process already has.

    Args:
        bases: base classes; the last one is an Enum class.
        name, qualname, module: those of the class.
        values: values of the members and aliases, by name.
        tracker: cloudpickle's tracking id of the class.
        extra: the boundary of flags, if the class has one; else None.
    """
    metaclass: Any = type(bases[-1])
    namespace = metaclass.__prepare__(name, bases)
    for member, value in values.items():
        # Without `enum.member`, a function would become a method.
        namespace[member] = enum.member(value) if hasattr(value, "__get__") else value
    made = metaclass.__new__(metaclass, name, bases, namespace, **(extra or {}))
    made.__module__, made.__qualname__ = module, qualname
    tracked: type[enum.Enum] = internals._lookup_class_or_track(tracker, made)
    return tracked


def fill_enum(cls: type[enum.Enum], state: tuple[Any, Mapping[str, Mapping[str, Any]]]) -> None:
    """Give a class what `make_enum` leaves out: methods, and what members have beside values."""
    of_class, contents = state
    internals._class_setstate(cls, of_class)
    for name, content in contents.items():
        vars(cls.__members__[name]).update(content)
