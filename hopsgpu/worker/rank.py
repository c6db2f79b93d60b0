"""A rank: the process that runs the user's function.

Forked by a fork server, or started by the keeper as `python -m hopsgpu.worker.rank DIRECTORY
KEEPER_PID`, with the rank's environment, in the rank's own session. It leaves `outcome.json`, and
`value.pickle` where the function returned, in DIRECTORY.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hopsgpu.worker import exiting
from hopsgpu.worker.kernel import die_with

CALL = "call.pickle"
VALUE = "value.pickle"
OUTCOME = "outcome.json"
LOG = "log"
WORK = "work"

# What a rank says of itself where it has a value.
WELL = ("returned", "exited normally")

_IOLBF = 1
_HALF = 16 * 1024


def run(directory: Path) -> int:
    """Runs the call in a directory and returns the exit code.

    Raises:
        SystemExit: as the function raised it, unless it stands for success.
    """
    try:
        function, args, kwargs = pickle.loads((directory / CALL).read_bytes())
        value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            _leave(directory, {"status": "exited", "traceback": _users_traceback(error)})
            raise
        _leave(directory, {"status": "exited normally"}, _pickled(None))
        return 0
    except BaseException as error:  # noqa: BLE001 - told to the agent, whatever it is
        text = _users_traceback(error)
        print(text, file=sys.stderr, end="")
        kind = f"{type(error).__name__}: {_told(error)}"
        _leave(directory, {"status": "raised", "error": kind, "traceback": text})
        return 1
    try:
        pickled = _pickled(value)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises is reported
        reason = f"a {type(value).__qualname__} that cannot be pickled ({error})"
        _leave(directory, {"status": "unpicklable", "error": reason})
        return 1
    _leave(directory, {"status": "returned"}, pickled)
    return 0


def prepare_output() -> None:
    """Writes out each line as it ends, C's stdout included: a kill loses no whole line.

    A crash (SIGSEGV, say) and SIGUSR1 have the stacks of all threads written to stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)


def _users_traceback(error: BaseException) -> str:
    """The traceback without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _told(error: BaseException) -> str:
    """What an exception says of itself, where it does."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - a user's __str__
        return f"(its __str__ raised {type(problem).__name__})"


def _cut(text: str) -> str:
    """A text short enough for a message: its beginning and its end."""
    if len(text) <= 2 * _HALF:
        return text
    return f"{text[:_HALF]}\n... ({len(text)} characters in all) ...\n{text[-_HALF:]}"


def _pickled(value: Any) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _leave(directory: Path, outcome: dict[str, str], value: bytes | None = None) -> None:
    # The outcome comes last and at once: where it is, the value is whole.
    if value is not None:
        try:
            (directory / VALUE).write_bytes(value)
        except OSError as error:
            (directory / VALUE).unlink(missing_ok=True)
            outcome = {"status": "value lost", "error": str(error)}
    draft = directory / f"{OUTCOME}.draft"
    left = {name: _cut(text) for name, text in outcome.items()}
    draft.write_text(json.dumps({**left, "time": time.time()}))
    draft.rename(directory / OUTCOME)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    prepare_output()
    exiting.end(lambda: run(Path(sys.argv[1])))
