"""HTML for notebooks; the functions here escape and bound whatever is put into it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

_LONGEST = 300
_LONGEST_TEXT = 10_000
_ROWS = 64
# Colours and cursor movements that programs write for terminals.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CELL = "text-align:left;padding:1px 12px 1px 0;vertical-align:top"
# Notebooks centre tables, and give all columns of a table the same width.
_TABLE = "border-collapse:collapse;font-size:inherit;color:inherit;margin:2px 0;table-layout:auto"
_BOX = "font-size:13px;line-height:1.45"
# The classic notebook shows such text in black on white, whatever colours the page has.
_MONO = (
    "margin:2px 0;white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;font-size:12px;"
    "color:inherit;background:none"
)


class Html(str):
    """A text that is HTML already; any other text is escaped when it is put in."""


def plain(text: str, longest: int = _LONGEST) -> str:
    """Return a line without control sequences of terminals, of at most `longest` characters."""
    # The line is cut before the search too, so that an endless one is not searched whole.
    shown = text[: 4 * longest]
    if not shown.isprintable():
        shown = _ESCAPES.sub("", shown).expandtabs(4)
        shown = "".join(char if char.isprintable() else "?" for char in shown)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def escape(value: object) -> Html:
    """Return a value as HTML; a text of several lines keeps them."""
    if isinstance(value, Html):
        return value
    lines = str(value)[:_LONGEST_TEXT].split("\n")
    return Html("<br>".join(html.escape(plain(line)) for line in lines))


def element(tag: str, *children: object, **attributes: str) -> Html:
    """Return an element; underscores at the end of an attribute's name are left out."""
    written = "".join(f' {n.rstrip("_")}="{html.escape(v)}"' for n, v in attributes.items())
    return Html(f"<{tag}{written}>{''.join(escape(child) for child in children)}</{tag}>")


def box(*children: object) -> Html:
    """Return the outermost element of a value or a display."""
    return element("div", *children, style=_BOX)


def title(kind: str, name: object, detail: object = "") -> Html:
    """Return a title line: the kind of a thing, its name in bold, and a detail."""
    faint = element("span", detail, style="opacity:.7")
    return element("div", element("span", kind, " ", style="opacity:.7"), bold(name), " ", faint)


def bold(value: object) -> Html:
    """Return a value in bold, because readers look for it first."""
    return element("b", value)


def table(headers: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table; if there are many rows, it shows only the first and counts the others."""
    rows = list(rows)
    first = element("tr", *(element("th", h, style=f"{_CELL};opacity:.7") for h in headers))
    body = (element("tr", *(element("td", v, style=_CELL) for v in row)) for row in rows[:_ROWS])
    shown = element("table", first if headers else "", *body, style=_TABLE)
    left = len(rows) - _ROWS
    return shown if left <= 0 else Html(shown + element("div", f"and {left:,} more"))


def facts(pairs: Mapping[str, object]) -> Html:
    """Return a table of names and their values, one row each."""
    rows = ((element("span", name, style="opacity:.7"), value) for name, value in pairs.items())
    return table((), rows)


def collapsible(summary: object, *children: object, **attributes: str) -> Html:
    """Return an element that shows its children when a user clicks on the summary."""
    # The classic notebook removes the triangle, which shows that there is something to unfold.
    shown = element("summary", summary, style="display:list-item;cursor:pointer")
    return element("details", shown, *children, **attributes)


def preformatted(text: str) -> Html:
    """Return lines in a font of fixed width."""
    return element("pre", Html("\n".join(escape(line) for line in text.split("\n"))), style=_MONO)


def image(source: str, width: int, height: int, words: str) -> Html:
    """Return a picture that is part of the page."""
    attributes = (
        f'src="{html.escape(source)}" alt="{html.escape(words)}" title="{html.escape(words)}"'
    )
    style = f"display:inline;width:{width}px;height:{height}px;vertical-align:middle;margin:0"
    return Html(f'<img {attributes} width="{width}" height="{height}" style="{style}">')
