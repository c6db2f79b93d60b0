"""The ends of the logs of an agent and its process daemon, sent when an attempt has failed."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable
from pathlib import Path

from hopsgpu.core import own_log

# The kind of the message; the driver stores the payload unchanged.
KIND = "agent-log"
_MAX_BYTES = 256 * 1024


async def send_log(send: Callable[..., Awaitable[None]], daemon_pid: int | None) -> None:
    """Send the ends of both logs; call this before the failure is reported."""
    await send(KIND, await asyncio.to_thread(_read_logs, daemon_pid))


def _read_logs(daemon_pid: int | None) -> bytes:
    directory = own_log.directory(Path("hopsgpu"))
    container = os.environ.get("CONTAINER_ID", "a container")
    files = {f"the agent of {container} on {platform.node()}": own_log.AGENT_FILE}
    if daemon_pid is not None:
        files["its process daemon"] = own_log.daemon_file(daemon_pid)
    parts = (
        f"hopsgpu: the log of {whose}:\n".encode()
        + own_log.read_last_lines(directory / name, _MAX_BYTES)
        for whose, name in files.items()
    )
    return b"".join(parts)
