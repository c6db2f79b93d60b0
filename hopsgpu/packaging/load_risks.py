"""Objects of a call whose load runs their own code, so that the load may fail in a rank.

By default, pickle creates an object of the class and sets its attributes, which cannot fail.
Customized pickling can fail, and so can code that runs while a class is created.
"""

from __future__ import annotations

import copyreg
import enum
import sys
import types
from typing import Any

# Packages whose classes are known to load.
_SAFE_PACKAGES = frozenset(
    (
        *("PIL", "attr", "attrs", "cloudpickle", "hopsgpu", "jax", "jaxlib", "lightning"),
        *("ml_dtypes", "nanobind", "numpy", "pandas", "pyarrow", "pytorch_lightning", "scipy"),
        *("sklearn", "torch", "torchmetrics", "torchvision", "typing_extensions"),
    )
)
# Packages whose classes are safe as bases of a script's classes, but customize pickling.
_SAFE_BASE_PACKAGES = frozenset({"accelerate", "flax", "keras", "tensorflow", "transformers"})
# Methods that pickle calls when it loads an object. It calls `__getattr__` for `__setstate__`,
# before the object has its attributes.
_LOAD_METHODS: frozenset[str] = frozenset(
    (
        *("__getattr__", "__getattribute__", "__getnewargs__", "__getnewargs_ex__"),
        *("__new__", "__reduce__", "__reduce_ex__", "__setstate__"),
    )
)
_CREATION_METHODS = frozenset({"__init_subclass__"})


class LoadRisks:
    """A recorder of objects that may fail to load, while a call is pickled.

    Attributes:
        samples: the first object of each such type; for a class that is pickled by value and whose
            creation runs code, the class itself.
    """

    def __init__(self) -> None:
        self.samples: dict[type, object] = {}
        self._classes: set[type] = set()
        self._kinds: set[type] = set()

    def record(self, value: object, *, is_by_value: bool) -> None:
        """Record an object that is about to be pickled, as `ImportRecorder.record` does."""
        kind = type(value)
        if issubclass(kind, type):
            cls: Any = value
            if is_by_value and cls not in self._classes:
                self._classes.add(cls)
                if can_fail_to_create(cls):
                    self.samples[cls] = cls
        elif kind not in self._kinds:
            self._kinds.add(kind)
            if can_fail_to_load(kind):
                self.samples[kind] = value


def can_fail_to_load(kind: type) -> bool:
    if _is_in(kind, _SAFE_PACKAGES) or isinstance(kind, enum.EnumMeta):
        return False
    methods = _LOAD_METHODS
    cls: Any = kind
    if (cls.__reduce__, cls.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
        # For example, the load of an exception calls its class.
        methods |= {"__init__"}
    if issubclass(kind, (list, dict, set)):
        methods |= {"__setitem__", "append", "extend", "add"}
    if not hasattr(kind, "__setstate__") and any(vars(c).get("__slots__") for c in kind.__mro__):
        methods |= {"__setattr__"}
    return kind in copyreg.dispatch_table or any(
        _has_unsafe_method(cls, methods) for cls in kind.__mro__ if not _is_in(cls, _SAFE_PACKAGES)
    )


def can_fail_to_create(cls: type) -> bool:
    packages = _SAFE_PACKAGES | _SAFE_BASE_PACKAGES
    bases = [base for base in cls.__mro__[1:] if not _is_in(base, packages)]
    return not _is_in(type(cls), packages) or any(
        _has_unsafe_method(base, _CREATION_METHODS) for base in bases
    )


def _is_in(cls: type, packages: frozenset[str]) -> bool:
    # `__module__` of a class may be a property.
    first = str(cls.__module__).partition(".")[0]
    return first in packages or first in sys.stdlib_module_names


def _has_unsafe_method(cls: type, names: frozenset[str]) -> bool:
    members = (value for name, value in vars(cls).items() if name in names)
    return any(not _is_generated(value) for value in members)


def _is_generated(method: Any) -> bool:
    """Return whether Python generated a method, as for dataclasses, enums and named tuples."""
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    module = str(function.__module__)
    return module.startswith("namedtuple_") or module in ("dataclasses", "enum", "collections")
