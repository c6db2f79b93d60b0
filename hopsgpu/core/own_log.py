"""hopsgpu's own log, by Python's `logging`: how much there is of it, and where it goes.

At the driver it goes where its user has logging go; HOPSGPU_LOG or `spark.hopsgpu.log` shows it on
stderr, and has agents and process daemons write more. These write it to a file of their container.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from hopsgpu.errors import ConfigError

# Of agents and of the tasks that hold executors until these come.
AGENT = "hopsgpu-agent.log"
INFO = "info"
LEVELS = {INFO: logging.INFO, "debug": logging.DEBUG}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Several processes of a container may write to one file.
_FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_MOST = 2 * 2**20

_ours = logging.getLogger(__name__.partition(".")[0])
_lock = threading.Lock()
_level = INFO


class _Shown(logging.Handler):
    """Writes to stderr, whatever that is by then: a notebook's kernel replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        # A terminal that is gone ends no run.
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def level_of(given: str | None) -> str | None:
    """The level that `spark.hopsgpu.log` or HOPSGPU_LOG names; None where nobody set one.

    Raises:
        ConfigError: there is no such level.
    """
    if given is None or not given.strip():
        return None
    level = given.strip().lower()
    if level not in LEVELS:
        raise ConfigError(
            f"spark.hopsgpu.log={given!r} (or HOPSGPU_LOG): 'info' or 'debug' is accepted"
        )
    return level


def show(level: str | None) -> None:
    """Shows the driver's log on stderr from now on; the level None changes nothing."""
    global _level
    if level is None:
        return
    with _lock:
        _level = level
        _ours.setLevel(LEVELS[level])
        if not any(isinstance(handler, _Shown) for handler in _ours.handlers):
            _ours.addHandler(_Shown())


def level() -> str:
    """The level that processes which this one starts are to write at."""
    return _level


class _File(RotatingFileHandler):
    """Writes to a file of a bounded size, and one more of what came before.

    The file and its directory are made with the first line: a process that has nothing to say
    leaves none.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            maxBytes=_MOST,
            backupCount=1,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )
        self.setFormatter(logging.Formatter(_FILE_FORMAT))

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A full disk ends no rank, nor fills the container's stderr with complaints."""


def daemon_file(pid: int) -> str:
    """The name of the file of a process daemon."""
    return f"hopsgpu-process-daemon-{pid}.log"


def directory(own: Path) -> Path:
    """Where this container's files are: where YARN collects its logs, else a directory of ours."""
    first = os.environ.get("LOG_DIRS", "").partition(",")[0]
    return Path(first) if first and Path(first).is_dir() else own


def last_of(path: Path, most: int) -> bytes:
    """The last whole lines of a file that `written` has written; b"" where there is none."""
    kept = b""
    for file in (path, path.with_name(f"{path.name}.1")):
        with contextlib.suppress(OSError):
            kept = file.read_bytes() + kept
        if len(kept) > most:
            return kept[-most:].partition(b"\n")[2]
    return kept


@contextlib.contextmanager
def written(path: Path, level: str) -> Iterator[None]:
    """While inside, this process's log goes to a file alone; to none if it cannot be made.

    Args:
        path: of the file; what is there stays.
        level: "info" or "debug".
    """
    global _level
    handler = _File(path)
    before = _level, _ours.level, _ours.propagate
    _level = level
    _ours.setLevel(LEVELS[level])
    # The process may be Spark's, whose own logging is none of our business.
    _ours.propagate = False
    _ours.addHandler(handler)
    try:
        yield
    finally:
        _ours.removeHandler(handler)
        handler.close()
        _level, previous, _ours.propagate = before
        _ours.setLevel(previous)
