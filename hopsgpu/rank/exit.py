"""How a rank's process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from hopsgpu import linux


def end(body: Callable[[], int]) -> NoReturn:
    """Run the body, and end this process in the order in which the interpreter ends.

    The function waits for threads, runs exit functions and flushes files. It does not tear modules
    down: in a forked process that would run destructors of the fork server's objects, and the
    threads of a framework whose objects are still alive can crash (torch's "terminate called
    without an active exception").

    A child that the body has forked does not run the exit functions when it ends, because they
    clean up for this process.
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
