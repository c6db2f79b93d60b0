"""HTML for notebooks; all content is escaped and bounded."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from hopsgpu.terminal_text import SEQUENCE

_MAX_LINE = 300
_MAX_TEXT = 10_000
_MAX_ROWS = 64
_CELL = "text-align:left;padding:1px 12px 1px 0;vertical-align:top"
# Notebooks centre tables, and give all columns of a table the same width.
_TABLE = "border-collapse:collapse;font-size:inherit;color:inherit;margin:2px 0;table-layout:auto"
_BOX = "font-size:13px;line-height:1.45"
# The classic notebook shows <pre> in black on white in all themes.
_MONO = (
    "margin:2px 0;white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;font-size:12px;"
    "color:inherit;background:none"
)


class Html(str):
    """A text that is HTML; all other text is escaped."""


def plain_line(text: str, limit: int = _MAX_LINE) -> str:
    """Return a line without terminal sequences, cut to `limit` characters."""
    # Cut the line first: it may be very long.
    content = text[: 4 * limit]
    if not content.isprintable():
        content = SEQUENCE.sub("", content).expandtabs(4)
        content = "".join(char if char.isprintable() else "?" for char in content)
    return content if len(content) <= limit else f"{content[: limit - 1]}…"


def escape(value: object) -> Html:
    """Return a value as HTML, with its line breaks."""
    if isinstance(value, Html):
        return value
    lines = str(value)[:_MAX_TEXT].split("\n")
    return Html("<br>".join(html.escape(plain_line(line)) for line in lines))


def element(tag: str, *children: object, **attributes: str) -> Html:
    """Return an element; trailing underscores of attribute names are dropped (`class_`)."""
    attribute_text = "".join(f' {n.rstrip("_")}="{html.escape(v)}"' for n, v in attributes.items())
    return Html(f"<{tag}{attribute_text}>{''.join(escape(child) for child in children)}</{tag}>")


def box(*children: object) -> Html:
    return element("div", *children, style=_BOX)


def title(kind: str, name: object, detail: object = "") -> Html:
    """Return a title line: a kind, a name in bold, and a detail."""
    faint = element("span", detail, style="opacity:.7")
    return element("div", element("span", kind, " ", style="opacity:.7"), bold(name), " ", faint)


def bold(value: object) -> Html:
    return element("b", value)


def table(headers: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    rows = list(rows)
    first = element("tr", *(element("th", h, style=f"{_CELL};opacity:.7") for h in headers))
    body = (
        element("tr", *(element("td", v, style=_CELL) for v in row)) for row in rows[:_MAX_ROWS]
    )
    content = element("table", first if headers else "", *body, style=_TABLE)
    if (hidden_count := len(rows) - _MAX_ROWS) <= 0:
        return content
    return Html(content + element("div", f"and {hidden_count:,} more"))


def facts(pairs: Mapping[str, object]) -> Html:
    rows = ((element("span", name, style="opacity:.7"), value) for name, value in pairs.items())
    return table((), rows)


def collapsible(summary: object, *children: object, **attributes: str) -> Html:
    # Restore the triangle, which the classic notebook removes.
    content = element("summary", summary, style="display:list-item;cursor:pointer")
    return element("details", content, *children, **attributes)


def pre(text: str) -> Html:
    return element("pre", Html("\n".join(escape(line) for line in text.split("\n"))), style=_MONO)


def image(source: str, width: int, height: int, description: str) -> Html:
    text = html.escape(description)
    attributes = f'src="{html.escape(source)}" alt="{text}" title="{text}"'
    style = f"display:inline;width:{width}px;height:{height}px;vertical-align:middle;margin:0"
    return Html(f'<img {attributes} width="{width}" height="{height}" style="{style}">')
