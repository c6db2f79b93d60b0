"""Why a run ended, as one of a small set of words, for records and counters."""

from __future__ import annotations

from enum import Enum

from hopsgpu.errors import (
    Cancelled,
    CapacityError,
    ConfigError,
    DiscoveryError,
    GangTimeout,
    RankFailed,
    StoreError,
)


class EndReason(Enum):
    """The reason of a run's end.

    SUCCEEDED.
    CANCELLED: the run was asked to end.
    INTERRUPTED: Ctrl-C, or a signal that ended the driver.
    NOT_GRANTED: executors did not arrive within `acquire_timeout`, or can never arrive.
    REFUSED: an argument, a setting, or an executor's Python or GPUs do not fit.
    USER_ERROR: the function raised an exception, or its process exited or crashed.
    OUT_OF_MEMORY: the host's or a GPU's memory did not suffice for a rank or its container.
    TIMEOUT: `run_timeout`.
    GPUS_IDLE: `gpu_idle_timeout`.
    KILLED: something other than hopsgpu killed a rank.
    PREEMPTED: YARN took an executor for another queue.
    EXECUTOR_LOST: an executor, its node or its connection was lost.
    NOT_STARTED: a rank could not be started, or lost its files.
    PUBLISH_FAILED: the ranks returned, and their model did not become a version.
    LAKE_FAILED: the lake refused something else.
    LOST: never in a record, because the driver ended without recording the end.
    """

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    NOT_GRANTED = "not_granted"
    REFUSED = "refused"
    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    GPUS_IDLE = "gpus_idle"
    KILLED = "killed"
    GPU_FAILED = "gpu_failed"
    PREEMPTED = "preempted"
    EXECUTOR_LOST = "executor_lost"
    NOT_STARTED = "not_started"
    PUBLISH_FAILED = "publish_failed"
    LAKE_FAILED = "lake_failed"
    OTHER = "other"
    LOST = "lost"


def reason_of_error(error: BaseException, *, is_publishing: bool = False) -> EndReason:
    if not isinstance(error, Exception):
        return EndReason.INTERRUPTED
    match error:
        case Cancelled():
            return EndReason.CANCELLED
        case GangTimeout() | CapacityError():
            return EndReason.NOT_GRANTED
        case ConfigError() | DiscoveryError():
            return EndReason.REFUSED
        case RankFailed():
            return EndReason.USER_ERROR
        case StoreError() if not is_publishing:
            return EndReason.LAKE_FAILED
    return EndReason.PUBLISH_FAILED if is_publishing else EndReason.OTHER
