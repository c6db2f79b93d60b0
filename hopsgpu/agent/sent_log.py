"""What an agent sends of its own log and its process daemon's, when an attempt has failed."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable
from pathlib import Path

from hopsgpu.core import own_log

# The kind of the message; the driver keeps its payload as it is.
KIND = "agent-log"
_MOST = 256 * 1024


async def send_log(tell: Callable[..., Awaitable[None]], daemon: int | None) -> None:
    """Sends the end of both logs, before the message by which the driver hears of the failure.

    Args:
        tell: sends a message: kind, payload.
        daemon: pid of the process daemon, None where there is none.
    """
    await tell(KIND, await asyncio.to_thread(_both, daemon))


def _both(daemon: int | None) -> bytes:
    directory = own_log.directory(Path("hopsgpu"))
    container = os.environ.get("CONTAINER_ID", "a container")
    files = {f"the agent of {container} on {platform.node()}": own_log.AGENT}
    if daemon is not None:
        files["its process daemon"] = own_log.daemon_file(daemon)
    parts = (
        f"hopsgpu: the log of {whose}:\n".encode() + own_log.last_of(directory / name, _MOST)
        for whose, name in files.items()
    )
    return b"".join(parts)
