"""How a child reports to its fork server that it is set up."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable

from hopsgpu.agent.json_lines import error_fields

# The server serves no other request during a child's setup, which takes milliseconds, or seconds on
# a node that is a hundred times slower.
SET_UP_SECONDS = 40.0
_READ_BYTES = 64 * 1024


def set_up(prepare: Callable[[], None], body: Callable[[], int], report: int) -> int:
    """Set this child up and run its body.

    Args:
        report: descriptor to the server; closed after the setup, and before that gets any error.
    """
    try:
        prepare()
    except BaseException as error:
        os.write(report, json.dumps(error_fields(error)).encode())
        raise
    os.close(report)
    return body()


def read_report(descriptor: int) -> bytes | None:
    """Return the error of a child's setup (JSON; b"" for none), or None if it takes too long."""
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
    parts = []
    while part := os.read(descriptor, _READ_BYTES):
        parts.append(part)
    return b"".join(parts)
