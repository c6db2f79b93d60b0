"""docs/source-tree.md has all packages, and the files that pages name are there."""

from __future__ import annotations

import re

from tests.docs.pages import PAGES, ROOT, spans

PAGE = ROOT / "docs" / "source-tree.md"
PACKAGE = ROOT / "hopsgpu"


def _packages() -> set[str]:
    below = (path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py"))
    return {".".join(path.parts) for path in below if path.parts}


def test_the_table_has_every_package() -> None:
    cells = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(.+?)`", cell)} == _packages()


def test_the_files_of_a_package_are_there() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)`.* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    for package, files in rows:
        for name in re.findall(r"`(.+?)`", files):
            assert (PACKAGE / package.replace(".", "/") / name).is_file(), f"{package}: {name}"


def test_paths_of_the_pages_are_there() -> None:
    every = {span for page in PAGES for span in spans(page)}
    named = {span for span in every if re.fullmatch(r"hopsgpu/[\w/]+\.py", span)}
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
