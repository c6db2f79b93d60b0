"""Command lines of the pages: shells can parse them, and `hopsgpu` takes what stands behind it."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner

from hopsgpu.cli.main import main
from tests.bounds import HANG_SECONDS
from tests.docs.pages import PAGES, Block, all_blocks, blocks, name_of, spans

# What stands for a value in the pages, where a number is wanted.
NUMBERS = {"N": "1", "K": "1", "P": "6006", "SECONDS": "2"}
# Two commands side by side in a block without a language.
_COLUMNS = re.compile(r" {2,}(?=hopsgpu )")


def _script(block: Block) -> str:
    if block.language != "console":
        return block.code
    typed = (line for line in block.code.splitlines() if line.startswith("$ "))
    return "\n".join(line.removeprefix("$ ") for line in typed)


def _commands(page: Path) -> dict[str, bool]:
    """What stands behind `hopsgpu`, in blocks and in the text; whether in a block."""
    lines = {span: False for span in spans(page) if span.startswith("hopsgpu ")}
    for block in blocks(page):
        if block.language in ("", "bash", "console"):
            joined = _script(block).replace("\\\n", " ")
            # Of what is typed and what it prints, in a block without a language.
            typed_lines = (line.removeprefix("$ ") for line in joined.splitlines())
            split = itertools.chain.from_iterable(map(_COLUMNS.split, typed_lines))
            lines |= dict.fromkeys(split, True)
    found = {}
    for line, typed in lines.items():
        if match := re.fullmatch(r"(?:eval \"\$\()?hopsgpu ([a-z].*?)(?:\)\")?", line):
            found[match[1]] = typed
    return found


def _all_of(command: str) -> list[list[str]]:
    """The arguments of a synopsis with all that is optional; each of `a | b` for itself."""
    # The shell takes redirections.
    command = re.sub(r"\s#.*|\s> \S+$|\.\.\.|…", "", command).replace(" | ", "|")
    words = shlex.split(command.replace("[", " ").replace("]", " "))
    choices = [[NUMBERS.get(one, one) for one in word.split("|")] for word in words]
    return [list(chosen) for chosen in itertools.product(*choices)]


CASES = [
    pytest.param(arguments, typed, id=f"{name_of(page)}: {' '.join(arguments)}")
    for page in PAGES
    for command, typed in _commands(page).items()
    for arguments in _all_of(command)
    # "hopsgpu train-2026... waiting: ..." is what a run says of itself.
    if re.fullmatch(r"[a-z]+", arguments[0])
]


def test_there_are_commands() -> None:
    assert len(CASES) > 20


@pytest.mark.parametrize(("arguments", "typed"), CASES)
def test_the_command_line_takes_it(
    arguments: list[str], typed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A group's goes down to the command, which is not run.
    monkeypatch.setattr(click.Command, "invoke", lambda command, context: None)
    result = CliRunner().invoke(main, arguments)
    if not typed and _is_name(arguments):
        return  # a command is named, which may want arguments
    assert result.exit_code == 0, result.output


def _is_name(arguments: list[str]) -> bool:
    command: click.Command | None = main
    for word in arguments:
        command = command.commands.get(word) if isinstance(command, click.Group) else None
    return command is not None


SHELL = all_blocks("bash", "sh", "console")


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_can_parse_it(block: Block) -> None:
    script = _script(block)
    assert script.strip(), "no command: lines that are typed begin with '$ ' in a console"
    told = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=HANG_SECONDS
    )
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("block", all_blocks("yaml", "json", "xml"), ids=str)
def test_data_has_its_form(block: Block) -> None:
    if block.language == "yaml":
        assert yaml.safe_load(block.code)
    elif block.language == "json":
        assert json.loads(block.code)
    else:
        assert len(ElementTree.fromstring(f"<all>{block.code}</all>"))


def test_languages_are_known() -> None:
    known = {"", "python", "bash", "console", "text", "yaml", "json", "xml", "properties"}
    told = {str(block): block.language for page in PAGES for block in blocks(page)}
    assert {at: language for at, language in told.items() if language not in known} == {}
