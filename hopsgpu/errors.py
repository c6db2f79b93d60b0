"""The error tree: everything hopsgpu raises on purpose is a HopsGpuError.

A message says what was given, what is accepted, and what to do. The command line prints it
as it is, without a traceback of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hopsgpu import tracebacks


class HopsGpuError(Exception):
    """The root of hopsgpu's errors.

    Attributes:
        result: the GangResult that a failed run leaves (timeline, ranks, gpu_seconds, values of
            a run whose publish failed), or None where no run had begun.
    """

    __module__ = "hopsgpu"

    result: Any = None
    # Its message says all: tracebacks leave out the frames of libraries below it.
    _hides_library_frames = True

    @property
    def _render_traceback_(self) -> Callable[[], list[str]]:
        """What IPython asks an exception for, to show it: here lines of the cell and the message.

        Raises:
            AttributeError: hopsgpu's own frames are to be shown; IPython does that itself.
        """
        if tracebacks.shows_all():
            raise AttributeError("_render_traceback_")
        return functools.partial(tracebacks.in_notebook, self)


class ConfigError(HopsGpuError):
    """An argument or a setting that cannot work; raised before anything is started."""

    __module__ = "hopsgpu"


class CapacityError(HopsGpuError):
    """What was asked for can never fit on the cluster, in the queue or under the user's limit."""

    __module__ = "hopsgpu"


class GangTimeout(HopsGpuError):
    """The gang was not whole before `acquire_timeout`, or no executor of a search had come; what
    was held was let go.

    Attributes:
        granted: executors that had come.
        wanted: executors the gang needs.
    """

    __module__ = "hopsgpu"

    def __init__(self, message: str, *, granted: int, wanted: int) -> None:
        super().__init__(message)
        self.granted = granted
        self.wanted = wanted


class Cancelled(HopsGpuError):
    """The run was cancelled by `Run.cancel()`."""

    __module__ = "hopsgpu"


class DiscoveryError(HopsGpuError):
    """The GPUs of a node could not be found, or two containers were given the same one."""

    __module__ = "hopsgpu"


class StoreError(HopsGpuError):
    """The lake refused or lost something: which path, what happened, what to do.

    Attributes:
        kind: "permission", "quota", "safe mode", "absent", "exists", "unreachable", "damaged",
            "unsupported", "schema" of what another version of hopsgpu wrote, or "" for what is none
            of them.
    """

    __module__ = "hopsgpu"

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class ClusterError(HopsGpuError):
    """The development cluster could not be started, read or stopped."""

    __module__ = "hopsgpu"


class RankFailed(HopsGpuError):
    """The first failure of a gang, by time.

    Attributes:
        rank: global rank that failed first; None where a whole container was lost.
        host: the node it ran on.
        container: YARN's container id.
        gpus: UUIDs of the GPUs it had.
        exit_code: of the process, None when it was ended by a signal or never ended.
        signal: name of the signal that ended it ("SIGKILL"), or None.
        traceback: the user's traceback as text, or None.
        log_tail: the last lines of the rank's log.
        log_url: where the whole log is on the lake.
    """

    __module__ = "hopsgpu"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        container: str | None = None,
        gpus: tuple[str, ...] = (),
        exit_code: int | None = None,
        signal: str | None = None,
        traceback: str | None = None,
        log_tail: tuple[str, ...] = (),
        log_url: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.container = container
        self.gpus = gpus
        self.exit_code = exit_code
        self.signal = signal
        self.traceback = traceback
        self.log_tail = log_tail
        self.log_url = log_url
