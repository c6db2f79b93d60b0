"""Lines of source in tracebacks that come from where the sources are not."""

from __future__ import annotations

import linecache
import re

# As Python's own tracebacks have it, and as faulthandler does.
_FRAME = re.compile(r'  File "(.+)", line (\d+),? in .+')


def with_sources(traceback: str) -> str:
    """A traceback with the lines of source that it lacks, as far as they are known here.

    On a node there is no script and no notebook, of which a rank could show lines. Here they are,
    cells too: IPython has `linecache` know them.

    Args:
        traceback: as Python's module of that name formats it, or as faulthandler does.
    """
    lines = traceback.splitlines()
    shown = []
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        shown.append(line)
        frame = _FRAME.fullmatch(line)
        if frame is not None and not next_line.startswith("    "):
            source = linecache.getline(frame[1], int(frame[2])).strip()
            shown += [f"    {source}"] if source else []
    return "\n".join(shown)
