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

    Threads, exit functions and flushes are as usual, but modules are not torn down. That would run
    destructors of the fork server's objects. A framework's threads can also crash then (torch's
    "terminate called without an active exception").

    A child that the body has forked does not run this process's exit functions.
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
