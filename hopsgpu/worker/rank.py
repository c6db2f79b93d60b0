"""A rank: the process that runs the user's function.

Forked by a fork server, or started by the keeper as `python -m hopsgpu.worker.rank DIRECTORY
KEEPER_PID`, with the rank's environment, in the rank's own session. It leaves `outcome.json`, and
`value.pickle` where the function returned, in DIRECTORY. It exits with EX_IOERR (74, sysexits.h)
where it cannot.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hopsgpu import frames
from hopsgpu.worker import exiting

# In a fork server too, so that no rank need import it itself, which takes longer than to fork.
from hopsgpu.worker.context import context
from hopsgpu.worker.kernel import die_with
from hopsgpu.worker.sharing import share_gpu
from hopsgpu.worker.trial import is_pruning

CALL = "call.pickle"
_TAKEN = "call.taken"
VALUE = "value.pickle"
OUTCOME = "outcome.json"
_DRAFT = "outcome.draft"
LOG = "log"
WORK = "work"

# Of a rank of a trial whose function raised optuna.TrialPruned, which is no failure.
PRUNED = "pruned"
# What a rank says of itself where it has a value.
WELL = ("returned", "exited normally", PRUNED)

_IOLBF = 1
_HALF = 16 * 1024
# An outcome's two texts, and as much again for what takes more than a byte of JSON.
_ROOM = 8 * _HALF


def reserve(directory: Path) -> None:
    """Holds the room that an outcome takes, so that a rank can tell that the disk is full.

    Raises:
        OSError: it is full already.
    """
    descriptor = _open_draft(directory)
    try:
        os.posix_fallocate(descriptor, 0, _ROOM)
    finally:
        os.close(descriptor)


def run(directory: Path) -> int:
    """Runs the call in a directory, which runs once only, and returns the exit code.

    Raises:
        SystemExit: as the function raised it, unless it stands for success; EX_IOERR where the
            outcome cannot be written.
    """
    try:
        (directory / CALL).rename(directory / _TAKEN)
    except FileNotFoundError:
        if not (directory / OUTCOME).exists():
            begun = "it had begun, and was killed with its fork server, which hung or crashed"
            _leave(directory, {"status": "not started", "error": begun})
        return 1
    except OSError as error:
        _leave(directory, {"status": "not started", "error": str(error)})
        return 1
    return _run(directory)


def _run(directory: Path) -> int:
    try:
        share_gpu()
        function, args, kwargs = pickle.loads((directory / _TAKEN).read_bytes())
        value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            _leave(directory, {"status": "exited", "traceback": _users_traceback(error)})
            raise
        _leave(directory, {"status": "exited normally"}, _pickled(None))
        return 0
    except BaseException as error:  # noqa: BLE001 - told to the agent, whatever it is
        if is_pruning(error) and context().trial is not None:
            _leave(directory, {"status": PRUNED}, _pickled(None))
            return 0
        text = _users_traceback(error)
        _say(text)
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
    """The traceback without hopsgpu's frames."""
    return frames.text_of(error)


def _told(error: BaseException) -> str:
    """What an exception says of itself, where it does."""
    try:
        return frames.without_own(str(error))
    except Exception as problem:  # noqa: BLE001 - a user's __str__
        return f"(its __str__ raised {type(problem).__name__})"


def _say(text: str) -> None:
    # Stderr is a file on the disk that may be full, and the function may have closed it.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, end="", flush=True)


def _fit(text: str) -> str:
    """A text that can be printed, and short enough for a message: its beginning and its end."""
    # A name of a file that is not UTF-8 is a str with lone surrogates (PEP 383).
    text = text.encode(errors="backslashreplace").decode()
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
    left = {name: _fit(text) for name, text in outcome.items()}
    try:
        # Not emptied first: its room is what a full disk has left for it.
        with os.fdopen(_open_draft(directory), "wb") as draft:
            draft.write(json.dumps({**left, "time": time.time()}).encode())
            draft.truncate()
        (directory / _DRAFT).rename(directory / OUTCOME)
    except OSError as error:
        _say(f"hopsgpu: how this rank ended ({left['status']}) cannot be written: {error}\n")
        raise SystemExit(os.EX_IOERR) from error


def _open_draft(directory: Path) -> int:
    return os.open(directory / _DRAFT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    prepare_output()
    exiting.end(lambda: run(Path(sys.argv[1])))
