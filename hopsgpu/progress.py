"""What a person sees of a run while it goes on."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from hopsgpu.errors import ConfigError
from hopsgpu.gang import GangState
from hopsgpu.outlet import Outlet
from hopsgpu.results import RunStatus
from hopsgpu.screens import in_kernel, in_terminal
from hopsgpu.units import counted

_REPEAT_SECONDS = 10.0
_MOST_TOLD = 6
# States in which much changes that nobody must see at once.
_SELDOM = ("preparing", "training")


class Progress(Protocol):
    """Receives a run's states and its ranks' output."""

    def status(self, status: RunStatus) -> None:
        """Told of every change, and each second while the run waits."""

    def line(self, rank: int, host: str, *texts: str) -> None:
        """Told of every line that a rank writes, of several at once where they come together."""


class Off:
    """Shows nothing."""

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, *texts: str) -> None:
        return


class Told:
    """Has a function of the user's told of the run's states; it is told of no lines."""

    def __init__(self, tell: Callable[[RunStatus], object]) -> None:
        self._tell = tell

    def status(self, status: RunStatus) -> None:
        self._tell(status)

    def line(self, rank: int, host: str, *texts: str) -> None:
        return


class Lines:
    """Plain lines: what the ranks write on stdout, what the run does on stderr.

    A run waits for a reader who has stopped reading no longer than `Outlet` does.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._outlet = Outlet()
        self._state = ""
        self._last = ""
        self._said = float("-inf")

    def status(self, status: RunStatus) -> None:
        """One line for each change; of metrics and data one every 10 s, and of a wait as often."""
        text = describe(status)
        now = self._clock()
        goes_on = status.state == self._state and status.state in _SELDOM
        is_news = text != self._last and not goes_on
        if not is_news and now - self._said < _REPEAT_SECONDS:
            return
        self._state, self._last, self._said = status.state, text, now
        line = f"hopsgpu {status.run_id} {status.elapsed:6.1f} s: {text}\n"
        self._outlet.write(self._err or sys.stderr, line)
        if GangState(status.state).is_terminal:
            self._outlet.close()

    def line(self, rank: int, host: str, *texts: str) -> None:
        out = self._out or sys.stdout
        encoding = getattr(out, "encoding", None) or "utf-8"
        # One write: a flush for each of two million lines would take longer than their way here.
        text = "".join(f"[rank {rank} {host}] {line}\n" for line in texts)
        # A terminal that knows only ASCII must not end a training that prints more.
        self._outlet.write(out, text.encode(encoding, "backslashreplace").decode(encoding))


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

    def line(self, rank: int, host: str, *texts: str) -> None:
        self._tell(lambda: self._shown.line(rank, host, *texts))

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
        gang = f"{counted(status.wanted, 'executor')} {'is' if status.wanted == 1 else 'are'}"
        return f"waiting: {status.granted} of {gang} here{hosts}{why}"
    if status.state == "preparing":
        return status.waiting_for
    again = f" (attempt {status.attempt})" if status.attempt else ""
    if status.state in ("granted", "ready"):
        hosts = ", ".join(status.granted_hosts)
        return f"{status.state}: {counted(status.wanted, 'executor')} on {hosts}{again}"
    if status.state == "training":
        return f"training{again}{_measured(status)}"
    return status.state


def _measured(status: RunStatus) -> str:
    """What rank 0 reported last."""
    reported = status.metrics[0] if status.metrics else {}
    told = [f"{n} {v:g}" for n, v in reported.items() if not n.startswith("gpu.")]
    return f": {', '.join(told[:_MOST_TOLD])}" if told else ""


def progress_of(given: object) -> Shielded:
    """The display that `progress=` names.

    Args:
        given: None for the one that fits: live in a notebook's cell and in a script's terminal,
            plain lines elsewhere; "rich" for the live one, "lines", "off", or a callable, which
            is given a RunStatus at each change.

    Raises:
        ConfigError: anything else, or a callable that cannot be called with one argument.
    """
    if given == "rich" or (given is None and (in_kernel() or in_terminal())):
        from hopsgpu.display.live import Live

        return Shielded(Live())
    if given in (None, "lines"):
        return Shielded(Lines())
    if given == "off":
        return Shielded(Off())
    if callable(given):
        _check_takes_one(given)
        return Shielded(Told(given))
    raise ConfigError(
        f"progress={given!r}: 'rich', 'lines', 'off', None or a callable that takes a RunStatus"
        " is wanted"
    )


def _check_takes_one(given: Callable[..., object]) -> None:
    if inspect.iscoroutinefunction(given):
        raise ConfigError(f"progress={given!r}: a plain function is wanted, not a coroutine's")
    try:
        signature = inspect.signature(given)
    except ValueError:
        return  # a built-in that does not tell; if it fails, it is shown no more
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"progress={given!r}: a callable that takes one argument, a RunStatus, is wanted"
            f" ({error})"
        ) from None
