"""Handling of Ctrl-C while a run is prepared and awaited.

A KeyboardInterrupt raised inside a py4j call makes py4j close the connections of all threads,
whose calls then run twice; PySpark's own handler fails inside py4j and leaves the job, and its
GPUs, behind. So the handler only records the signal, and KeyboardInterrupt is raised where no call
to Spark is in progress.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar, cast

from hopsgpu import tracebacks
from hopsgpu.core.boundary import EXPECTED_ERRORS
from hopsgpu.core.signatures import check_call, document_arguments, signature_of
from hopsgpu.runs.run import Handle, Run

log = logging.getLogger(__name__)

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

_SLICE_SECONDS = 0.2


@contextlib.contextmanager
def interrupts_noted() -> Iterator[threading.Event]:
    """Provide an event that a first Ctrl-C only sets; a second Ctrl-C interrupts at once.

    In threads other than the main one the event is never set: Python delivers signals to the main
    thread only.
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
    """Return the run's result; after Ctrl-C, cancel the run and wait until it has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the message says how the run ended.
        HopsGpuError: the error that ended the run.
    """
    # In slices, because Python runs a signal handler only between two waits.
    while not run.wait(_SLICE_SECONDS):
        if interrupted.is_set():
            raise cancelled_by_interrupt(run)
    if interrupted.is_set():
        raise interruption(run.end)
    return run.result()


def cancelled_by_interrupt(run: Handle[R]) -> KeyboardInterrupt:
    """Cancel a run, wait for its end, and return the KeyboardInterrupt to raise.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed again.
    """
    log.info("%s: cancelled by Ctrl-C; waits for the end of the run", run.run_id)
    run.cancel()
    try:
        while not run.wait(_SLICE_SECONDS):
            pass
    except KeyboardInterrupt:
        raise interruption(
            f"{run.run_id} is being cancelled; a second Ctrl-C ended the wait for the release of"
            " its executors: `hopsgpu gpus` shows who has them"
        ) from None
    return interruption(run.end)


def interruption(words: str) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt for Ctrl-C; a notebook shows it in one line."""
    raised = KeyboardInterrupt(words)
    if not tracebacks.should_show_all():
        # The class must be KeyboardInterrupt itself, or Python would not exit as on an interrupt.
        vars(raised)["_render_traceback_"] = functools.partial(tracebacks.format_error, raised)
    return raised


def takes(
    options: Callable[P, A], *, is_documented: bool = True
) -> Callable[[Callable[[A, threading.Event], R]], Callable[P, R]]:
    """Give a function that takes options the signature of their dataclass.

    Ctrl-C sets the event that is passed to the function, and is raised once the function returns.

    Args:
        is_documented: whether the function's docstring gets a section about them.
    """
    of_options = cast(type, options)
    signature = signature_of(of_options)

    def decorate(function: Callable[[A, threading.Event], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                check_call(function.__name__, signature, args, kwargs)
                with interrupts_noted() as interrupted:
                    result = function(options(*args, **kwargs), interrupted)
                    if interrupted.is_set() and isinstance(result, Run):
                        # The caller never gets the handle, so the run could not be cancelled later.
                        raise cancelled_by_interrupt(result)
                if interrupted.is_set():
                    raise KeyboardInterrupt
                return result
            except EXPECTED_ERRORS as error:
                # As `public` does, which would be one more frame of each call.
                tracebacks.trim(error, is_deliberate=True)
                raise

        returns = inspect.signature(function).return_annotation
        shown = signature.replace(return_annotation=returns)
        call.__signature__ = shown  # type: ignore[attr-defined]
        arguments = {name: p.annotation for name, p in shown.parameters.items()}
        call.__annotations__ = {**arguments, "return": returns}
        return document_arguments(of_options)(call) if is_documented else call

    return decorate
