"""A check that a container can write to the lake, before ranks train for hours."""

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

_TIMEOUT_SECONDS = 20.0


async def check_lake_writable(run_url: str, timeout: float = _TIMEOUT_SECONDS) -> str:
    """Write and remove an empty file in a run's directory; return why that was refused, or "".

    An empty file suffices, because the NameNode decides on permission. A byte would need a DataNode
    too, and closing its block takes half a second. A timeout or another failure of the lake gives
    "": ranks try again, and the run may store nothing.
    """
    began = time.monotonic()
    # A daemon thread: the end of the agent must not wait for a DataNode that hangs.
    call = BoundedCall("hopsgpu-lake-check", functools.partial(_write, run_url))
    try:
        problem = await asyncio.to_thread(call.result, timeout)
    except TimeoutError:
        log.warning("no answer of the lake in %.0f s, for a write check at %s", timeout, run_url)
        return ""
    except Exception as error:  # noqa: BLE001 - a check must not end the agent with all its ranks
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
