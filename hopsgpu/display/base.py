"""Displays of an activity that has a status: a run or a search."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TextIO, TypeVar

from hopsgpu.core.gang import GangState
from hopsgpu.display.nonblocking import NonblockingWriter
from hopsgpu.display.screens import is_in_kernel, is_in_terminal
from hopsgpu.errors import ConfigError
from hopsgpu.terminal_text import printable


class Status(Protocol):
    """The fields that all statuses have."""

    @property
    def run_id(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def elapsed(self) -> float: ...

    @property
    def application(self) -> str: ...

    @property
    def queue(self) -> str: ...


# S: a status. W: the writer of a line; for a run, this is the number of a rank.
S = TypeVar("S", bound=Status)
S_contra = TypeVar("S_contra", bound=Status, contravariant=True)
W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)


class Display(Protocol[S_contra, W_contra]):
    """Receives states, and the output of ranks."""

    def status(self, status: S_contra, /) -> None:
        """Handle a change, repeated each second while waiting."""

    def line(self, writer: W_contra, host: str, /, *texts: str) -> None:
        """Handle one or several lines that a rank wrote."""


class StatusFormatter(Protocol[S_contra, W_contra]):
    """Turns statuses into lines."""

    def news(self, status: S_contra, now: float, /) -> Iterable[str]:
        """Return the lines to print for a status; none if it has nothing new.

        Args:
            now: seconds by any clock.
        """

    def label(self, writer: W_contra, host: str, /) -> str: ...


class NoDisplay:
    """Shows nothing."""

    def status(self, status: Status) -> None:
        return

    def line(self, writer: object, host: str, *texts: str) -> None:
        return


class CallbackDisplay(Generic[S]):
    """Passes states to a function of the user, and ignores lines."""

    def __init__(self, on_status: Callable[[S], object]) -> None:
        self._on_status = on_status

    def status(self, status: S) -> None:
        self._on_status(status)

    def line(self, writer: object, host: str, *texts: str) -> None:
        return


class PlainLines(Generic[S, W]):
    """Plain lines: the ranks' output on stdout, and the progress on stderr.

    The first line about a run on YARN has its application and queue.

    A run waits for a reader who has stopped reading no longer than `NonblockingWriter` does.
    """

    def __init__(
        self,
        formatter: StatusFormatter[S, W],
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._formatter = formatter
        self._out = out
        self._err = err
        self._clock = clock
        self._outlet = NonblockingWriter()
        self._is_begun = False

    def status(self, status: S) -> None:
        begin = f"hopsgpu {status.run_id} {status.elapsed:6.1f} s: "
        texts = [*self._formatter.news(status, self._clock())]
        if texts and status.queue and not self._is_begun:
            self._is_begun = True
            texts.insert(0, f"{status.application} in queue {status.queue}")
        lines = "".join(f"{begin}{text}\n" for text in texts)
        if lines:
            err = self._err or sys.stderr
            self._outlet.write(err, _encodable(lines, err))
        if GangState(status.state).is_terminal:
            self._outlet.close()

    def line(self, writer: W, host: str, *texts: str) -> None:
        label = self._formatter.label(writer, host)
        out = self._out or sys.stdout
        # A single write: flushing each of two million lines would take longer than sending them.
        text = "".join(f"[{label}] {line}\n" for line in texts)
        self._outlet.write(out, _encodable(text, out))


def _encodable(text: str, stream: TextIO) -> str:
    """Return a text in the stream's encoding: an ASCII terminal must not end a training.

    For a terminal, the text has no control characters: ranks may print any.
    """
    if getattr(stream, "isatty", bool)():
        text = printable(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Shield(Generic[S, W]):
    """Wraps a display that may fail: it is then no longer used, and the run continues.

    A closed terminal must neither end a training nor keep its GPUs.

    Attributes:
        problem: why the display stopped, or None.
    """

    def __init__(self, shown: Display[S, W]) -> None:
        self._shown = shown
        self.problem: str | None = None

    def status(self, status: S) -> None:
        self._call(lambda: self._shown.status(status))

    def line(self, writer: W, host: str, *texts: str) -> None:
        self._call(lambda: self._shown.line(writer, host, *texts))

    def _call(self, report: Callable[[], None]) -> None:
        if self.problem is not None:
            return
        try:
            report()
        except Exception as error:  # noqa: BLE001 - becomes a warning of the result
            self.problem = f"the progress display stopped ({type(error).__name__}: {error})"


def display_of(
    progress: object,
    kind: str,
    live: Callable[[], Display[S, W]],
    lines: Callable[[], Display[S, W]],
) -> Display[S, W]:
    """Return the display that `progress=` names.

    Args:
        progress: None for the one that fits: live in a notebook's cell and in a script's terminal,
            plain lines elsewhere; "rich" for the live one, "lines", "off", or a callable, which
            receives a status at each change.
        kind: the status's type, for the error.

    Raises:
        ConfigError: anything else, or a callable that cannot be called with one argument.
    """
    if progress == "rich" or (progress is None and (is_in_kernel() or is_in_terminal())):
        return live()
    if progress in (None, "lines"):
        return lines()
    if progress == "off":
        return NoDisplay()
    if callable(progress):
        _check_takes_one(progress, kind)
        return CallbackDisplay(progress)
    raise ConfigError(
        f"progress={progress!r}: must be 'rich', 'lines', 'off', None or a callable that takes a"
        f" {kind}"
    )


def _check_takes_one(progress: Callable[..., object], kind: str) -> None:
    if inspect.iscoroutinefunction(progress):
        raise ConfigError(f"progress={progress!r}: must be a plain function, not a coroutine's")
    try:
        signature = inspect.signature(progress)
    except ValueError:
        return  # a built-in without a signature; if a call fails, `Shield` stops the display
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"progress={progress!r}: must be a callable that takes one argument, a {kind} ({error})"
        ) from None
