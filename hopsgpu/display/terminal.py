"""The bottom lines of a terminal, which rich redraws, and the display of a run in them."""

from __future__ import annotations

import atexit
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hopsgpu.core.html import plain_line
from hopsgpu.display import phrases
from hopsgpu.display.charts import ASCII, BLOCKS, SHARES, sparkline
from hopsgpu.display.phrases import NOT_TRAINING
from hopsgpu.display.picture import LogTail, Picture, Row
from hopsgpu.display.run_facts import NOW, RunView
from hopsgpu.display.subjects import status_view
from hopsgpu.display.tty import tty_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PLOT_WIDTH = 40
_MIN_PLOT_WIDTH = 12
_NAME_WIDTH = 24
_VALUES_WIDTH = 34
_INDENT = "  "
_TRACE_WIDTH = 12
_STEP_WIDTH = 10
_MAX_LINES = 12
_EXIT_SECONDS = 1.0
_STYLES = dict.fromkeys(("succeeded", "held", "released"), "green")
_STYLES |= {"failed": "red", "cancelled": "yellow"}
# Number of lines of the ranks' output that stay visible below a table of many ranks.
_MIN_LINES = 4


P_contra = TypeVar("P_contra", contravariant=True)


class Renderer(Protocol[P_contra]):
    """Returns a picture as lines of a terminal."""

    def __call__(
        self, picture: P_contra, width: int, height: int, encoding: str, /
    ) -> list[Text]: ...


class LineStyle(Protocol):
    """Turns a text into a line of a terminal, in its encoding and no wider than the terminal."""

    def __call__(self, text: str, style: str = "") -> Text: ...


