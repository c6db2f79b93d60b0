"""The check that a run which is to be resumed is not still running."""

from __future__ import annotations

import time

from hopsgpu.artifacts.runs import RECORD
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.core.run_record import LARGEST_RECORD, parse
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.lake import LakePath


def refuse_running(run: LakePath, run_id: str, application: GangApplication, noun: str) -> None:
    """Check that no other application is still doing a run.

    Raises:
        ConfigError: another application is.
    """
    try:
        record = parse((run / RECORD).read(LARGEST_RECORD), (run / RECORD).url)
    except StoreError:  # the driver died before it wrote a record
        return
    other = record.application
    if not record.is_running(time.time()) or other == application.id:
        return
    try:
        is_running = application.is_running(other)
    except HopsGpuError:  # YARN no longer knows the application
        is_running = False
    if is_running:
        raise ConfigError(
            f"the {noun} {run_id!r} is still running in {other}: wait for its end, or cancel it"
            f" with `hopsgpu runs cancel {run_id}`"
        )
