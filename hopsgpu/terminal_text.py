"""Text of ranks and of other users, made safe for a terminal."""

from __future__ import annotations

import re

# Sequences that a terminal acts on: colours and cursor movements (CSI); titles, links and the
# clipboard (OSC) and other strings, which may have no end; and short sequences. Each also has a
# form of 8 bits.
SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ\\`-~]"
)
# The begin of a sequence at the end of a text that goes on.
OPEN_SEQUENCE = re.compile(
    r"(?:\x1b[ -/]*|(?:\x1b\[|\x9b)[0-?]*[ -/]*"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*\x1b?)\Z"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROLS_BUT_RETURNS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def printable(text: str, *, should_keep_returns: bool = False) -> str:
    """Return a text without control characters other than newlines and tabs.

    Whole sequences are removed with what belongs to them, such as "[31m".

    Args:
        should_keep_returns: whether carriage returns stay too, with which progress bars rewrite
            their line.
    """
    controls = _CONTROLS_BUT_RETURNS if should_keep_returns else _CONTROLS
    if controls.search(text) is None:
        return text
    return controls.sub("", SEQUENCE.sub("", text))
