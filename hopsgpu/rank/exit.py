"""The exit of a rank's process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from hopsgpu import linux


def run_and_exit(body: Callable[[], int]) -> NoReturn:
    """Run the body, and exit this process like the interpreter, with the body's exit code.

    The function waits for threads, runs exit functions and flushes files, but does not tear modules
    down. In a forked process the teardown would run destructors of the fork server's objects. The
    threads of a framework whose objects are still alive can also crash then (torch's "terminate
    called without an active exception").

    A child that the body has forked does not run the exit functions, because these clean up for
    this process.
    """
    pid, code = os.getpid(), 1
    try:
        try:
            code = body()
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException:  # noqa: BLE001 - as the interpreter shows it
            sys.excepthook(*sys.exc_info())
        threading._shutdown()  # type: ignore[attr-defined]
        if os.getpid() == pid:
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
