"""hopsgpu's own log, by Python's `logging`: how detailed it is, and where it goes.

At the driver, it goes where the user's logging configuration sends it. HOPSGPU_LOG or
`spark.hopsgpu.log` shows it on stderr as well, and makes agents and process daemons write more.
These write it to a file of their container.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from hopsgpu.errors import ConfigError

# The file of agents, and of the placeholders that hold executors until the agents come.
AGENT = "hopsgpu-agent.log"
INFO = "info"
LEVELS = {INFO: logging.INFO, "debug": logging.DEBUG}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# With the pid, because several processes of a container may write to one file.
_FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_MOST = 2 * 2**20

_ours = logging.getLogger(__name__.partition(".")[0])


class _Shown(logging.Handler):
    """A handler that writes to the current stderr, because a notebook's kernel replaces it.

    Attributes:
        detail: the level that was asked for, "info" or "debug".
    """

    def __init__(self, detail: str) -> None:
        super().__init__()
        self.detail = detail
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        # A terminal that is gone must not end a run.
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def level_of(setting: str | None) -> str | None:
    """Return the level that `spark.hopsgpu.log` or HOPSGPU_LOG names, or None if none is set.

    Raises:
        ConfigError: the level does not exist.
    """
    if setting is None or not setting.strip():
        return None
    level = setting.strip().lower()
    if level not in LEVELS:
        raise ConfigError(
            f"spark.hopsgpu.log={setting!r} (or HOPSGPU_LOG): must be 'info' or 'debug'"
        )
    return level


def show(level: str | None) -> None:
    """Show the driver's log on stderr from now on; the level None changes nothing."""
    if level is None:
        return
    for handler in list(_ours.handlers):
        if isinstance(handler, _Shown):
            _ours.removeHandler(handler)
    _ours.setLevel(LEVELS[level])
    _ours.addHandler(_Shown(level))


def level() -> str:
    """Return the level at which the processes that this one starts write their log.

    It is the level of this process's own handler. A level that the user gives to the logger applies
    to this process only.
    """
    own = (h.detail for h in reversed(_ours.handlers) if isinstance(h, (_Shown, _File)))
    return next(own, INFO)


class _File(RotatingFileHandler):
    """A handler that writes to a file of bounded size, and keeps one file of what came before.

    It creates the file and its directory with the first line, so that a process that logs nothing
    leaves no file.

    Attributes:
        detail: the level that was asked for, "info" or "debug".
    """

    def __init__(self, path: Path, detail: str) -> None:
        self.detail = detail
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
        """Do nothing: a full disk must not end a rank or fill the container's stderr."""


def daemon_file(pid: int) -> str:
    """Return the name of a process daemon's log file."""
    return f"hopsgpu-process-daemon-{pid}.log"


def directory(fallback: Path) -> Path:
    """Return the directory of this container's log files.

    YARN collects the container's logs from there; outside of YARN it is `fallback`.
    """
    first = os.environ.get("LOG_DIRS", "").partition(",")[0]
    return Path(first) if first and Path(first).is_dir() else fallback


def last_of(path: Path, most: int) -> bytes:
    """Return the last whole lines, at most `most` bytes, of a file that `written` has written.

    The result is empty if there is no such file.
    """
    content = b""
    for file in (path, path.with_name(f"{path.name}.1")):
        with contextlib.suppress(OSError):
            content = file.read_bytes() + content
        if len(content) > most:
            return content[-most:].partition(b"\n")[2]
    return content


@contextlib.contextmanager
def written(path: Path, level: str) -> Iterator[None]:
    """Send this process's log to one file only, while the block runs.

    If the file cannot be created, the log goes nowhere.

    Args:
        path: the file; its present content stays.
        level: "info" or "debug".
    """
    handler = _File(path, level)
    previous, propagate = _ours.level, _ours.propagate
    _ours.setLevel(LEVELS[level])
    # The process may be Spark's, and hopsgpu's log must not go into Spark's logging.
    _ours.propagate = False
    _ours.addHandler(handler)
    try:
        yield
    finally:
        _ours.removeHandler(handler)
        handler.close()
        _ours.propagate = propagate
        _ours.setLevel(previous)
