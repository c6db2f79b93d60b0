"""A terminal of 80 columns, which a test types into and reads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.conftest import until

COLUMNS, ROWS = 80, 45
_PROMPT = "$ "


class Terminal:
    """A shell in tmux, as a context manager that ends both.

    Args:
        directory: where the shell starts; tmux has its socket there.
        environ: the shell's environment.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self._tmux = ["tmux", "-f", "/dev/null", "-S", str(directory / "tmux")]
        self._directory = directory
        self._environ = {**environ, "PS1": _PROMPT, "TERM": "screen-256color"}

    def __enter__(self) -> Terminal:
        command = ["new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "env", "-u", "COLUMNS"]
        subprocess.run(
            [*self._tmux, *command, "bash", "--norc", "--noprofile"],
            check=True,
            env=self._environ,
            cwd=self._directory,
        )
        self.wait_for(r"\A\$")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ask("kill-server")

    def _ask(self, *command: str) -> str:
        done = subprocess.run(
            [*self._tmux, *command], check=True, capture_output=True, text=True, env=self._environ
        )
        return done.stdout

    def screen(self) -> str:
        """Return what was printed since the screen was cleared; lines are not wrapped."""
        lines = self._ask("capture-pane", "-p", "-J", "-S", "-").splitlines()
        return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"

    def wait_for(self, pattern: str) -> str:
        """Return the screen once it has a match of a pattern."""
        shown = ""

        def has_match() -> bool:
            nonlocal shown
            shown = self.screen()
            return re.search(pattern, shown, re.MULTILINE) is not None

        assert until(has_match), f"no {pattern!r} in:\n{shown}"
        return shown

    def type(self, command: str) -> None:
        """Clear the screen and start a command."""
        self._ask("send-keys", "-R", "C-l")
        self._ask("clear-history")
        self._ask("send-keys", "-l", command)
        self._ask("send-keys", "Enter")

    def run(self, command: str) -> str:
        """Return the screen after a command that has ended."""
        self.type(command)
        # The second prompt is below the command's output.
        prompt = re.escape(_PROMPT.strip())
        shown = self.wait_for(rf"(?s)\A{prompt}.*^{prompt}\s*\Z")
        return shown[: shown.rindex(_PROMPT.strip())].rstrip() + "\n"

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._ask("send-keys", "C-c")
