"""A display that is drawn again a few times a second, by a thread of its own."""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Callable
from typing import Protocol

from hopsgpu.display.cell import Cell
from hopsgpu.display.picture import Picture, Scene
from hopsgpu.display.terminal import Terminal
from hopsgpu.gang import GangState
from hopsgpu.outlet import PATIENCE_SECONDS
from hopsgpu.progress import Lines, Progress
from hopsgpu.results import RunStatus
from hopsgpu.screens import in_kernel, is_taken

_SECONDS = 0.25
# Where nothing is told but the time.
_QUIET_SECONDS = 1.0
# Of a core at most a tenth is drawn away from the run.
_SHARE = 0.1


class Screen(Protocol):
    """Where pictures are shown, each in place of the last one."""

    def show(self, picture: Picture) -> None:
        """Shows one."""

    def end(self, picture: Picture) -> None:
        """Shows the last one, and lets go."""

    def close(self) -> None:
        """Lets go, where there is no last one; more than once, too."""


def screen(context: contextvars.Context) -> Screen | None:
    """The notebook's cell or the terminal; None where another display has that.

    Args:
        context: of the thread that asked for the display.
    """
    if in_kernel():
        return Cell(context)
    return None if is_taken() else Terminal()


class Live:
    """Has a run shown on a screen; being told costs the run next to nothing.

    What is shown is taken over in bounded memory, and drawn by a thread from a quarter of a second
    after the run's begin to its end, when it is drawn once more, before `status` returns: unless
    the screen takes nothing for two seconds. A gang that is held is shown again by the same display
    each time that it is acquired.

    Args:
        open_screen: gives the screen, or None for plain lines; of the context in which this is
            made.
        clock: seconds.
    """

    def __init__(
        self,
        open_screen: Callable[[contextvars.Context], Screen | None] = screen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = functools.partial(open_screen, contextvars.copy_context())
        self._clock = clock
        self._shown: Progress | None = None

    def status(self, status: RunStatus) -> None:
        """Takes in how the run stands.

        Raises:
            Exception: whatever kept the screen from showing it, now or before.
        """
        if self._shown is None:
            opened = self._open()
            self._shown = Lines() if opened is None else _Shown(opened, status, self._clock)
        shown = self._shown
        if GangState(status.state).is_terminal:
            self._shown = None
        shown.status(status)

    def line(self, rank: int, host: str, *texts: str) -> None:
        """Takes in lines of a rank that has begun."""
        if self._shown is not None:
            self._shown.line(rank, host, *texts)


class _Shown:
    """A run from its first to its last status."""

    def __init__(self, opened: Screen, status: RunStatus, clock: Callable[[], float]) -> None:
        self._screen = opened
        self._clock = clock
        self._scene = Scene(status, clock())
        self._ended = threading.Event()
        self._over = threading.Event()
        self._problem: Exception | None = None
        threading.Thread(target=self._show, name="hopsgpu-display", daemon=True).start()

    def status(self, status: RunStatus) -> None:
        self._raise_problem()
        self._scene.status(status, self._clock())
        if GangState(status.state).is_terminal:
            self._ended.set()
            # A terminal that is held (Ctrl-S) shows it when it goes on, and keeps nobody until.
            self._over.wait(PATIENCE_SECONDS)
            self._raise_problem()

    def line(self, rank: int, host: str, *texts: str) -> None:
        self._raise_problem()
        self._scene.line(rank, host, texts)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _show(self) -> None:
        """The thread's body: nobody else calls the screen, which may take a picture late."""
        try:
            try:
                self._draw()
                self._screen.end(self._scene.picture(self._clock()))
            finally:
                self._screen.close()
        except Exception as error:  # noqa: BLE001 - raised where the run is told of next
            self._problem = error
        finally:
            self._over.set()

    def _draw(self) -> None:
        """Shows pictures until the end."""
        wait, news, drawn = _SECONDS, -1, float("-inf")
        while not self._ended.wait(wait):
            now = self._clock()
            if self._scene.news == news and now - drawn < _QUIET_SECONDS:
                continue
            news, drawn, began = self._scene.news, now, time.thread_time()
            self._screen.show(self._scene.picture(now))
            # Its own time, for a screen may have kept it waiting.
            wait = max(_SECONDS, (time.thread_time() - began) / _SHARE)
