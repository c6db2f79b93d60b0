"""Ctrl-C while a run is asked for and waited for.

A KeyboardInterrupt raised inside a py4j call makes py4j close the connections of all threads,
whose calls then run twice; and PySpark's own handler fails inside py4j and leaves the job, and
its GPUs, behind. So the signal is noted, and raised where nothing of Spark is under way.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import ParamSpec, TypeVar

from hopsgpu import tracebacks
from hopsgpu.core.boundary import CallError, public
from hopsgpu.launcher.run import Handle, Run

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

_SLICE_SECONDS = 0.2


@contextlib.contextmanager
def interrupts_noted() -> Iterator[threading.Event]:
    """While inside, a first Ctrl-C only sets the event; a second one interrupts at once.

    In other threads than the main one there is nothing to note: Python's signals are not theirs.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted.is_set():
            signal.default_int_handler(number, frame)
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(run: Handle[R], interrupted: threading.Event) -> R:
    """The run's result; once interrupted, the run is cancelled and its GPUs are back first.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
        HopsGpuError: what ended the run.
    """
    # In slices, because Python runs a signal's handler only between two of them.
    while not run.wait(_SLICE_SECONDS):
        if interrupted.is_set():
            raise cancelled_by_interrupt(run)
    if interrupted.is_set():
        raise interruption(run.end)
    return run.result()


def cancelled_by_interrupt(run: Handle[R]) -> KeyboardInterrupt:
    """Cancels a run and waits for its end; what is to be raised then.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed again.
    """
    run.cancel()
    try:
        while not run.wait(_SLICE_SECONDS):
            pass
    except KeyboardInterrupt:
        raise interruption(
            f"{run.run_id} is being cancelled; this was interrupted again before it was seen that"
            " what it held is back"
        ) from None
    return interruption(run.end)


def interruption(words: str) -> KeyboardInterrupt:
    """What Ctrl-C raises; a notebook shows it in a line.

    Args:
        words: what has become of what was interrupted.
    """
    raised = KeyboardInterrupt(words)
    if not tracebacks.shows_all():
        # Of this very class, or Python would not end as who is interrupted ends.
        vars(raised)["_render_traceback_"] = functools.partial(tracebacks.in_words, raised)
    return raised


def takes(
    checked: Callable[P, A],
) -> Callable[[Callable[[A, threading.Event], R]], Callable[P, R]]:
    """Gives a function of checked arguments the signature that they are made from.

    Ctrl-C sets the event that the function gets, and is raised when the function is done.
    """
    signature = inspect.signature(checked)

    def decorate(function: Callable[[A, threading.Event], R]) -> Callable[P, R]:
        @public
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_call(function.__name__, signature, args, kwargs)
            with interrupts_noted() as interrupted:
                result = function(checked(*args, **kwargs), interrupted)
                if interrupted.is_set() and isinstance(result, Run):
                    # Its handle is lost with this.
                    raise cancelled_by_interrupt(result)
            if interrupted.is_set():
                raise KeyboardInterrupt
            return result

        returns = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return call

    return decorate


def check_call(
    name: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Refuses what does not fit by the name that was called; Python would tell an inner one.

    Args:
        name: of the function that was called.
        signature: of what its arguments are handed to.
        args: that it was given.
        kwargs: that it was given by name.

    Raises:
        TypeError: an argument that there is not, or that is missing, or given twice.
    """
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY]
        for given in kwargs:
            if given not in known:
                like = difflib.get_close_matches(given, known, n=1)
                meant = f": did you mean {like[0]!r}?" if like else f"; it has {', '.join(known)}"
                raise CallError(
                    f"{name}() got an unexpected keyword argument {given!r}{meant}"
                ) from None
        raise CallError(f"{name}() {error}") from None
