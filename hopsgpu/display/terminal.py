"""A run in a terminal: some lines at its bottom, which rich draws again and again."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hopsgpu.display import words
from hopsgpu.display.charts import ASCII, BLOCKS, SHARES, sparkline
from hopsgpu.display.picture import RETURNED, Picture, Row
from hopsgpu.display.tty import tty_of
from hopsgpu.html import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PLOT_WIDTH = 40
_TRACE_WIDTH = 12
_MOST_LINES = 12
_EXIT_SECONDS = 1.0
_STYLES = {"released": "green", "kept": "green", "failed": "red", "cancelled": "red"}


class Terminal:
    """Shows pictures in the terminal; what else is printed meanwhile is above them.

    Args:
        console: where, by default stdout.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tty = tty_of(sys.stdout) if console is None else None
        # rich's type for a file has all that a file can do, of which it uses little.
        file: Any = self._tty
        self._console = console or Console(file=file, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False)
        # A script that ends with its run under way leaves the cursor to be seen.
        atexit.register(self._at_exit)
        self._live.start()

    def show(self, picture: Picture) -> None:
        """Shows it in place of the last one, once the terminal takes it."""
        self._release()
        self._live.update(joined(self._lines(picture)), refresh=True)

    def end(self, picture: Picture) -> None:
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

    def _lines(self, picture: Picture) -> list[Text]:
        console = self._console
        return lines_of(picture, console.width, console.height - 1, console.encoding)

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
    from rich.text import Text

    levels = BLOCKS if encoding.lower().startswith("utf") else ASCII

    def shown(text: str, style: str = "") -> Text:
        known = text.encode(encoding, "backslashreplace").decode(encoding)
        line = Text(plain(known), style=style, no_wrap=True)
        line.truncate(width, overflow="crop")
        return line

    lines = [_head(picture, shown)]
    if picture.status.waiting_for:
        lines.append(shown(f"  {picture.status.waiting_for}"))
    longest = max((len(plot.name) for plot in picture.plots), default=0)
    for plot in picture.plots:
        drawn = sparkline(plot.traces[0] if plot.traces else (), _PLOT_WIDTH, levels)
        name = plot.name[:24].ljust(min(longest, 24))
        lines.append(shown(f"  {name}  {drawn.ljust(_PLOT_WIDTH)}  {words.measured(plot)}"))
    lines += [shown(text) for text in _ranks(picture, levels)]
    left = max(min(height - len(lines) - 1, _MOST_LINES), 0)
    recent = picture.recent
    # The last ones of `[-0:]` would be all.
    lines += [shown(f"  {line}", "dim") for line in recent.lines[len(recent.lines) - left :][:left]]
    if recent.total > min(left, len(recent.lines)):
        lines.append(shown(f"  {recent.total:,} lines; {words.whole_log(picture)}", "dim"))
    return lines[: max(height, 1)]


def _head(picture: Picture, shown: _Shown) -> Text:
    parts = [words.seconds(picture.elapsed), words.gang(picture.status)]
    told = " - ".join([words.phase(picture), *(part for part in parts if part)])
    head = shown(f"hopsgpu {picture.status.run_id}: {told}")
    head.stylize(f"bold {_STYLES.get(picture.status.state, 'cyan')}")
    return head


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


if TYPE_CHECKING:
    from typing import Protocol

    class _Shown(Protocol):
        def __call__(self, text: str, style: str = "") -> Text: ...
