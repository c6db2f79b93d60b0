"""A trial whether a container can write to the lake, before ranks train for something to store."""

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

    Whether the directory may be written is the NameNode's answer. A byte would need a DataNode too,
    and the close of its block takes half a second.

    Args:
        run_url: URL of the directory, which exists.
        seconds: how long that may take.

    Returns:
        Why ranks would be refused, for lack of credentials or permission; otherwise "". A lake that
        does not answer in time, or fails otherwise, is no reason: ranks try again, and the run may
        store nothing.
    """
    began = time.monotonic()
    # In a daemon thread: the agent's end does not wait for a DataNode that hangs.
    call = BoundedCall("hopsgpu-lake-trial", functools.partial(_write, run_url))
    try:
        problem = await asyncio.to_thread(call.result, seconds)
    except TimeoutError:
        log.warning("no answer of the lake in %.0f s, for a trial at %s", seconds, run_url)
        return ""
    except Exception as error:  # noqa: BLE001 - a trial does not end the agent, with all its ranks
        log.warning("the trial of the lake at %s failed: %r", run_url, error)
        return ""
    log.debug("tried the lake at %s in %.2f s", run_url, time.monotonic() - began)
    return problem


def _write(run_url: str) -> str:
    try:
        file = LakePath(run_url, quick=True) / f".trial-{secrets.token_hex(6)}"
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
