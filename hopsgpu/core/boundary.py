"""Where users' code calls hopsgpu: an error that leaves it bears no frames of hopsgpu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hopsgpu import tracebacks
from hopsgpu.errors import HopsGpuError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class CallError(TypeError):
    """A call that does not fit a signature, told from a fault in hopsgpu's own code."""


# What Python raises itself, and what a person is to read.
CallError.__module__ = "builtins"
CallError.__name__ = CallError.__qualname__ = TypeError.__name__


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that users call.

    An error that hopsgpu raises on purpose, and Ctrl-C, leave it with frames of the user's code
    alone. All else is a fault, or came through the user's own code, and keeps its frames.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (HopsGpuError, CallError, KeyboardInterrupt) as error:
            tracebacks.trim(error, on_purpose=True)
            # Adds no frame: what is raised again without a name keeps the traceback that it has.
            raise

    return call


def public_class(kind: type[T]) -> type[T]:
    """Marks a class that users make values of, as `public` does a function."""
    # As an attribute of any: a dataclass has its own only now.
    made: Any = kind
    made.__init__ = public(made.__init__)
    return kind
