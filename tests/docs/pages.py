"""The pages that people read, taken apart: their code, their links and their headings."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    sorted(
        [
            ROOT / "README.md",
            *(ROOT / "docs").glob("*.md"),
            ROOT / "spark-conf" / "README.md",
            ROOT / "spark-scripts" / "README.md",
            ROOT / "yarn-scripts" / "README.md",
        ]
    )
)
# A comment right above a block: where it is taken from, or why nobody runs it.
_REMARK = re.compile(r"<!-- (from|not run): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: the file that it is in.
        line: of its first line of code, from 1.
        language: the first word behind the fence, "" where there is none.
        code: what stands in it.
        source: the file that it is an excerpt of, below the repository; or None.
        not_run: why it cannot be run; or None.
    """

    page: Path
    line: int
    language: str
    code: str
    source: str | None = None
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """A page's path below the repository."""
    return str(page.relative_to(ROOT))


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code, in order; what builds the site (`{toctree}`) is none."""
    remark: re.Match[str] | None = None
    for token in _tokens(page):
        if token.type == "html_block":
            remark = _REMARK.search(token.content)
        elif token.type == "fence":
            language = (token.info.split() or [""])[0]
            if not language.startswith("{"):
                assert token.map is not None
                told = {} if remark is None else {remark[1]: remark[2]}
                yield Block(
                    page,
                    token.map[0] + 2,
                    language,
                    textwrap.dedent(token.content),
                    told.get("from"),
                    told.get("not run"),
                )
            remark = None
        else:
            remark = None


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in one of these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def _inline(page: Path) -> Iterator[Token]:
    for token in _tokens(page):
        yield from token.children or ()


def links(page: Path) -> list[str]:
    """Where the page's links and pictures lead."""
    found = [(t.attrGet("href") or t.attrGet("src")) for t in _inline(page)]
    return [str(link) for link in found if link]


def spans(page: Path) -> list[str]:
    """The pieces of code within the text."""
    return [token.content for token in _inline(page) if token.type == "code_inline"]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The fragments by which its headings are linked, as forges and MyST make them."""
    found: dict[str, int] = {}
    tokens = _tokens(page)
    for heading, content in zip(tokens, tokens[1:], strict=False):
        if heading.type == "heading_open":
            text = "".join(t.content for t in content.children or () if t.type != "html_inline")
            slug = _slug(text)
            found[slug] = found.get(slug, -1) + 1
    return frozenset(
        f"{slug}-{n}" if n else slug for slug, most in found.items() for n in range(most + 1)
    )


def title(page: Path) -> str:
    """Its first heading, as text."""
    tokens = _tokens(page)
    first = next(n for n, token in enumerate(tokens) if token.type == "heading_open")
    return "".join(token.content for token in tokens[first + 1].children or ())


def _slug(text: str) -> str:
    kept = (c for c in text.strip().lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
    return "".join(kept).replace(" ", "-")
