"""The errors of hopsgpu: every error that it raises on purpose is a HopsGpuError.

A message says what was passed, what is accepted, and what to do. The command line prints the
message without a traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hopsgpu import tracebacks
from hopsgpu.terminal_text import printable


class HopsGpuError(Exception):
    """The base class of hopsgpu's errors.

    Attributes:
        result: the GangResult of a failed run (timeline, ranks, gpu_seconds, and the values if only
            the publish failed), or None if no run had started.
    """

    __module__ = "hopsgpu"

    result: Any = None
    # Tracebacks also hide the frames of libraries that hopsgpu called: the message is complete.
    _hides_library_frames = True

    def __str__(self) -> str:
        # The message may quote ranks, YARN and files of other users, and is shown in terminals.
        return printable(super().__str__())

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            # Users import the errors from there.
            cls.__module__ = "hopsgpu"

    @property
    def _render_traceback_(self) -> Callable[[], list[str]]:
        """Return IPython's renderer of this error: lines of the cell, and the message.

        Raises:
            AttributeError: all frames must be shown, which IPython does by default.
        """
        if tracebacks.should_show_all():
            raise AttributeError("_render_traceback_")
        return functools.partial(tracebacks.notebook_lines, self)


class ConfigError(HopsGpuError):
    """An argument or a setting that cannot work; raised before anything starts."""


class CapacityError(HopsGpuError):
    """A request that can never fit into the cluster, the queue or the user's limit."""


class GangTimeout(HopsGpuError):
    """A gang that was incomplete, or a search without any executor, at `acquire_timeout`.

    The executors that it held were released.

    Attributes:
        granted: executors that had arrived.
        wanted: executors that the gang needs.
    """

    def __init__(self, message: str, *, granted: int, wanted: int) -> None:
        super().__init__(message)
        self.granted = granted
        self.wanted = wanted


class Cancelled(HopsGpuError):
    """The run was cancelled by `Run.cancel()`."""


class DiscoveryError(HopsGpuError):
    """The GPUs of a node could not be found, or two containers got the same GPU."""


class StoreError(HopsGpuError):
    """An error of the lake: the message says which path, what happened, and what to do.

    Attributes:
        kind: "permission", "quota", "safe mode", "absent", "exists", "unreachable", "damaged",
            "unsupported", "schema", "executor lost" or "". "schema": another version of hopsgpu
            wrote the file. "executor lost": files of its ranks were not uploaded yet. "": any other
            error.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class ClusterError(HopsGpuError):
    """The development cluster could not be started, read or stopped."""


class RankFailed(HopsGpuError):
    """The first failure in a gang, by time.

    Attributes:
        rank: global rank that failed first; None if a whole container was lost.
        host: the node on which it ran.
        container: YARN's container id.
        gpus: UUIDs of its GPUs.
        exit_code: exit code of the process; None after a signal, or if it has not exited.
        signal: name of the signal that killed it ("SIGKILL"), or None.
        traceback: the user's traceback as text, or None.
        log_tail: the last lines of the rank's log.
        log_url: URL of the whole log on the lake.
        summary: what failed, in one line without the place, as "ValueError: bad batch".
    """

    def __init__(
        self,
        message: str,
        *,
        summary: str = "",
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
        self.traceback = None if traceback is None else printable(traceback)
        self.log_tail = tuple(map(printable, log_tail))
        self.log_url = log_url
        self.summary = printable(summary or message.partition("\n")[0])


class RunTimeout(RankFailed):
    """Ranks that had not returned within `run_timeout`; all ranks were stopped."""


class GpusIdle(RankFailed):
    """All GPUs of a gang idled for `gpu_idle_timeout` while its function ran, which ended the run.

    Attributes:
        seconds: how long they idled.
    """

    def __init__(self, message: str, *, seconds: float, **first: Any) -> None:
        # `first`: attributes of RankFailed, of the first rank that was still running.
        super().__init__(message, **first)
        self.seconds = seconds
