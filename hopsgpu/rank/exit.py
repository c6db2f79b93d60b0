"""The end of a rank's process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from hopsgpu import linux


def end(body: Callable[[], int]) -> NoReturn:
    """Run the body and end this process as the interpreter ends, in its order.

    Waits for threads, runs exit functions, flushes; without taking modules apart, which in a forked
    process would run destructors of the fork server's objects, and in which the threads of a
    framework whose objects still live can crash (torch's "terminate called without an active
    exception").

    A child that the body has forked and that comes to its end does not run exit functions: they
    undo what is this process's.
    """
    own, code = os.getpid(), 1
    try:
        try:
            code = body()
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException:  # noqa: BLE001 - as the interpreter shows it
            sys.excepthook(*sys.exc_info())
        threading._shutdown()  # type: ignore[attr-defined]
        if os.getpid() == own:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        linux.flush_c()
    finally:
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1