class Terminal(Generic[P_contra]):
    """Shows pictures in the terminal; other output appears above them.

    Args:
        console: console to draw on, by default stdout.
    """

    def __init__(self, drawn: Renderer[P_contra], console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._drawn = drawn
        self._tty = tty_of(sys.stdout) if console is None else None
        # Any: rich declares a file, but uses only what a `Tty` has.
        file: Any = self._tty
        self._console = console or Console(file=file, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False)
        # A script may end during its run: the cursor must be visible again.
        atexit.register(self._at_exit)
        self._live.start()

    def show(self, picture: P_contra) -> None:
        """Show a picture in place of the last one, once the terminal accepts it."""
        self._release()
        self._live.update(join_lines(self._lines(picture)), refresh=True)

    def end(self, picture: P_contra) -> None:
        """Leave the last picture visible."""
        # Draw before closing: rich gives stdout back before it writes, and the next run's display
        # must not start on a terminal that has not accepted this picture.
        self.show(picture)
        self.close()

    def close(self) -> None:
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
            # A stopped terminal (Ctrl-S) must not keep GPUs.
            self._tty.give_up(_EXIT_SECONDS)
        self.close()


def join_lines(lines: Iterable[Text]) -> Text:
    from rich.text import Text

    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def lines_of(picture: Picture, width: int, height: int, encoding: str) -> list[Text]:
    """Return a picture as lines of a terminal.

    Args:
        encoding: the terminal's encoding; missing characters are written in ASCII.
    """
    shown, levels = line_style(width, encoding), levels_of(encoding)
    worlds = phrases.world_lines(picture.status.worlds, picture.status.timeline.requested)
    # The present world is in the first line.
    more = worlds if picture.has_ended else worlds[:-1]
    lines = head(status_view(picture.status, picture.elapsed), more, shown, width)
    lines += [shown(text) for text in _plots(picture, levels, width)]
    room = height - len(lines) - min(picture.recent.total, _MIN_LINES)
    lines += [shown(text) for text in _ranks(picture, levels, room)]
    logs = phrases.whole_log(picture.status.run_id)
    lines += tail(picture.recent, height - len(lines), logs, shown)
    return lines[: max(height, 1)]


def pack(parts: Sequence[str], between: str, shown: LineStyle, width: int) -> list[Text]:
    """Return the parts below the first line, in one line if they fit, else in two.

    The first line ends with a whole part, so a long part hides none of the others.
    """
    from rich.cells import cell_len

    room, text = width - len(_INDENT), between.join(parts)
    if cell_len(text) <= room:
        texts = [text]
    elif len(parts) == 1:
        first, *rest = textwrap.wrap(text, max(room, 1))
        texts = [first, " ".join(rest)]
    else:
        count = 1
        while cell_len(between.join(parts[: count + 1])) < room:
            count += 1
        texts = [between.join(parts[:count]) + between.rstrip(), between.join(parts[count:])]
    return [shown(f"{_INDENT}{text}") for text in texts if text]


def levels_of(encoding: str) -> str:
    """Return the characters for a sparkline that a terminal supports."""
    return BLOCKS if _is_utf(encoding) else ASCII


def _is_utf(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def line_style(width: int, encoding: str) -> LineStyle:
    """Return a function that formats lines for a terminal, in ASCII if necessary."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    mark, arrow = ("…", "→") if _is_utf(encoding) else ("...", "->")

    def format_line(text: str, style: str = "") -> Text:
        line = plain_line(text).replace("→", arrow)
        printable = line.encode(encoding, "backslashreplace").decode(encoding)
        if cell_len(printable) > width:
            printable = set_cell_size(printable, max(width - len(mark), 0)) + mark[: max(width, 0)]
        return Text(printable, style=style, no_wrap=True)

    return format_line


def head(view: RunView, more: Sequence[str], shown: LineStyle, width: int) -> list[Text]:
    """Return the first lines of a live display.

    Args:
        more: further lines, above the GPU time not spent training.
    """
    from rich.cells import cell_len

    state, *rest = view.headline
    first = f"hopsgpu {view.run_id}: {state}"
    while rest and cell_len(f"{first} - {rest[0]}") <= width:
        first = f"{first} - {rest.pop(0)}"
    line = shown(first)
    line.stylize(f"bold {_STYLES.get(view.state, 'cyan')}")
    room = max(width - len(_INDENT), 1)
    now = [shown(f"{_INDENT}{text}") for text in textwrap.wrap(view.phrase(NOW), room)]
    results = [line for text in view.results for line in textwrap.wrap(text, room)]
    texts = [*results, *more, *textwrap.wrap(view.phrase(NOT_TRAINING), room)]
    return [
        line,
        *pack(rest, " - ", shown, width),
        *now,
        *pack(*view.details, shown, width),
        *(shown(f"{_INDENT}{text}") for text in texts),
    ]


def tail(recent: LogTail, room: int, where: str, shown: LineStyle) -> Sequence[Text]:
    """Return the last lines of the ranks and where the whole logs are, in at most `room` lines."""
    room_left = max(min(room - 1, _MAX_LINES), 0)
    # Not `[-left:]`, because `[-0:]` is the whole list.
    last = recent.lines[len(recent.lines) - room_left :][:room_left]
    lines = [shown(f"  {line}", "dim") for line in last]
    if recent.total > len(last):
        lines.append(shown(f"  {recent.total:,} lines; {where}", "dim"))
    return lines


def _plots(picture: Picture, levels: str, width: int) -> Iterable[str]:
    if not picture.plots:
        return
    names = [plot.name[:_NAME_WIDTH] for plot in picture.plots]
    values = [phrases.metric_summary(plot) for plot in picture.plots]
    # A fixed width, whatever the values are: plots that move four times a second are unreadable.
    wide, longest = plot_width(width, names, _VALUES_WIDTH), max(map(len, names))
    for plot, name, value in zip(picture.plots, names, values, strict=True):
        trace = plot.traces[0] if plot.traces else ()
        drawn = sparkline(trace, wide, levels, span=plot.steps)
        yield f"{_INDENT}{name.ljust(longest)}  {drawn.ljust(wide)}  {value}"
    first, last = phrases.scale(picture.plots[0])
    yield f"{_INDENT}{' ' * longest}  {first}{last.rjust(wide - len(first))}"


def plot_width(width: int, names: Sequence[str], values: int) -> int:
    beside = len(_INDENT) + 4 + max(map(len, names)) + values
    return min(max(width - beside, _MIN_PLOT_WIDTH), _PLOT_WIDTH)


def _ranks(picture: Picture, levels: str, room: int) -> Iterable[str]:
    """Yield a line for each rank, or for as many ranks as fit in `room` lines."""
    # Without reports, the rows would be empty.
    if not phrases.has_rank_facts(picture.rows):
        return
    fits = picture.ranks <= min(room, len(picture.rows))
    rows = picture.rows if fits else picture.rows[: max(room - 1, 0)]

    def step(row: Row) -> str:
        return "" if row.step is None else f"step {row.step:g}"

    host = max((len(row.host) for row in rows), default=0)
    wide = _STEP_WIDTH if any(map(step, rows)) else 0
    for row in rows:
        parts = [f"rank {row.rank:<2}", row.host.ljust(host), step(row).ljust(wide)]
        parts.append(_gpu(row, levels))
        yield f"{_INDENT}{'  '.join([*(part for part in parts if part), row.ended])}".rstrip()
    if more := phrases.remaining_ranks(picture, len(rows)):
        yield f"{_INDENT}{more}"


def _gpu(row: Row, levels: str) -> str:
    if row.gpu is None:
        return ""
    busy, memory = phrases.use(row.gpu)
    trace = sparkline(row.trace, _TRACE_WIDTH, levels, SHARES)
    return f"GPU {busy:>4} {trace.ljust(_TRACE_WIDTH)} {memory}"
