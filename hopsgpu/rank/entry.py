"""A rank: the process that runs the user's function.

A fork server forks the process, or the process daemon starts it as `python -m hopsgpu.rank.entry
DIRECTORY DAEMON_PID`. It leads a session. At the end, DIRECTORY has `outcome.json`, and
`value.pickle` if the function returned. If they cannot be written, the exit code is EX_IOERR (74,
sysexits.h).
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
import stat
import sys
import time
from pathlib import Path

from hopsgpu import tracebacks
from hopsgpu.linux import die_with
from hopsgpu.packaging import main_module
from hopsgpu.rank import exit as exiting

# Imported at module level, so that a fork server imports these modules once. In a rank, the import
# would take longer than the fork.
from hopsgpu.rank.context import VARIABLE, context
from hopsgpu.rank.files import CALL, OUTCOME, TAKEN, VALUE
from hopsgpu.rank.gang_world import check_world
from hopsgpu.rank.gpu_memory import share_gpu
from hopsgpu.rank.trial import is_pruning

_DRAFT = "outcome.draft"
_NONE = pickle.dumps(None)

# Status of a trial's rank whose function raised optuna.TrialPruned, which is not a failure.
PRUNED = "pruned"
# The statuses of a rank that has a value.
SUCCESSFUL = ("returned", "exited normally", PRUNED)

_IOLBF = 1
_HALF = 16 * 1024
# Bytes for an outcome's two texts, doubled for characters that need several bytes in JSON.
_OUTCOME_BYTES = 8 * _HALF


def reserve_outcome(directory: Path) -> None:
    """Reserve disk space for the outcome, so that a rank can report that the disk is full.

    Raises:
        OSError: the disk is already full.
    """
    descriptor = _open_draft(directory)
    try:
        os.posix_fallocate(descriptor, 0, _OUTCOME_BYTES)
    finally:
        os.close(descriptor)


def run(directory: Path) -> int:
    """Run the call in a directory, unless a process has done so, and return the exit code.

    Raises:
        SystemExit: the function's, if it is a failure; EX_IOERR if the outcome cannot be written.
    """
    try:
        (directory / CALL).rename(directory / TAKEN)
    except FileNotFoundError:
        if not (directory / OUTCOME).exists():
            problem = "the rank was killed together with its fork server, which hung or crashed"
            _record_outcome(directory, {"status": "not started", "error": problem})
        return 1
    except OSError as error:
        _record_outcome(directory, {"status": "not started", "error": str(error)})
        return 1
    sys.argv[:] = [_script()]
    return _run(directory)


def _script() -> str:
    """Return the driver's `sys.argv[0]`; the other arguments are not meant for the function."""
    return context().script if VARIABLE in os.environ else ""


def _run(directory: Path) -> int:
    pid = os.getpid()
    try:
        share_gpu()
        check_world()
        loaded = main_module.load(directory / TAKEN)
        _enter(directory)
        value = loaded.function(*loaded.args, **loaded.kwargs)
    except SystemExit as error:
        if os.getpid() != pid:
            raise
        if error.code not in (None, 0):
            message = {} if isinstance(error.code, int) else {"error": _message(error)}
            text = tracebacks.text_of(error)
            _record_outcome(directory, {"status": "exited", "traceback": text, **message})
            raise
        _record_outcome(directory, {"status": "exited normally"}, _NONE)
        return 0
    except BaseException as error:  # noqa: BLE001 - every exception is reported to the agent
        if os.getpid() == pid and is_pruning(error) and context().trial is not None:
            _record_outcome(directory, {"status": PRUNED}, _NONE)
            return 0
        text = tracebacks.text_of(error)
        _show_error(error, text)
        if os.getpid() != pid:
            return 1
        kind = f"{type(error).__name__}: {_message(error)}"
        _record_outcome(directory, {"status": "raised", "error": kind, "traceback": text})
        return 1
    if os.getpid() != pid:
        return 0  # a child that the function forked: only the rank itself records the outcome
    try:
        # Imported late: a rank without a value does not need it.
        from hopsgpu.packaging.pickling import pickle_value

        pickled = pickle_value(value, loaded.names)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises is reported
        reason = f"a {type(value).__qualname__} that cannot be pickled ({error})"
        _record_outcome(directory, {"status": "unpicklable", "error": reason})
        return 1
    _record_outcome(directory, {"status": "returned"}, pickled)
    return 0


def _enter(directory: Path) -> None:
    """Record that the function starts, now that its modules are imported; see `entry_time`."""
    file = directory / TAKEN
    # Both calls work on a full disk.
    os.utime(file)
    file.chmod(stat.S_IRUSR)


def entry_time(directory: Path) -> float | None:
    """Return when the function started in a rank, in seconds since the epoch, or None."""
    try:
        status = (directory / TAKEN).stat()
    except FileNotFoundError:
        return None
    return None if status.st_mode & stat.S_IWUSR else status.st_mtime


def prepare_output() -> None:
    """Flush at each end of a line, also in C, so that a kill loses no complete line.

    A crash (such as SIGSEGV) and SIGUSR1 write the stacks of all threads to stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)


def _message(error: BaseException) -> str:
    try:
        return tracebacks.strip_own_frames(str(error))
    except Exception as problem:  # noqa: BLE001 - a user's __str__
        return f"(its __str__ raised {type(problem).__name__})"


def _show_error(error: BaseException, text: str) -> None:
    """Print a traceback; code that has set `sys.excepthook` prints it in its own way."""
    if sys.excepthook is sys.__excepthook__:
        _print_error(text)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as problem:  # noqa: BLE001 - a user's hook
        _print_error(f"{text}sys.excepthook raised {type(problem).__name__}\n")


def _print_error(text: str) -> None:
    # The file behind stderr is on a disk that may be full, and the function may have closed it.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, end="", flush=True)


def _fit(text: str) -> str:
    """Return a printable text; cut the middle out of a text that is too long for a message."""
    # A file name that is not UTF-8 is a str with lone surrogates (PEP 383).
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= 2 * _HALF:
        return text
    return f"{text[:_HALF]}\n... ({len(text)} characters in all) ...\n{text[-_HALF:]}"


def _record_outcome(directory: Path, outcome: dict[str, str], value: bytes | None = None) -> None:
    # The outcome is written last, by an atomic rename: if it exists, the value is complete.
    if value is not None:
        try:
            (directory / VALUE).write_bytes(value)
        except OSError as error:
            (directory / VALUE).unlink(missing_ok=True)
            outcome = {"status": "value lost", "error": str(error)}
    texts = {name: _fit(text) for name, text in outcome.items()}
    try:
        # Truncate after the write: a full disk has only the draft's reserved space.
        with os.fdopen(_open_draft(directory), "wb") as draft:
            draft.write(json.dumps({**texts, "time": time.time()}).encode())
            draft.truncate()
        (directory / _DRAFT).rename(directory / OUTCOME)
    except OSError as error:
        _print_error(f"hopsgpu: cannot record how this rank ended ({texts['status']}): {error}\n")
        raise SystemExit(os.EX_IOERR) from error


def _open_draft(directory: Path) -> int:
    return os.open(directory / _DRAFT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    prepare_output()
    exiting.run_and_exit(lambda: run(Path(sys.argv[1])))
