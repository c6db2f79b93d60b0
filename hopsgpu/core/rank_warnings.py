"""Warnings that code in a rank leaves for its run.

The rank appends each warning to a file in its directory. The rank's agent sends the warnings to the
driver, which adds them to the run. The file's length is bounded where the agent reads it, because
the user's code can write to the file too.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

# Names the file that describes the rank; set by the rank's agent.
CONTEXT_VARIABLE = "HOPSGPU_CONTEXT"
# The file's name in the rank's directory.
FILE = "warnings.jsonl"
MAX_WARNINGS = 50
_LONGEST = 2000
# Bytes of the file that are read. A character takes up to 12 bytes in JSON.
_MOST_BYTES = MAX_WARNINGS * _LONGEST * 12


def warn_run(text: str) -> None:
    """Log a warning, and add it to the warnings of the run if this process belongs to a rank.

    If the node's disk is full, the warning is only logged: a warning must not end a training.
    """
    log.warning("%s", text)
    if described := os.environ.get(CONTEXT_VARIABLE):
        try:
            _append(Path(described).with_name(FILE), json.dumps(text[:_LONGEST]).encode() + b"\n")
        except OSError as error:
            log.warning("the warning could not be added to those of the run: %s", error)


def _append(file: Path, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read_warnings(directory: Path) -> list[str]:
    """Return the first warnings that a rank has left, at most `MAX_WARNINGS`.

    Args:
        directory: the rank's.

    Raises:
        OSError: the file cannot be read. A missing file means no warnings.
    """
    try:
        with (directory / FILE).open("rb") as file:
            *lines, _unfinished = file.read(_MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    return [text[:_LONGEST] for line in lines[:MAX_WARNINGS] if (text := _text(line))]


def _text(line: bytes) -> str:
    """Return the text of a line; "" if the line is not a warning."""
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(text, str) else ""
