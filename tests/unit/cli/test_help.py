"""What `hopsgpu --help` and its like say, on terminals of any width."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

import hopsgpu
from hopsgpu.cli.command_group import summary
from hopsgpu.cli.main import main


def _groups(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[click.Group, list[str]]]:
    yield group, list(words)
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _groups(command, (*words, name))


GROUPS = list(_groups(main, ()))


@pytest.mark.parametrize("width", [64, 80, 120])
@pytest.mark.parametrize(("group", "words"), GROUPS, ids=lambda given: str(given))
def test_each_command_is_listed_with_a_whole_sentence(
    group: click.Group, words: list[str], width: int
) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=width).output
    assert all(len(line) <= width for line in shown.splitlines())
    listed = " ".join(shown.partition("\nCommands:\n")[2].split())
    assert "..." not in listed
    for name, command in group.commands.items():
        sentence = summary(command)
        assert sentence.endswith(".") and f"{name} {sentence}" in listed


def test_it_tells_its_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"hopsgpu {hopsgpu.__version__}\n"


@pytest.mark.parametrize("width", [80, 200])
def test_help_is_as_wide_as_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    command = main.commands["submit"]
    shown = command.get_help(
        click.Context(command, parent=main.make_context("hopsgpu", ["submit"]))
    )
    assert width - 20 < max(len(line) for line in shown.splitlines()) <= width
