"""Ranks and records that try to control the terminal of the person who looks at them."""

from __future__ import annotations

import ast
import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.backends.spark import console
from hopsgpu.cli import output
from hopsgpu.cli.output import TerminalFilter
from hopsgpu.core.own_log import _StderrHandler
from hopsgpu.display.progress import RunLines
from hopsgpu.errors import ConfigError, RankFailed
from hopsgpu.terminal_text import printable
from tests.bounds import HANG_SECONDS
from tests.unit.records import NEW, put_run

CLI = Path(output.__file__).parent
# A title, the clipboard, a link, a clear screen, the printer, a device's query; with 7 and 8 bits.
ATTACKS = (
    "\x1b]0;owned\x07",
    "\x1b]52;c;cm0gLXJmIH4K\x1b\\",
    "\x1b]8;;http://evil\x1b\\",
    "\x1b[2J\x1b[H",
    "\x1b[5i",
    '\x1bP$q"p\x1b\\',
    "\x1bc",
    "\x9b31m",
    "\x9d0;owned\x9c",
    "\x08\x07\x0e\x7f",
)
EVIL = "".join(f"{attack}|" for attack in ATTACKS)
SHOWN = "|" * len(ATTACKS)


def _has_controls(shown: str, allowed: str = "\n\t\r") -> bool:
    return any((ord(c) < 32 or 127 <= ord(c) < 160) and c not in allowed for c in shown)


class TtyText(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_text_loses_all_sequences_and_controls() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("a\tb\nc\rd é 雛 \x1b[1;31mred\x1b[0m") == "a\tb\ncd é 雛 red"
    assert printable("50 %\r60 %", should_keep_returns=True) == "50 %\r60 %"
    # A sequence without an end hides nothing of the next line.
    assert printable("\x1b]0;title\nnext") == "\nnext"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_sequence_in_two_chunks_is_removed_too(size: int) -> None:
    written: list[bytes] = []
    shown = TerminalFilter(written.append)
    content = f"{EVIL}50 %\r60 %\nwhole é\n\x1b[31".encode()
    for begin in range(0, len(content), size):
        shown.take(content[begin : begin + size])
    shown.end()
    assert b"".join(written).decode() == f"{SHOWN}50 %\r60 %\nwhole é\n[31"


def test_a_sequence_without_end_is_not_kept_in_memory() -> None:
    written: list[bytes] = []
    shown = TerminalFilter(written.append)
    shown.take(b"\x1b]0;")
    for _ in range(100):
        shown.take(b"x" * 1000)
    assert len(b"".join(written)) > 90_000


def _logs(root: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "hopsgpu.cli.main", "logs", NEW, *options]


@pytest.mark.parametrize("options", [(), ("--rank", "0")], ids=["all", "one"])
def test_logs_do_not_control_a_terminal(tmp_path: Path, options: tuple[str, ...]) -> None:
    directory = put_run(tmp_path, NEW, ranks=[])
    content = f"{EVIL}begin\n50 %\r60 %\nend\n".encode()
    (directory / "logs" / "rank-0.log").write_bytes(content)
    environ = {**os.environ, "HOPSGPU_ROOT": f"file://{tmp_path}"}
    command = _logs(tmp_path, *options)
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        assert process.wait(HANG_SECONDS) == 0
    shown = os.read(ours, 64 * 1024).decode()
    os.close(ours)
    assert "begin" in shown and "50 %\r60 %" in shown and "end" in shown
    assert not _has_controls(shown)
    piped = subprocess.run(command, stdout=subprocess.PIPE, env=environ, check=True)
    assert EVIL.encode() in piped.stdout


def test_output_of_ranks_in_a_drivers_terminal() -> None:
    terminal, file = TtyText(), io.StringIO()
    for out in (terminal, file):
        RunLines(out, out).line(0, "node1", EVIL, "next")
    assert not _has_controls(terminal.getvalue()) and terminal.getvalue().endswith("next\n")
    assert EVIL in file.getvalue()


def test_messages_of_errors() -> None:
    error = RankFailed(f"failed: {EVIL}", traceback=f"line 1\n{EVIL}", log_tail=(EVIL,))
    texts = (str(error), error.summary, str(error.traceback), *error.log_tail)
    assert not any(map(_has_controls, texts))
    assert str(ConfigError(f"a\n{EVIL}b")) == f"a\n{SHOWN}b"


def test_own_messages_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("hopsgpu", logging.INFO, "", 1, "%s", (EVIL,), None)
    _StderrHandler("info").emit(record)
    assert SHOWN in capsys.readouterr().err


def test_messages_of_sparks_jvm(capfd: pytest.CaptureFixture[str]) -> None:
    console.pass_on([f"{EVIL}\n".encode(), b"[Stage 0:>]\r\n"])
    assert capfd.readouterr().err == f"{SHOWN}\n[Stage 0:>]\r\n"


def test_commands_print_by_the_filter_alone() -> None:
    # `doctor` colours its lines, and filters what is in them.
    calls = [
        f"{file.name}:{node.lineno}"
        for file in sorted(CLI.glob("*.py"))
        if file.name not in ("output.py", "doctor.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "click.secho")
    ]
    assert calls == []
