"""What a person sees of a run while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from hopsgpu.errors import ConfigError
from hopsgpu.results import RunStatus

_REPEAT_SECONDS = 10.0


class Progress(Protocol):
    """Receives a run's states and its ranks' output."""

    def status(self, status: RunStatus) -> None:
        """Told of every change, and each second while the run waits."""

    def line(self, rank: int, host: str, text: str) -> None:
        """Told of every line that a rank writes."""


class Off:
    """Shows nothing."""

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, text: str) -> None:
        return


class Lines:
    """Plain lines: what the ranks write on stdout, what the run does on stderr."""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._last = ""
        self._said = float("-inf")

    def status(self, status: RunStatus) -> None:
        """One line for each change; the same again every 10 s, so that waiting is seen."""
        text = describe(status)
        now = self._clock()
        if text == self._last and now - self._said < _REPEAT_SECONDS:
            return
        self._last, self._said = text, now
        stream = self._err or sys.stderr
        print(f"hopsgpu {status.run_id} {status.elapsed:6.1f} s: {text}", file=stream, flush=True)

    def line(self, rank: int, host: str, text: str) -> None:
        out = self._out or sys.stdout
        encoding = getattr(out, "encoding", None) or "utf-8"
        # A terminal that knows only ASCII must not end a training that prints more.
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        print(f"[rank {rank} {host}] {shown}", file=out, flush=True)


class Shielded:
    """Another display that may fail: it is then shown no more, and the run goes on.

    A closed terminal must neither end a training nor keep its GPUs.

    Attributes:
        problem: why it is shown no more, or None.
    """

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.problem: str | None = None

    def status(self, status: RunStatus) -> None:
        self._tell(lambda: self._shown.status(status))

    def line(self, rank: int, host: str, text: str) -> None:
        self._tell(lambda: self._shown.line(rank, host, text))

    def _tell(self, tell: Callable[[], None]) -> None:
        if self.problem is not None:
            return
        try:
            tell()
        except Exception as error:  # noqa: BLE001 - becomes a warning of the result
            self.problem = f"progress was shown no more ({type(error).__name__}: {error})"


def describe(status: RunStatus) -> str:
    """A status in a line."""
    if status.state in ("requested", "waiting"):
        hosts = f" ({', '.join(status.granted_hosts)})" if status.granted_hosts else ""
        why = f"; {status.waiting_for}" if status.waiting_for else ""
        return f"waiting: {status.granted} of {status.wanted} executors are here{hosts}{why}"
    if status.state in ("granted", "ready"):
        return f"{status.state}: {status.wanted} executors on {', '.join(status.granted_hosts)}"
    return status.state


def progress_of(given: object) -> Shielded:
    """The display that `progress=` names: None or "lines", or "off".

    Raises:
        ConfigError: anything else.
    """
    if given in (None, "lines"):
        return Shielded(Lines())
    if given == "off":
        return Shielded(Off())
    later = ' ("rich" and callables are not available yet)' if _is_later(given) else ""
    raise ConfigError(f"progress={given!r}: 'lines', 'off' or None is wanted{later}")


def _is_later(given: object) -> bool:
    return given == "rich" or callable(given)
