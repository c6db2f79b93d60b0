"""hopsgpu's own log, by Python's `logging`: how much there is of it, and where it goes.

At the driver it goes where its user has logging go; HOPSGPU_LOG or `spark.hopsgpu.log` shows it on
stderr, and has agents and process daemons write more. These write it to a file of their container.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading

from hopsgpu.errors import ConfigError

LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_ours = logging.getLogger(__name__.partition(".")[0])
_lock = threading.Lock()


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
    if level is None:
        return
    with _lock:
        _ours.setLevel(LEVELS[level])
        if not any(isinstance(handler, _Shown) for handler in _ours.handlers):
            _ours.addHandler(_Shown())


def shown_level() -> str:
    """The level at which agents and process daemons write their files."""
    with _lock:
        is_debug = _ours.level == logging.DEBUG
        is_shown = any(isinstance(handler, _Shown) for handler in _ours.handlers)
    return "debug" if is_debug and is_shown else "info"
