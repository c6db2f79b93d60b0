"""Objects of a call whose load runs code of their own, so that the load may fail in a rank.

Python's default way to pickle an object cannot fail when the object is loaded: it creates an object
of the class and sets its attributes. Own ways can, and so can code that runs while a class is
created.
"""

from __future__ import annotations

import copyreg
import enum
import sys
import types
from typing import Any

# Packages whose classes are known to load.
_KNOWN = frozenset(
    {
        "PIL",
        "attr",
        "attrs",
        "cloudpickle",
        "hopsgpu",
        "jax",
        "jaxlib",
        "lightning",
        "ml_dtypes",
        "nanobind",
        "numpy",
        "pandas",
        "pyarrow",
        "pytorch_lightning",
        "scipy",
        "sklearn",
        "torch",
        "torchmetrics",
        "torchvision",
        "typing_extensions",
    }
)
# Packages whose classes can be the bases of a script's classes, but whose objects have own ways.
_KNOWN_BASES = frozenset({"accelerate", "flax", "keras", "tensorflow", "transformers"})
# Methods that pickle calls when it loads an object. `__getattr__` is one, because pickle looks for
# `__setstate__` before the object has its attributes.
_HOOKS: frozenset[str] = frozenset(
    {
        "__getattr__",
        "__getattribute__",
        "__getnewargs__",
        "__getnewargs_ex__",
        "__new__",
        "__reduce__",
        "__reduce_ex__",
        "__setstate__",
    }
)
_CREATES_CLASSES = frozenset({"__init_subclass__"})


class LoadRisks:
    """A record of such objects, kept while a call is pickled.

    Attributes:
        found: the first object of each such type; for a class that is pickled by value and runs
            code while it is created, the class itself.
    """

    def __init__(self) -> None:
        self.found: dict[type, object] = {}
        self._classes: set[type] = set()
        self._kinds: set[type] = set()

    def record(self, value: object, *, is_by_value: bool) -> None:
        """Note an object that is about to be pickled.

        Args:
            value: any object that is no number, text or built-in container.
            by_value: whether it is pickled by value, where that can differ.
        """
        kind = type(value)
        if issubclass(kind, type):
            cls: Any = value
            if is_by_value and cls not in self._classes:
                self._classes.add(cls)
                if creation_runs_code(cls):
                    self.found[cls] = cls
        elif kind not in self._kinds:
            self._kinds.add(kind)
            if load_runs_code(kind):
                self.found[kind] = value


def load_runs_code(kind: type) -> bool:
    """Return whether loading an object of a type runs code that is not known to work."""
    if _is_known(kind, _KNOWN) or isinstance(kind, enum.EnumMeta):
        return False
    hooks = _HOOKS
    own: Any = kind
    if (own.__reduce__, own.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
        # An exception, for example, is loaded by a call of its class.
        hooks |= {"__init__"}
    if issubclass(kind, (list, dict, set)):
        hooks |= {"__setitem__", "append", "extend", "add"}
    if any(vars(cls).get("__slots__") for cls in kind.__mro__) and not hasattr(
        kind, "__setstate__"
    ):
        hooks |= {"__setattr__"}
    return kind in copyreg.dispatch_table or any(
        _has_own(cls, hooks) for cls in kind.__mro__ if not _is_known(cls, _KNOWN)
    )


def creation_runs_code(cls: type) -> bool:
    """Return whether creating a class anew runs code that is not known to work."""
    known = _KNOWN | _KNOWN_BASES
    return not _is_known(type(cls), known) or any(
        _has_own(base, _CREATES_CLASSES) for base in cls.__mro__[1:] if not _is_known(base, known)
    )


def _is_known(cls: type, packages: frozenset[str]) -> bool:
    # `__module__` of a class may be a property.
    first = str(cls.__module__).partition(".")[0]
    return first in packages or first in sys.stdlib_module_names


def _has_own(cls: type, names: frozenset[str]) -> bool:
    own = (value for name, value in vars(cls).items() if name in names)
    return any(not _is_generated(value) for value in own)


def _is_generated(method: Any) -> bool:
    """Return whether Python generated a method, as for dataclasses, enums and named tuples."""
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    module = str(function.__module__)
    return module.startswith("namedtuple_") or module in ("dataclasses", "enum", "collections")
