"""Checks that a container can write to the lake, before ranks train for something to store."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time

from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.error_messages import PERMISSION
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

_SECONDS = 20.0


async def try_to_write(run_url: str, seconds: float = _SECONDS) -> str:
    """Write and remove an empty file in a run's directory.

    The NameNode decides on the permission. A file with content would need a DataNode too, and
    closing its block takes half a second.

    Args:
        run_url: URL of the directory, which exists.
        seconds: timeout.

    Returns:
        Why ranks would be refused, for lack of credentials or permission; otherwise "". A lake that
        does not answer in time, or fails otherwise, is no reason: ranks retry, and the run may
        store nothing.
    """
    began = time.monotonic()
    # A daemon thread: the exit of the agent does not wait for a lake that hangs.
    call = BoundedCall("hopsgpu-lake-write-check", functools.partial(_write, run_url))
    try:
        problem = await asyncio.to_thread(call.result, seconds)
    except TimeoutError:
        log.warning("the lake did not answer a write to %s in %.0f s", run_url, seconds)
        return ""
    except Exception as error:  # noqa: BLE001 - a failed check must not end the agent and its ranks
        log.warning("the write check of the lake at %s failed: %r", run_url, error)
        return ""
    log.debug("checked the lake at %s in %.2f s", run_url, time.monotonic() - began)
    return problem


def _write(run_url: str) -> str:
    try:
        file = LakePath(run_url, should_fail_fast=True) / f".write-check-{secrets.token_hex(6)}"
        try:
            file.write(b"")
        finally:
            file.remove()
    except StoreError as error:
        log.info("cannot write to %s: %s", run_url, error)
        refused = error.kind == PERMISSION
        return f"this container cannot write to the lake: {error}" if refused else ""
    except HopsGpuError as error:
        log.info("cannot write to %s: %s", run_url, error)
    return ""
