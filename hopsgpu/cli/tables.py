"""Tables for people, on a terminal of any width and in files that programs read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# A text and its style.
Cell = tuple[str, str]
Row = list[Cell]
_GAP = 2
# Cells of a fact's name, and the fewest cells of its text on the narrowest terminal.
_NAME = 12
_MIN_ROOM = 20


@dataclass(frozen=True)
class Fact:
    """A name and a text that may be long, on separate lines.

    Attributes:
        name: the name; "" for another line of the previous fact.
        style: style of both.
    """

    name: str
    text: str
    style: str = ""


@dataclass(frozen=True)
class TableLayout:
    """How the columns of a table behave, by their headers.

    Attributes:
        right: columns of numbers.
        least: smallest width of columns that may shrink; others do not.
        dropped_first: columns to drop, in this order, if the table is still too wide.
        cut_in_front: columns whose texts differ at their ends.
    """

    right: tuple[str, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    dropped_first: tuple[str, ...] = ()
    cut_in_front: tuple[str, ...] = ()


def headers(*names: str) -> Row:
    return [(name, "bold") for name in names]


def show(rows: Sequence[Row | Fact], layout: TableLayout) -> None:
    """Print a table: on a terminal each row is a line that fits, elsewhere it is complete."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    # A file or a pipe gets whole lines, in colours too if FORCE_COLOR is set.
    width = console.width if console.file.isatty() else None
    lines = align(rows, layout, console.encoding, width)
    console.print(Text("\n").join(lines), soft_wrap=width is None)


def align(
    rows: Sequence[Row | Fact], layout: TableLayout, encoding: str, width: int | None
) -> list[Text]:
    """Return lines of a table; the first row has the headers, a row of one cell is a line of its
    own.

    Args:
        width: largest width of a line, or None for no limit.
    """
    from rich.cells import cell_len
    from rich.text import Text

    shown = [
        row if isinstance(row, Fact) else [(plain(text, encoding), style) for text, style in row]
        for row in rows
    ]
    full = [row for row in shown if not isinstance(row, Fact) and len(row) > 1]
    columns = [text for text, _ in full[0]] if full else []
    widths = [max(cell_len(text) for text, _ in column) for column in zip(*full, strict=True)]
    if width is not None:
        widths = _fit_widths(columns, widths, width, layout)
    mark = "…" if plain("…", encoding) == "…" else "~"
    lines = []
    for row in shown:
        if isinstance(row, Fact):
            lines += _fact_lines(row, encoding, width)
            continue
        if len(row) == 1:
            lines.append(Text(*row[0]))
            continue
        line = Text()
        kept = [i for i, most in enumerate(widths) if most]
        for i in kept:
            text, style = row[i]
            text = _cut_text(text, widths[i], mark, columns[i] in layout.cut_in_front)
            pad = " " * (widths[i] - cell_len(text))
            right = columns[i] in layout.right
            line.append(pad if right else "")
            line.append(text, style=style)
            if i != kept[-1]:
                line.append(("" if right else pad) + " " * _GAP)
        if width is not None:
            line.truncate(width, overflow="crop")
        lines.append(line)
    return lines


def _fact_lines(fact: Fact, encoding: str, width: int | None) -> list[Text]:
    """Return the name and beside it the text, in as many lines as needed."""
    from rich.cells import cell_len
    from rich.text import Text

    text, beside = plain(fact.text, encoding), _NAME + 1
    room = cell_len(text) if width is None else max(width - beside, _MIN_ROOM)
    names = itertools.chain([plain(fact.name, encoding)], itertools.repeat(""))
    return [
        Text(f"{name:<{_NAME}} {part}", style=fact.style)
        for name, part in zip(names, _break_text(text, room), strict=False)
    ]


def _break_text(text: str, room: int) -> Iterator[str]:
    """Yield a text in parts of at most so many cells, cut between words or behind a "/"."""
    from rich.cells import cell_len, set_cell_size

    while cell_len(text) > room:
        # If half of a wide character does not fit, set_cell_size ends the text in a space.
        fits = len(set_cell_size(text, room).rstrip()) or 1
        at = max(text.rfind(mark, room // 3, fits) for mark in " /") + 1
        if text[fits : fits + 1] == " " or not at:
            at = fits
        yield text[:at].rstrip()
        text = text[at:].lstrip()
    yield text


def _fit_widths(
    columns: Sequence[str], widths: Sequence[int], room: int, layout: TableLayout
) -> list[int]:
    """Return column widths that fit, 0 for a dropped column; the widest shrinks first."""
    fitted = dict(zip(columns, widths, strict=True))
    dropped_first = [name for name in layout.dropped_first if name in fitted]
    while sum(fitted.values()) + _GAP * (len(fitted) - 1) > room:
        wide = [name for name in fitted if fitted[name] > layout.least.get(name, fitted[name])]
        if wide:
            fitted[max(wide, key=lambda name: fitted[name])] -= 1
        elif dropped_first:
            del fitted[dropped_first.pop(0)]
            # The other columns get the room of the dropped one.
            fitted = {name: w for name, w in zip(columns, widths, strict=True) if name in fitted}
        else:
            break
    return [fitted.get(name, 0) for name in columns]


def _cut_text(text: str, width: int, mark: str, should_cut_front: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    if should_cut_front:
        return mark + set_cell_size(text[::-1], width - 1)[::-1]
    return set_cell_size(text, width - 1) + mark


def plain(text: str, encoding: str) -> str:
    """Remove control characters: names of applications are other users' texts."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)
