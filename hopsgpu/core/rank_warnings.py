"""Warnings of a run that code in a rank writes.

The rank appends each warning to a file in its directory, and the driver adds them to the run. The
agent reads a bounded part of the file, because the user's code can write to it too.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

# The agent sets this variable to the path of the file that describes the rank.
CONTEXT_VARIABLE = "HOPSGPU_CONTEXT"
# In the rank's directory.
FILE = "warnings.jsonl"
MAX_WARNINGS = 50
_MAX_CHARACTERS = 2000
# A character takes up to 12 bytes in JSON.
_MAX_BYTES = MAX_WARNINGS * _MAX_CHARACTERS * 12


def warn_run(text: str) -> None:
    """Log a warning, and add it to the run's warnings if this process belongs to a rank.

    If the disk is full, the warning is only logged, because it must not end a training.
    """
    log.warning("%s", text)
    if context_file := os.environ.get(CONTEXT_VARIABLE):
        try:
            _append(
                Path(context_file).with_name(FILE),
                json.dumps(text[:_MAX_CHARACTERS]).encode() + b"\n",
            )
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
    """Return the first `MAX_WARNINGS` warnings in a rank's directory.

    Raises:
        OSError: the file cannot be read. A missing file means no warnings.
    """
    try:
        with (directory / FILE).open("rb") as file:
            *lines, _unfinished = file.read(_MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    return [text[:_MAX_CHARACTERS] for line in lines[:MAX_WARNINGS] if (text := _text(line))]


def _text(line: bytes) -> str:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(text, str) else ""
