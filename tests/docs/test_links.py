"""Links of the pages lead somewhere: files, headings; addresses of the web have their form."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert [(link, why) for link in links(page) if (why := _trouble(page, link))] == []


def _trouble(page: Path, link: str) -> str:
    parts = urlsplit(link)
    if parts.scheme:
        well = parts.scheme in ("http", "https") and "." in (parts.hostname or "")
        return "" if well else "no address of the web"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.exists():
        return f"there is no {target}"
    if not target.is_relative_to(ROOT):
        return "leads out of the repository"
    if not parts.fragment:
        return ""
    if target.suffix != ".md":
        return "an anchor in what is no page"
    return "" if parts.fragment in anchors(target) else f"anchors there: {sorted(anchors(target))}"
