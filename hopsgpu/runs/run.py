"""The handle on a run, which users hold."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from hopsgpu.core.boundary import public
from hopsgpu.core.run_values import RunStatus
from hopsgpu.errors import Cancelled
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.status_board import GangBoard, StatusBoard

log = logging.getLogger(__name__)

R = TypeVar("R")

StartThread = Callable[[Callable[[], None]], None]


class Handle(Generic[R]):
    """A handle on work that another thread does: to wait for it and to cancel it."""

    def __init__(
        self,
        board: StatusBoard,
        cancelled: threading.Event,
        work: Callable[[], R],
        start_thread: StartThread,
    ) -> None:
        self._board = board
        self._cancelled = cancelled
        self._work = work
        self._finished = threading.Event()
        self._result: R | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        start_thread(self._body)

    @property
    def run_id(self) -> str:
        """The id of the run, which is also the name of its directory on the lake."""
        return self._board.run_id

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most so many seconds; return whether the run has ended."""
        return self._finished.wait(seconds)

    def cancel(self) -> None:
        """Cancel the run, in whatever state it is, so that it releases its executors.

        The method returns at once; `wait` waits for the end.
        """
        log.info("%s: cancel() was called", self.run_id)
        self._cancelled.set()

    @property
    def end(self) -> str:
        """How the run ended, in one line; read it only after the end."""
        if isinstance(self._error, Cancelled):
            how = "was cancelled"
        else:
            how = "had succeeded" if self._error is None else "had failed"
        return f"{self.run_id} {how}, and {self._board.executors_fate}"

    @public
    def result(self) -> R:
        """Wait for the end and return the result.

        Raises:
            HopsGpuError: the run failed or was cancelled; `error.result` is the partial result.
        """
        self._finished.wait()
        if self._error is not None:
            # Otherwise a second call's traceback would also show the first call.
            raise self._error.with_traceback(self._trace)
        assert self._result is not None
        return self._result

    def _body(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            # Local variables of its frames would keep connections to the lake open until a garbage
            # collection.
            traceback.clear_frames(error.__traceback__)
            self._error, self._trace = error, error.__traceback__
        finally:
            self._finished.set()


class Run(Handle[GangResult]):
    """A run that `submit` started."""

    __module__ = "hopsgpu"

    _board: GangBoard

    def status(self) -> RunStatus:
        """Return the run's status now."""
        return self._board.status()

    def __repr__(self) -> str:
        status = self.status()
        return f"<Run {status.run_id}: {status.state}, {status.elapsed:.1f} s>"

    def _repr_html_(self) -> str:
        from hopsgpu.display.cards import run_card

        return run_card(self.status())
