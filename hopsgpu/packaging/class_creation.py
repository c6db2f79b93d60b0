"""Creation of classes that were pickled by value, and of objects: contents follow later."""

from __future__ import annotations

import abc
import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle as internals


def make_class(
    metaclass: type,
    name: str,
    bases: tuple[Any, ...],
    namespace: Mapping[str, Any],
    tracker: str | None,
    extra: Any,
) -> type:
    """Create an empty class as cloudpickle does; its members follow.

    A metaclass or an `__init_subclass__` that requires keywords of the class statement, which
    nobody knows any more, is not called: what it has done to the class is among the members.
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
                except TypeError:  # the metaclass needs keywords too: the first error says more
                    continue
                tracked: type = internals._lookup_class_or_track(tracker, made)
                return tracked
        raise


@contextlib.contextmanager
def _without_hooks(bases: Iterable[type]) -> Iterator[None]:
    """Make the `__init_subclass__` of classes, and of their bases, do nothing meanwhile."""
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


def make_container_class(
    is_registered: Callable[[type], bool],
    metaclass: type,
    name: str,
    bases: tuple[Any, ...],
    namespace: Mapping[str, Any],
    tracker: str | None,
    extra: Any,
) -> type:
    """Create an empty class whose registration as a container follows.

    The `__init_subclass__` of a base, as Flax has it, would register the class without its fields,
    so it is not called: what it has done to the class is among the members.

    Raises:
        TypeError: the metaclass registers the class.
    """
    known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if known is not None:
        return known
    with _without_hooks(types.resolve_bases(bases)):
        made = make_class(metaclass, name, bases, namespace, tracker, extra)
    if is_registered(made):
        raise TypeError(
            f"{metaclass.__module__}.{metaclass.__qualname__} registers the class {name} as a"
            " container before the class has its fields"
        )
    return made


def make_bare(kind: type) -> Any:
    """Return an object without its state, which follows; no `__new__` in Python is called."""
    base: Any = next(base for base in kind.__mro__ if not isinstance(base.__new__, FunctionType))
    return base.__new__(kind)
