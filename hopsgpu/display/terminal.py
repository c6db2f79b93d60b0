"""Some lines at a terminal's bottom, which rich draws again and again; and a run in them."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hopsgpu.display import words
from hopsgpu.display.charts import ASCII, BLOCKS, SHARES, sparkline
from hopsgpu.display.picture import RETURNED, Log, Picture, Row
from hopsgpu.display.tty import tty_of
from hopsgpu.displays import Status
from hopsgpu.html import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PLOT_WIDTH = 40
_TRACE_WIDTH = 12
_MOST_LINES = 12
_EXIT_SECONDS = 1.0
_STYLES = {"released": "green", "kept": "green", "failed": "red", "cancelled": "red"}


P_contra = TypeVar("P_contra", contravariant=True)


class Drawn(Protocol[P_contra]):
    """Gives a picture as lines of a terminal."""

    def __call__(
        self, picture: P_contra, width: int, height: int, encoding: str, /
    ) -> list[Text]: ...


class Shown(Protocol):
    """Makes a text a line of a terminal, in its characters and no wider than it is."""

    def __call__(self, text: str, style: str = "") -> Text: ...


class Terminal(Generic[P_contra]):
    """Shows pictures in the terminal; what else is printed meanwhile is above them.

    Args:
        drawn: a picture's lines.
        console: where, by default stdout.
    """

    def __init__(self, drawn: Drawn[P_contra], console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._drawn = drawn
        self._tty = tty_of(sys.stdout) if console is None else None
        # rich's type for a file has all that a file can do, of which it uses little.
        file: Any = self._tty
        self._console = console or Console(file=file, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False)
        # A script that ends with its run under way leaves the cursor to be seen.
        atexit.register(self._at_exit)
        self._live.start()

    def show(self, picture: P_contra) -> None:
        """Shows it in place of the last one, once the terminal takes it."""
        self._release()
        self._live.update(joined(self._lines(picture)), refresh=True)

    def end(self, picture: P_contra) -> None:
        """Leaves the last one to be seen."""
        # Drawn before it is closed: rich hands stdout back first and writes then, and the next
        # run's display must not have a terminal that has yet to take this.
        self.show(picture)
        self.close()

    def close(self) -> None:
        """Gives the terminal back."""
        atexit.unregister(self._at_exit)
        self._release()
        self._live.stop()
        if self._tty is not None:
            self._tty.close()

    def _release(self) -> None:
        if self._tty is not None:
            self._tty.release()

    def _lines(self, picture: P_contra) -> list[Text]:
        console = self._console
        return self._drawn(picture, console.width, console.height - 1, console.encoding)

    def _at_exit(self) -> None:
        if self._tty is not None:
            # Who stopped the terminal is not to keep GPUs so.
            self._tty.give_up(_EXIT_SECONDS)
        self.close()


def joined(lines: Iterable[Text]) -> Text:
    """Lines as one text."""
    from rich.text import Text

    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def lines_of(picture: Picture, width: int, height: int, encoding: str) -> list[Text]:
    """A picture as lines of a terminal.

    Args:
        picture: of the run.
        width: characters of a line.
        height: the most lines.
        encoding: the terminal's; what it lacks is written in ASCII.
    """
    shown, levels = shown_in(width, encoding), levels_of(encoding)
    parts = [words.seconds(picture.elapsed), words.gang(picture.status)]
    lines = [head(picture.status, [words.phase(picture), *parts], shown)]
    if picture.status.waiting_for:
        lines.append(shown(f"  {picture.status.waiting_for}"))
    longest = max((len(plot.name) for plot in picture.plots), default=0)
    for plot in picture.plots:
        drawn = sparkline(plot.traces[0] if plot.traces else (), _PLOT_WIDTH, levels)
        name = plot.name[:24].ljust(min(longest, 24))
        lines.append(shown(f"  {name}  {drawn.ljust(_PLOT_WIDTH)}  {words.measured(plot)}"))
    lines += [shown(text) for text in _ranks(picture, levels)]
    logs = words.whole_log(picture.status.run_id)
    lines += tail(picture.recent, height - len(lines), logs, shown)
    return lines[: max(height, 1)]


def levels_of(encoding: str) -> str:
    """The characters of a sparkline that a terminal has."""
    return BLOCKS if encoding.lower().startswith("utf") else ASCII


def shown_in(width: int, encoding: str) -> Shown:
    """Makes lines for a terminal; what its encoding lacks is written in ASCII."""
    from rich.text import Text

    def shown(text: str, style: str = "") -> Text:
        known = text.encode(encoding, "backslashreplace").decode(encoding)
        line = Text(plain(known), style=style, no_wrap=True)
        line.truncate(width, overflow="crop")
        return line

    return shown


def head(status: Status, parts: Iterable[str], shown: Shown) -> Text:
    """The first line; parts that are "" are left out."""
    told = " - ".join(part for part in parts if part)
    line = shown(f"hopsgpu {status.run_id}: {told}")
    line.stylize(f"bold {_STYLES.get(status.state, 'cyan')}")
    return line


def tail(recent: Log, room: int, whole: str, shown: Shown) -> Sequence[Text]:
    """The last lines of the ranks, in so many lines, and where the whole logs are."""
    left = max(min(room - 1, _MOST_LINES), 0)
    # The last ones of `[-0:]` would be all.
    last = recent.lines[len(recent.lines) - left :][:left]
    lines = [shown(f"  {line}", "dim") for line in last]
    if recent.total > len(last):
        lines.append(shown(f"  {recent.total:,} lines; {whole}", "dim"))
    return lines


def _ranks(picture: Picture, levels: str) -> Iterable[str]:
    # Of the others is nothing that their lines do not tell.
    told = [r for r in picture.rows if r.gpu is not None or r.ended not in ("", RETURNED)]
    host = max((len(row.host) for row in told), default=0)
    for row in told:
        step = "" if row.step is None else f"step {row.step:g}"
        parts = [f"rank {row.rank:<2}", row.host.ljust(host), step.ljust(10), _gpu(row, levels)]
        yield f"  {'  '.join([*(part for part in parts if part), row.ended])}"
    if more := words.others(picture):
        yield f"  {more}"


def _gpu(row: Row, levels: str) -> str:
    if row.gpu is None:
        return ""
    busy, memory = words.use(row.gpu)
    trace = sparkline(row.trace, _TRACE_WIDTH, levels, SHARES)
    return f"GPU {busy:>4} {trace.ljust(_TRACE_WIDTH)} {memory}"
