"""The protocol between a fork server and its child until the child is set up."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable

from hopsgpu.agent.json_lines import error_fields

# The server serves no other request during a child's setup.
SET_UP_SECONDS = 10.0
_READ_BYTES = 64 * 1024


def set_up(prepare: Callable[[], None], body: Callable[[], int], report: int) -> int:
    """Set this child up and run its body; report errors during the setup to the server.

    Args:
        report: descriptor to the server; closed at the end of the setup, which means success.
    """
    try:
        prepare()
    except BaseException as error:
        os.write(report, json.dumps(error_fields(error)).encode())
        raise
    os.close(report)
    return body()


def read_report(descriptor: int) -> bytes | None:
    """Return the output of a child's setup, or None if the setup takes too long."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    parts: list[bytes] = []
    while poll.poll(SET_UP_SECONDS * 1000):
        part = os.read(descriptor, _READ_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def read_all(descriptor: int) -> bytes:
    """Read until the other end is closed."""
    parts = []
    while part := os.read(descriptor, _READ_BYTES):
        parts.append(part)
    return b"".join(parts)
