"""The number of processes that the kernel killed for lack of memory, from the control group.

Source: the kernel's documentation, cgroup-v2 ("memory.events": oom_kill) and cgroup-v1/memory
("memory.oom_control": oom_kill).
"""

from __future__ import annotations

import re
from pathlib import Path

_CGROUP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(cgroup: Path = _CGROUP, root: Path = _ROOT) -> int:
    """Return the number of OOM kills in this process's control group; 0 without a memory group."""
    for line in _read(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = root / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = root / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if match := _COUNT.search(_read(file)):
            return int(match[1])
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
