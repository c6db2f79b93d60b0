"""hopsgpu's own log, by Python's `logging`: its level and its destination.

At the driver, the user's logging configuration decides where the log goes. HOPSGPU_LOG or
`spark.hopsgpu.log` also writes the log to stderr, and sets the level of agents and process daemons.
Agents and process daemons write their log to a file of their container.
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

from hopsgpu.core.redaction import without_secrets
from hopsgpu.errors import ConfigError
from hopsgpu.terminal_text import printable

# The file of agents, and of the placeholders that hold executors until the agents start.
AGENT_FILE = "hopsgpu-agent.log"
# YARN's variable with the directories of a container's logs.
CONTAINER_LOGS = "LOG_DIRS"
INFO = "info"
LEVELS = {INFO: logging.INFO, "debug": logging.DEBUG}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# With the pid, because several processes of a container may write to one file.
_FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_MAX_FILE_BYTES = 2 * 2**20

_logger = logging.getLogger(__name__.partition(".")[0])


class _StderrHandler(logging.Handler):
    """Writes to the current stderr, because a notebook's kernel replaces stderr.

    Attributes:
        detail: the requested level, "info" or "debug".
    """

    def __init__(self, detail: str) -> None:
        super().__init__()
        self.detail = detail
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        # A closed terminal must not end a run.
        with contextlib.suppress(OSError, ValueError):
            print(printable(without_secrets(self.format(record))), file=sys.stderr, flush=True)


def level_of(setting: str | None) -> str | None:
    """Return the level that `spark.hopsgpu.log` or HOPSGPU_LOG names, or None if none is set."""
    if setting is None or not setting.strip():
        return None
    level = setting.strip().lower()
    if level not in LEVELS:
        raise ConfigError(
            f"spark.hopsgpu.log={setting!r} (or HOPSGPU_LOG): must be 'info' or 'debug'"
        )
    return level


def show_on_stderr(level: str | None) -> None:
    """Write the driver's log to stderr from now on; the level None changes nothing."""
    if level is None:
        return
    for handler in list(_logger.handlers):
        if isinstance(handler, _StderrHandler):
            _logger.removeHandler(handler)
    _logger.setLevel(LEVELS[level])
    _logger.addHandler(_StderrHandler(level))


def level() -> str:
    """Return the level of the log of processes that this process starts.

    The level of this process's own handler is inherited. A level that the user sets at the logger
    applies to this process only.
    """
    kinds = (_StderrHandler, _FileHandler)
    details = (h.detail for h in reversed(_logger.handlers) if isinstance(h, kinds))
    return next(details, INFO)


class _FileHandler(RotatingFileHandler):
    """Writes to a file of bounded size, and keeps one earlier file.

    The first line creates the file and its directory, so a process that logs nothing leaves no
    file.
    """

    def __init__(self, path: Path, detail: str) -> None:
        self.detail = detail
        super().__init__(
            path,
            maxBytes=_MAX_FILE_BYTES,
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
    return f"hopsgpu-process-daemon-{pid}.log"


def directory(fallback: Path) -> Path:
    """Return the directory of this container's log files.

    YARN collects the container's logs from there; outside of YARN it is `fallback`.
    """
    first = os.environ.get(CONTAINER_LOGS, "").partition(",")[0]
    return Path(first) if first and Path(first).is_dir() else fallback


def read_last_lines(path: Path, max_bytes: int) -> bytes:
    """Return the last whole lines, at most `max_bytes` bytes, of a log file; b"" without a file."""
    content = b""
    for file in (path, path.with_name(f"{path.name}.1")):
        with contextlib.suppress(OSError):
            content = file.read_bytes() + content
        if len(content) > max_bytes:
            return content[-max_bytes:].partition(b"\n")[2]
    return content


@contextlib.contextmanager
def log_to_file(path: Path, level: str) -> Iterator[None]:
    """Send this process's log only to a file, whose content stays, while the block runs.

    If the file cannot be created, the log goes nowhere.
    """
    handler = _FileHandler(path, level)
    previous, does_propagate = _logger.level, _logger.propagate
    _logger.setLevel(LEVELS[level])
    # The process may be Spark's, and hopsgpu's log must not go into Spark's logging.
    _logger.propagate = False
    _logger.addHandler(handler)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        handler.close()
        _logger.propagate = does_propagate
        _logger.setLevel(previous)
