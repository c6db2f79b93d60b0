"""What is public is documented: names, arguments, commands, settings, what errors say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache

import click
import pytest

import hopsgpu
from hopsgpu.cli.main import main
from hopsgpu.devcluster.boot import heap_mib
from hopsgpu.devcluster.layout import DATANODE, NAMENODE, RESOURCEMANAGER
from hopsgpu.devcluster.site_files import node_size
from tests.docs.pages import PAGES, ROOT, all_blocks, spans

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
CODE = sorted((ROOT / "hopsgpu").rglob("*.py"))
PUBLIC = [(name, getattr(hopsgpu, name)) for name in hopsgpu.__all__]
PUBLIC += [(f"types.{name}", getattr(hopsgpu.types, name)) for name in hopsgpu.types.__all__]
CLASSES = [(name, it) for name, it in PUBLIC if inspect.isclass(it)]
# Of dataclasses what is stored is told; of others what they are made from.
VALUES = [(name, it) for name, it in CLASSES if dataclasses.is_dataclass(it)]
ERRORS = [name for name, it in CLASSES if issubclass(it, Exception)]


def _functions() -> Iterator[tuple[str, object]]:
    for name, it in PUBLIC:
        if inspect.isfunction(it):
            yield name, it
        for method, function in vars(it).items() if inspect.isclass(it) else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


FUNCTIONS = list(_functions())


@pytest.mark.parametrize("name", [name for name, _ in PUBLIC])
def test_names_are_in_the_reference(name: str) -> None:
    assert re.search(rf"^\.\. auto\w+:: hopsgpu\.{name}(\(\))?$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize(("name", "it"), [*FUNCTIONS, *CLASSES])
def test_there_is_a_docstring(name: str, it: object) -> None:
    assert vars(it)["__doc__"] if inspect.isclass(it) else it.__doc__


@pytest.mark.parametrize(("name", "it"), VALUES)
def test_attributes_are_told(name: str, it: type) -> None:
    told = _section(it.__doc__ or "", "Attributes")
    assert {f.name for f in dataclasses.fields(it) if not f.name.startswith("_")} <= told


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_arguments_are_told(name: str, function: object) -> None:
    """All of them where there is a list; `submit` and `plan` have that of `launch`."""
    doc = inspect.getdoc(function) or ""
    told = _section(doc, "Args")
    if not told:
        assert "launch" in doc or len(inspect.signature(function).parameters) <= 3
        return
    for argument in inspect.signature(function).parameters:
        assert argument == "self" or argument in told, argument


def _section(doc: str, title: str) -> set[str]:
    """The names that a part of a docstring in Google's style tells of."""
    lines = inspect.cleandoc(doc).splitlines()
    if f"{title}:" not in lines:
        return set()
    told: set[str] = set()
    for line in lines[lines.index(f"{title}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        if match := re.match(r" {4}([\w, ]+):", line + ":" if line.endswith(",") else line):
            told |= set(re.findall(r"\w+", match[1]))
    return told


def test_the_development_cluster_is_as_large_as_told() -> None:
    page = " ".join(TEXTS[ROOT / "docs" / "development-cluster.md"].split())
    (memory_0, cores_0), (memory_1, cores_1) = node_size(0), node_size(1)
    each, beside = (memory_1 - memory_0) // 1024, memory_0 // 1024
    assert cores_1 - cores_0 == 1
    assert f"advertises K + {cores_0} cores and {each} K + {beside} GiB for K GPUs" in page
    told = re.search(r"heaps stay below 2 GB together with up to (\d+) nodes", page)
    assert told is not None
    fits = [nodes for nodes in range(1, 100) if _heaps(nodes) < 2000]
    assert max(fits) == int(told[1])


def _heaps(nodes: int) -> int:
    """MiB of all daemons of a cluster."""
    names = [NAMENODE, DATANODE, RESOURCEMANAGER, *(f"node{n}" for n in range(nodes))]
    return sum(heap_mib(name, nodes) for name in names)


def _commands(group: click.Group, above: str) -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{above} {name}"
        if isinstance(command, click.Group):
            yield from _commands(command, f"{above} {name}")


@pytest.mark.parametrize("command", list(_commands(main, "hopsgpu")))
def test_commands_are_told_of(command: str) -> None:
    """In the text or a block of a page; the options are in the reference, by themselves."""
    told = [span for page in PAGES for span in spans(page)]
    told += [block.code for block in all_blocks("", "bash", "console")]
    short = command.removeprefix("hopsgpu ") if command.count(" ") > 1 else command
    assert any(re.search(rf"\b{short}\b", text) for text in told)
    assert ".. click:: hopsgpu.cli.main:main" in TEXTS[ROOT / "docs" / "command-line.md"]


def _settings() -> set[str]:
    """What the code reads as `spark.hopsgpu.*`: by its name, or by `application.option(...)`."""
    found = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="option"), args=[ast.Constant(value=name)]):
                    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", name):  # of click they begin with "--"
                        found.add(f"spark.hopsgpu.{name}")
                case ast.Constant(value=str(text)):
                    found |= set(re.findall(r"spark\.hopsgpu\.[a-z_]+(?:\.[a-z_]+)*", text))
    return found


@pytest.mark.parametrize("name", sorted(_settings()))
def test_settings_are_told_of(name: str) -> None:
    table = TEXTS[ROOT / "docs" / "ranks.md"].partition("## Settings")[2]
    twin = name.removeprefix("spark.").upper().replace(".", "_")
    assert f"`{name}`" in table and f"`{twin}`" in table


def _rows(heading: str) -> list[str]:
    """What a person reads, of the table below a heading."""
    section = TROUBLES.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


@cache
def _said() -> str:
    """All strings of the code, each on a line of its own; \0 for what is put in."""
    said = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    said.append(text)
                case ast.JoinedStr(values=parts):
                    texts = [p.value if isinstance(p, ast.Constant) else "\0" for p in parts]
                    said.append("".join(map(str, texts)))
    return "\n".join(said)


@pytest.mark.parametrize("family", [*ERRORS, "Warnings of the result"])
def test_messages_are_what_the_code_says(family: str) -> None:
    rows = _rows(family)
    assert rows, f"troubleshooting.md has no table for {family}"
    for row in rows:
        pieces = [piece.strip(" :") for piece in row.split("…")]
        assert any(len(piece) > 5 for piece in pieces), row
        for piece in pieces:
            assert piece in _said(), f"{family}: {row!r}: nothing says {piece!r}"
