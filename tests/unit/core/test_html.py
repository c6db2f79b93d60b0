"""What is put into HTML is escaped and bounded."""

from __future__ import annotations

from hopsgpu.core import html

NASTY = "<script>alert('&')</script>"
SAFE = "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;"


def test_every_way_into_html_escapes() -> None:
    pages = (
        html.escape(NASTY),
        html.element("div", NASTY, title=NASTY),
        html.box(NASTY),
        html.title(NASTY, NASTY, NASTY),
        html.table([NASTY], [[NASTY]]),
        html.facts({NASTY: NASTY}),
        html.collapsible(NASTY, NASTY),
        html.pre(f"{NASTY}\n{NASTY}"),
        html.image("data:,x", 1, 2, NASTY),
    )
    for page in pages:
        assert SAFE in page and "<script" not in page, page


def test_what_is_html_already_stays() -> None:
    assert html.box(html.bold("1 < 2")).count("<b>1 &lt; 2</b>") == 1


def test_lines_lose_what_steers_terminals_and_what_is_too_much() -> None:
    assert html.plain_line("\x1b[1;32mgreen\x1b[0m\x1b]0;title\x07 \x1b7\tend") == "green   end"
    assert html.plain_line("a\x00b\x9b") == "a?b?"
    assert html.plain_line("über ✓") == "über ✓"
    assert html.plain_line("x" * 10_000_000) == "x" * 299 + "…"
    assert len(html.escape("<" * 10_000_000)) < 2_000
    assert len(html.pre("<\n" * 1_000)) > 4_000
