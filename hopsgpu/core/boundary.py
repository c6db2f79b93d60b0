"""The boundary at which users' code calls hopsgpu: errors that leave it hide hopsgpu's frames."""

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
    """A call that does not fit a signature, as distinct from a bug in hopsgpu's own code."""


# Users see the TypeError that Python itself raises for such a call.
CallError.__module__ = "builtins"
CallError.__name__ = CallError.__qualname__ = TypeError.__name__


# Errors that hopsgpu raises on purpose, and Ctrl-C.
EXPECTED_ERRORS = (HopsGpuError, CallError, KeyboardInterrupt)


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that users call.

    If an error that hopsgpu raises on purpose, or Ctrl-C, leaves the function, it has frames of the
    user's code only. Any other error is a bug, or came through the user's own code, and keeps its
    frames.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except EXPECTED_ERRORS as error:
            tracebacks.trim(error, on_purpose=True)
            # A bare `raise` adds no frame: the error keeps the traceback that it has.
            raise

    return call


def public_class(kind: type[T]) -> type[T]:
    """Mark a class of which users make values, as `public` marks a function."""
    # Typed as Any, because a dataclass gets its own __init__ only when the program runs.
    made: Any = kind
    made.__init__ = public(made.__init__)
    return kind
