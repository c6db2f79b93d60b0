"""The pages as a browser shows them: `make docs` builds them, and then runs this."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of, title

BUILT = ROOT / "docs" / "_build" / "html"
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Pages that Sphinx writes itself, in place of any of this name.
_SPHINX_OWN = ("search", "genindex", "modindex", "py-modindex")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_built_under_its_own_title(page: Path) -> None:
    built = BUILT / page.with_suffix(".html").name
    assert built.is_file(), f"{built} is missing: `make docs` builds it, and runs this"
    shown = re.findall(r"<h1>(.*?)</h1>", built.read_text(encoding="utf-8"), re.DOTALL)
    # What follows the text is a link to the heading itself.
    texts = [html.unescape(re.sub(r"<a class=.*|<[^>]+>", "", heading)) for heading in shown]
    assert texts == [title(page)]


def test_no_page_has_a_name_of_sphinx() -> None:
    assert [name_of(page) for page in PAGES if page.stem in _SPHINX_OWN] == []
