"""The choice of a display by the kind of this process, without imports."""

from __future__ import annotations

import os
import sys
from typing import Any

_DUMB = ("dumb", "unknown", "")
# Attribute of rich's stand-in for stdout while it draws.
_PROXIED = "rich_proxied_file"


def is_in_kernel() -> bool:
    """Return whether this process is a notebook's kernel."""
    return getattr(_shell(), "kernel", None) is not None


def is_in_terminal() -> bool:
    """Return whether a live display is suitable: for a script, but not at a prompt."""
    streams = (sys.stdout, sys.stderr)
    if any(stream is None or not stream.isatty() for stream in streams):
        return False
    at_prompt = hasattr(sys, "ps1") or sys.flags.interactive or _shell() is not None
    return not at_prompt and os.environ.get("TERM", "") not in _DUMB


def is_taken() -> bool:
    """Return whether another live display uses the terminal, which can have one."""
    return is_proxy(sys.stdout)


def is_proxy(stream: object) -> bool:
    """Return whether what is written to a stream is shown above a live display."""
    return hasattr(stream, _PROXIED)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    # While another thread imports IPython, the module lacks the name.
    current = getattr(ipython, "get_ipython", None)
    return None if current is None else current()
