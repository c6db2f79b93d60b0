"""Parts of logs for pages: a page has a bounded part, however large the log is."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.core.html import plain_line
from hopsgpu.storage.lake import LakePath

# Bytes of a log file on a page, about a thousand lines.
MAX_BYTES = 128 * 1024
_LONGEST_LINE = 2000


@dataclass(frozen=True)
class LogPart:
    """A part of a log.

    Attributes:
        text: whole lines without control characters; the end of a line that is too long is left
            out.
        begin: offset of its first byte.
        end: offset behind its last byte.
    """

    text: str
    begin: int
    end: int
    size: int

    @property
    def earlier(self) -> int | None:
        """Return where the part before this one begins; None if this is the first."""
        return None if self.begin == 0 else max(self.begin - MAX_BYTES, 0)


def read_part(file: LakePath, size: int, begin: int | None, *, can_grow: bool) -> LogPart:
    """Return a part of a log: whole lines, or a part of a line that is longer than a page.

    Args:
        begin: offset from which to read; None for the end of the log.
        can_grow: whether the log may grow; then its last line counts once it has its end.

    Raises:
        StoreError: the lake refused.
    """
    at = max(size - MAX_BYTES, 0) if begin is None else min(max(begin, 0), size)
    if at >= size:
        return LogPart("", size, size, size)
    with file.open() as source:
        source.seek(at)
        content = source.read(min(MAX_BYTES, size - at))
    if begin is None and at:
        # Begin with the next whole line.
        first = content.find(b"\n") + 1
        at, content = at + first, content[first:]
    end = at + len(content)
    if end < size or can_grow:
        # The next part begins after the last whole line.
        complete = content.rfind(b"\n") + 1
        if complete or len(content) < MAX_BYTES:
            end, content = at + complete, content[:complete]
    return LogPart(_readable(content), at, end, size)


def _readable(content: bytes) -> str:
    lines = content.decode(errors="replace").split("\n")
    # A progress bar writes its line again and again; a terminal shows the last of them.
    last = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return "\n".join(plain_line(line, _LONGEST_LINE) for line in last)
