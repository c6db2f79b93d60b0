"""Texts that commands print; those of ranks and of other users do not control the terminal."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable

import click

from hopsgpu.terminal_text import OPEN_SEQUENCE, printable

# A longer sequence is not waited for; its rest is shown as text.
_MAX_SEQUENCE = 4096


def echo(text: str = "", *, is_error: bool = False, has_newline: bool = True) -> None:
    """Print a text without control characters other than newlines and tabs."""
    click.echo(printable(text), err=is_error, nl=has_newline)


class TerminalFilter:
    """Makes a log's bytes, which arrive in chunks, safe for the terminal of standard output.

    Progress bars still rewrite their lines with carriage returns.

    Args:
        write: receives the bytes that are shown.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        # The begin of a sequence that the next chunk may complete.
        self._rest = ""

    def take(self, chunk: bytes) -> None:
        text = self._rest + self._decoder.decode(chunk)
        match = OPEN_SEQUENCE.search(text, max(len(text) - _MAX_SEQUENCE, 0))
        end = len(text) if match is None else match.start()
        self._rest = text[end:]
        self._show(text[:end])

    def end(self) -> None:
        """Write what was held back for a sequence that has not ended."""
        text = self._rest + self._decoder.decode(b"", final=True)
        self._rest = ""
        self._show(text)

    def _show(self, text: str) -> None:
        safe = printable(text, should_keep_returns=True)
        # In a terminal with another encoding, bytes of UTF-8 could be control characters.
        self._write(safe.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
