"""Why a run ended, in one word of a small set, for records and what counts them."""

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

    SUCCEEDED. CANCELLED: it was asked to end. INTERRUPTED: Ctrl-C, or a signal that ended the
    driver. NOT_GRANTED: its executors did not come within `acquire_timeout`, or can never come.
    REFUSED: an argument, a setting, or an executor's Python or GPUs do not fit. USER_ERROR: the
    function raised an exception, or its process exited or crashed. OUT_OF_MEMORY: a rank or its
    container had not enough memory, the host's or a GPU's. TIMEOUT: `run_timeout`. GPUS_IDLE:
    `gpu_idle_timeout`. KILLED: something other than hopsgpu killed a rank. GPU_FAILED: a GPU
    failed. PREEMPTED: YARN took an executor for another queue. EXECUTOR_LOST: an executor, its
    node or its connection was lost. NOT_STARTED: a rank could not be started, or lost its files.
    PUBLISH_FAILED: the ranks returned, and their model did not become a version. LAKE_FAILED: the
    lake refused something else. OTHER: anything else.

    LOST is never in a record: the driver ended without recording the end.
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


def reason_of_error(error: BaseException, *, publishing: bool = False) -> EndReason:
    """Return why an error ended a run, from its type.

    Args:
        error: the error.
        publishing: whether the run was publishing its model.
    """
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
        case StoreError() if not publishing:
            return EndReason.LAKE_FAILED
    return EndReason.PUBLISH_FAILED if publishing else EndReason.OTHER
