"""How much of a rank's output is kept, and how long the rest of it is waited for."""

from __future__ import annotations

# `spark.hopsgpu.log.limit`: bytes of a log, of which the beginning and the end are kept.
LOG_LIMIT = 2**30
# After a stop, time for the output that a rank has written and its agent has not sent.
REST_SECONDS = 10.0
# Bytes that are sent even after that time: the stacks of 100 threads, which faulthandler writes.
END_BYTES = 512 * 1024


def cut_note(count: int, reason: str) -> bytes:
    """Return the line of a log in the place of the bytes that are missing there."""
    return f"hopsgpu: {count:,} bytes of the output are missing here: {reason}\n".encode()
