"""Displays that are drawn again a few times a second, by a thread of their own."""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hopsgpu.core.gang import GangState
from hopsgpu.core.html import Html
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.trials import SearchStatus, Writer
from hopsgpu.display import cell, search_cell, search_terminal, terminal
from hopsgpu.display.base import Display, PlainLines, S, S_contra, W, W_contra
from hopsgpu.display.cell import Cell
from hopsgpu.display.nonblocking import PATIENCE_SECONDS
from hopsgpu.display.picture import Picture, Scene
from hopsgpu.display.progress import Lines
from hopsgpu.display.screens import in_kernel, is_taken
from hopsgpu.display.search_phrases import SearchTeller
from hopsgpu.display.search_picture import SearchPicture, SearchScene
from hopsgpu.display.terminal import Terminal

# What is drawn.
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)

_SECONDS = 0.25
# Where nothing is told but the time.
_QUIET_SECONDS = 1.0
# Of a core at most a tenth is drawn away from the run.
_SHARE = 0.1


class Screen(Protocol[P_contra]):
    """Where pictures are shown, each in place of the last one."""

    def show(self, picture: P_contra, /) -> None:
        """Show one."""

    def end(self, picture: P_contra, /) -> None:
        """Show the last one, and let go."""

    def close(self) -> None:
        """Let go, where there is no last one; more than once, too."""


class Stage(Protocol[S_contra, W_contra, P_co]):
    """What has been told, in bounded memory; told by one thread, pictured by another."""

    @property
    def news(self) -> int:
        """Grows with whatever is told."""

    def status(self, status: S_contra, now: float, /) -> None:
        """Note how it stands."""

    def line(self, who: W_contra, host: str, texts: Sequence[str], /) -> None:
        """Note the last lines of a rank."""

    def picture(self, now: float, /) -> P_co:
        """Return what there is to be seen."""


def screen(
    context: contextvars.Context,
    page: Callable[[P, str], Html],
    summary: Callable[[P], str],
    lines: terminal.Drawn[P],
) -> Screen[P] | None:
    """Return the notebook's cell or the terminal; None where another display has that.

    Args:
        context: of the thread that asked for the display.
        page: a picture as HTML, by a key of the display.
        summary: a picture in a line.
        lines: a picture as lines of a terminal.
    """
    if in_kernel():
        return Cell(context, page, summary)
    return None if is_taken() else Terminal(lines)


def run_screen(context: contextvars.Context) -> Screen[Picture] | None:
    """Return where runs are shown."""
    return screen(context, cell.page, cell.summary, terminal.lines_of)


def search_screen(context: contextvars.Context) -> Screen[SearchPicture] | None:
    """Return where searches are shown."""
    return screen(context, search_cell.page, search_cell.summary, search_terminal.lines_of)


class LiveDisplay(Generic[S, W, P]):
    """Has a run or a search shown on a screen; being told costs it next to nothing.

    What is shown is taken over in bounded memory, and drawn by a thread from a quarter of a second
    after the begin to the end, when it is drawn once more, before `status` returns: unless
    the screen takes nothing for two seconds. A gang that is held is shown again by the same display
    each time that it is acquired.

    Args:
        open_screen: gives the screen, or None for plain lines; of the context in which this is
            made.
        stage: keeps what is told from a first status on.
        lines: makes the display with plain lines.
        clock: seconds.
    """

    def __init__(
        self,
        open_screen: Callable[[contextvars.Context], Screen[P] | None],
        stage: Callable[[S, float], Stage[S, W, P]],
        lines: Callable[[], Display[S, W]],
        clock: Callable[[], float],
    ) -> None:
        self._open = functools.partial(open_screen, contextvars.copy_context())
        self._stage = stage
        self._lines = lines
        self._clock = clock
        self._shown: Display[S, W] | None = None

    def status(self, status: S) -> None:
        """Take in how it stands.

        Raises:
            Exception: whatever kept the screen from showing it, now or before.
        """
        if self._shown is None:
            opened = self._open()
            if opened is None:
                self._shown = self._lines()
            else:
                self._shown = _Shown(opened, self._stage(status, self._clock()), self._clock)
        shown = self._shown
        if GangState(status.state).is_terminal:
            self._shown = None
        shown.status(status)

    def line(self, who: W, host: str, *texts: str) -> None:
        """Take in lines of a rank that has begun."""
        if self._shown is not None:
            self._shown.line(who, host, *texts)


class Live(LiveDisplay[RunStatus, int, Picture]):
    """A run's."""

    def __init__(
        self,
        open_screen: Callable[[contextvars.Context], Screen[Picture] | None] = run_screen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(open_screen, Scene, Lines, clock)


class LiveSearch(LiveDisplay[SearchStatus, Writer, SearchPicture]):
    """A search's."""

    def __init__(
        self,
        open_screen: Callable[[contextvars.Context], Screen[SearchPicture] | None] = search_screen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def lines() -> Display[SearchStatus, Writer]:
            return PlainLines(SearchTeller())

        super().__init__(open_screen, SearchScene, lines, clock)


class _Shown(Generic[S, W, P]):
    """What is shown from its first to its last status."""

    def __init__(
        self, opened: Screen[P], scene: Stage[S, W, P], clock: Callable[[], float]
    ) -> None:
        self._screen = opened
        self._clock = clock
        self._scene = scene
        self._ended = threading.Event()
        self._over = threading.Event()
        self._problem: Exception | None = None
        threading.Thread(target=self._show, name="hopsgpu-display", daemon=True).start()

    def status(self, status: S) -> None:
        self._raise_problem()
        self._scene.status(status, self._clock())
        if GangState(status.state).is_terminal:
            self._ended.set()
            # A terminal that is held (Ctrl-S) shows it when it goes on, and keeps nobody until.
            self._over.wait(PATIENCE_SECONDS)
            self._raise_problem()

    def line(self, who: W, host: str, *texts: str) -> None:
        self._raise_problem()
        self._scene.line(who, host, texts)

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
        """Show pictures until the end."""
        wait, news, drawn = _SECONDS, -1, float("-inf")
        while not self._ended.wait(wait):
            now = self._clock()
            if self._scene.news == news and now - drawn < _QUIET_SECONDS:
                continue
            news, drawn, began = self._scene.news, now, time.thread_time()
            self._screen.show(self._scene.picture(now))
            # Its own time, for a screen may have kept it waiting.
            wait = max(_SECONDS, (time.thread_time() - began) / _SHARE)
