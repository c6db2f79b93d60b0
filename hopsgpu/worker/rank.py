"""A rank: the fresh process that runs the user's function.

Started by the agent as `python -m hopsgpu.worker.rank DIRECTORY AGENT_PID`, with the rank's
environment, in the rank's own session. It leaves `outcome.json`, and `value.pickle` where the
function returned, in DIRECTORY.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

CALL = "call.pickle"
VALUE = "value.pickle"
OUTCOME = "outcome.json"

_PR_SET_PDEATHSIG = 1
_IOLBF = 1
_HALF = 16 * 1024


def main(directory: Path, agent: int) -> int:
    """Runs the call in DIRECTORY and returns the exit code."""
    _die_with(agent)
    _line_buffer()
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
        kind = f"{type(error).__name__}: {error}"
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


def _die_with(agent: int) -> None:
    """Has the kernel kill this process when its agent dies, however it dies (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != agent:
        # The agent died before the call above could take effect.
        os.kill(os.getpid(), signal.SIGKILL)


def _line_buffer() -> None:
    """Writes out each line as it ends, C's stdout included: a kill loses no whole line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def _users_traceback(error: BaseException) -> str:
    """The traceback without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


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
        (directory / VALUE).write_bytes(value)
    draft = directory / f"{OUTCOME}.draft"
    draft.write_text(json.dumps({name: _cut(text) for name, text in outcome.items()}))
    draft.rename(directory / OUTCOME)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
