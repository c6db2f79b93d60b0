"""Creation of empty classes and objects while a pickle is loaded; the pickle fills them later."""

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
    """Create an empty class as cloudpickle does.

    The keywords of the class statement are lost. A metaclass or `__init_subclass__` that requires
    keywords is not called: its changes to the class come with the members.
    """
    make = internals._make_skeleton_class
    try:
        cls: type = make(metaclass, name, bases, namespace, tracker, extra)
        return cls
    except TypeError:
        plain = abc.ABCMeta if issubclass(metaclass, abc.ABCMeta) else type
        resolved_bases = types.resolve_bases(bases)
        with _without_hooks(resolved_bases):
            for maker in (metaclass, plain):
                try:
                    cls = maker.__new__(metaclass, name, resolved_bases, dict(namespace))
                except TypeError:  # the metaclass needs keywords too: raise the first error
                    continue
                tracked: type = internals._lookup_class_or_track(tracker, cls)
                return tracked
        raise


@contextlib.contextmanager
def _without_hooks(bases: Iterable[type]) -> Iterator[None]:
    """Disable the `__init_subclass__` of classes and their bases."""
    hooks = {
        cls: vars(cls)["__init_subclass__"]
        for base in bases
        for cls in base.__mro__
        if "__init_subclass__" in vars(cls)
        and cls.__module__.partition(".")[0] not in sys.stdlib_module_names
    }
    try:
        for cls in hooks:
            type.__setattr__(cls, "__init_subclass__", classmethod(lambda cls: None))
        yield
    finally:
        for cls, hook in hooks.items():
            type.__setattr__(cls, "__init_subclass__", hook)


def make_container_class(is_registered: Callable[[type], bool], *args: Any) -> type:
    """Create an empty class, as `make_class(*args)` does, that is registered as a container later.

    `__init_subclass__` is not called: Flax's would register the class without fields.

    Raises:
        TypeError: the metaclass registers the class.
    """
    metaclass, name, bases, _, tracker, _ = args
    existing: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if existing is not None:
        return existing
    with _without_hooks(types.resolve_bases(bases)):
        cls = make_class(*args)
    if is_registered(cls):
        raise TypeError(
            f"{metaclass.__module__}.{metaclass.__qualname__} registers the class {name} as a"
            " container before the class has its fields"
        )
    return cls


def make_bare(kind: type) -> Any:
    """Return an object without its state; no `__new__` in Python is called."""
    base: Any = next(base for base in kind.__mro__ if not isinstance(base.__new__, FunctionType))
    return base.__new__(kind)
