"""The boundary between users' code and hopsgpu, whose frames are hidden in errors that leave it."""

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
    """A call that does not fit a signature. Any other TypeError is a bug in hopsgpu."""


# Users see the TypeError that Python itself raises for such a call.
CallError.__module__ = "builtins"
CallError.__name__ = CallError.__qualname__ = TypeError.__name__


# Errors that hopsgpu raises on purpose, and Ctrl-C.
EXPECTED_ERRORS = (HopsGpuError, CallError, KeyboardInterrupt)


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that users call.

    Errors that hopsgpu raises on purpose, and Ctrl-C, leave the function with frames of the user's
    code only. Any other error is a bug, or comes from the user's own code, and keeps its frames.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except EXPECTED_ERRORS as error:
            tracebacks.trim(error, is_deliberate=True)
            # A bare `raise` keeps the traceback.
            raise

    return call


def public_class(kind: type[T]) -> type[T]:
    """Mark a class that users construct, as `public` marks a function."""
    # Typed as Any: mypy does not know the `__init__` of a dataclass here.
    cls: Any = kind
    cls.__init__ = public(cls.__init__)
    return kind
