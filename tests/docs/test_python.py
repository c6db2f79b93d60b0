"""Python of the pages: it compiles, mypy has nothing against it, it uses what is public alone.

Blocks that are no excerpts are run on the real cluster too: tests/cluster/test_docs.py.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from pathlib import Path

import pytest
from mypy import api as mypy

import hopsgpu
from tests.docs.pages import PAGES, ROOT, Block, all_blocks, blocks, name_of

BLOCKS = all_blocks("python")
# Names that the text around a block explains need not be defined in it; frameworks are too large
# to be looked into.
CONFIG = """
[mypy]
python_version = 3.11
follow_imports = silent
ignore_missing_imports = true
check_untyped_defs = true
strict_equality = true
disable_error_code = name-defined, no-redef, empty-body, used-before-def, union-attr

[mypy-torch.*,tensorflow.*,jax.*,numpy.*,pyarrow.*,pandas.*,sklearn.*,keras.*,xgboost.*,ray.*]
follow_imports = skip
"""


def test_there_are_blocks() -> None:
    assert len(BLOCKS) > 10


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_uses_what_is_public(block: Block) -> None:
    public = {*hopsgpu.__all__, "__version__", "types"}
    for node in ast.walk(ast.parse(block.code)):
        match node:
            case ast.Attribute(value=ast.Name(id="hopsgpu"), attr=name):
                assert name in public, f"hopsgpu.{name}"
            case ast.ImportFrom(module="hopsgpu", names=names):
                assert {alias.name for alias in names} <= public
            case ast.ImportFrom(module=str(module)) if block.source is None:
                assert not module.startswith("hopsgpu."), f"{module} is not public"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_contexts_have_what_is_asked_of_them(block: Block) -> None:
    """What mypy does not see, for a Context refuses what is yet to come as it is asked for."""
    known = {name for name in vars(hopsgpu.Context) if not name.startswith("_")}
    known |= {field.name for field in dataclasses.fields(hopsgpu.Context)}
    tree = ast.parse(block.code)
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_context(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in names:
                assert attribute in known
            case ast.Attribute(value=value, attr=attribute) if _is_context(value):
                assert attribute in known


def _is_context(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("context")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.source], ids=str)
def test_excerpts_are_what_the_file_has(block: Block) -> None:
    """Parts may be left out, each where a line is `...`."""
    assert block.source is not None
    there = [line.strip() for line in (ROOT / block.source).read_text().splitlines()]
    for part in re.split(r"^[ ]*\.\.\.\n", block.code, flags=re.MULTILINE):
        lines = [line.strip() for line in part.strip().splitlines()]
        starts = range(len(there) - len(lines) + 1)
        assert any(there[at : at + len(lines)] == lines for at in starts), part


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy has against the pages, each one's blocks being one module."""
    directory = tmp_path_factory.mktemp("pages")
    config = directory / "mypy.ini"
    config.write_text(CONFIG)
    files = []
    for page in PAGES:
        module = re.sub(r"\W+", "_", name_of(page).removesuffix(".md"))
        file = directory / f"{module}.py"
        file.write_text(_as_module(page))
        files.append(str(file))
    cache = ROOT / ".mypy_cache" / "docs"
    said, trouble, _ = mypy.run(
        ["--config-file", str(config), "--cache-dir", str(cache), "--no-error-summary", *files]
    )
    assert not trouble, trouble
    return said.splitlines()


def _as_module(page: Path) -> str:
    """The page's blocks at the lines where they are, with nothing between them."""
    lines: list[str] = []
    for number, block in enumerate(b for b in blocks(page) if b.language == "python"):
        # A function of its own: what an excerpt has at its top may be a function's middle.
        code = block.code
        if block.source:
            code = f"def excerpt_{number}():\n{textwrap.indent(code, '    ')}"
        lines += [""] * (block.line - 1 - bool(block.source) - len(lines))
        lines += code.splitlines()
    return "\n".join(lines) + "\n"


def test_mypy_has_nothing_against_it(complaints: list[str]) -> None:
    assert [line for line in complaints if "note:" not in line] == []
