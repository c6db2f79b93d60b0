"""Live displays, which a separate thread redraws a few times a second."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from hopsgpu.core.gang import GangState
from hopsgpu.core.html import Html
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.core.trials import SearchStatus, Writer
from hopsgpu.display import cell, score_screens, search_cell, search_terminal, terminal
from hopsgpu.display.base import Display, PlainLines, S, S_contra, W, W_contra
from hopsgpu.display.cell import Cell
from hopsgpu.display.nonblocking import PATIENCE_SECONDS
from hopsgpu.display.picture import Picture, Scene
from hopsgpu.display.progress import RunLines
from hopsgpu.display.score_phrases import ScoreFormatter
from hopsgpu.display.score_screens import ScorePicture, ScoreScene
from hopsgpu.display.screens import is_in_kernel, is_taken
from hopsgpu.display.search_phrases import SearchFormatter
from hopsgpu.display.search_picture import SearchPicture, SearchScene
from hopsgpu.display.terminal import Terminal

# A picture, the data of one drawing.
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)

_SECONDS = 0.25
# Seconds between drawings while only the time changes.
_QUIET_SECONDS = 1.0
# Drawing takes at most a tenth of a core from the run.
_SHARE = 0.1


class Screen(Protocol[P_contra]):
    """Shows pictures, each in place of the last one."""

    def show(self, picture: P_contra, /) -> None: ...

    def end(self, picture: P_contra, /) -> None:
        """Show the last picture, and release the screen."""

    def close(self) -> None:
        """Release the screen without a last picture; idempotent."""


OpenScreen = Callable[[contextvars.Context], Screen[P] | None]


class Stage(Protocol[S_contra, W_contra, P_co]):
    """The reports so far, in bounded memory; one thread reports, another draws."""

    @property
    def news(self) -> int:
        """Return a number that grows with every report."""

    def status(self, status: S_contra, now: float, /) -> None: ...

    def line(self, writer: W_contra, host: str, texts: Sequence[str], /) -> None: ...

    def picture(self, now: float, /) -> P_co: ...


def opener(
    page: Callable[[P, str], Html], summary: Callable[[P], str], lines: terminal.Renderer[P]
) -> OpenScreen[P]:
    """Return a function that opens the notebook's cell or the terminal.

    The function returns None if another display uses the terminal.

    Args:
        page: returns a picture as HTML, by a key of the display.
    """

    def open_screen(context: contextvars.Context) -> Screen[P] | None:
        if is_in_kernel():
            return Cell(context, page, summary)
        return None if is_taken() else Terminal(lines)

    return open_screen


class LiveDisplay(Generic[S, W, P]):
    """Shows a run, a search or a score on a screen; reporting to it is nearly free.

    Reports are stored in bounded memory. A thread draws them
    from a quarter of a second after the start. At the end, `status` waits for the last drawing, but
    at most two seconds. The same display shows a held gang again each time that it is acquired.

    Args:
        open_screen: returns the screen for the context in which the display is created, or None for
            plain lines.
        stage: stores the reports from the first status on.
    """

    def __init__(
        self,
        open_screen: OpenScreen[P],
        stage: Callable[[S, float], Stage[S, W, P]],
        lines: Callable[[], Display[S, W]],
    ) -> None:
        self._open = partial(open_screen, contextvars.copy_context())
        self._stage = stage
        self._lines = lines
        self._shown: Display[S, W] | None = None

    def status(self, status: S) -> None:
        """Record the state.

        Raises:
            Exception: an error of the screen, now or earlier.
        """
        if self._shown is None:
            opened = self._open()
            if opened is None:
                self._shown = self._lines()
            else:
                self._shown = _Showing(opened, self._stage(status, time.monotonic()))
        shown = self._shown
        if GangState(status.state).is_terminal:
            self._shown = None
        shown.status(status)

    def line(self, writer: W, host: str, *texts: str) -> None:
        if self._shown is not None:
            self._shown.line(writer, host, *texts)


class Live(LiveDisplay[RunStatus, int, Picture]):
    def __init__(self, open_screen: OpenScreen[Picture] | None = None) -> None:
        shown = opener(cell.page, cell.summary, terminal.lines_of)
        super().__init__(open_screen or shown, Scene, RunLines)


class LiveSearch(LiveDisplay[SearchStatus, Writer, SearchPicture]):
    def __init__(self, open_screen: OpenScreen[SearchPicture] | None = None) -> None:
        shown = opener(search_cell.page, search_cell.summary, search_terminal.lines_of)
        lines = partial(PlainLines, SearchFormatter())
        super().__init__(open_screen or shown, SearchScene, lines)


class LiveScore(LiveDisplay[ScoreStatus, int, ScorePicture]):
    def __init__(self, open_screen: OpenScreen[ScorePicture] | None = None) -> None:
        shown = opener(score_screens.page, score_screens.summary, score_screens.lines_of)
        lines = partial(PlainLines, ScoreFormatter())
        super().__init__(open_screen or shown, ScoreScene, lines)


class _Showing(Generic[S, W, P]):
    """One showing, from the first to the last status."""

    def __init__(self, opened: Screen[P], scene: Stage[S, W, P]) -> None:
        self._screen = opened
        self._scene = scene
        self._ended = threading.Event()
        self._over = threading.Event()
        self._problem: Exception | None = None
        threading.Thread(target=self._show, name="hopsgpu-display", daemon=True).start()

    def status(self, status: S) -> None:
        self._raise_problem()
        self._scene.status(status, time.monotonic())
        if GangState(status.state).is_terminal:
            self._ended.set()
            # A stopped terminal (Ctrl-S) draws when it continues; the run does not wait for it.
            self._over.wait(PATIENCE_SECONDS)
            self._raise_problem()

    def line(self, writer: W, host: str, *texts: str) -> None:
        self._raise_problem()
        self._scene.line(writer, host, texts)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _show(self) -> None:
        """Draw until the end; the only thread that calls the screen, which may be slow."""
        try:
            try:
                self._draw()
                self._screen.end(self._scene.picture(time.monotonic()))
            finally:
                self._screen.close()
        except Exception as error:  # noqa: BLE001 - raised by the next report
            self._problem = error
        finally:
            self._over.set()

    def _draw(self) -> None:
        wait, news, drawn = _SECONDS, -1, float("-inf")
        while not self._ended.wait(wait):
            now = time.monotonic()
            if self._scene.news == news and now - drawn < _QUIET_SECONDS:
                continue
            news, drawn, began = self._scene.news, now, time.thread_time()
            self._screen.show(self._scene.picture(now))
            # The CPU time of this thread: the screen may have delayed the thread.
            wait = max(_SECONDS, (time.thread_time() - began) / _SHARE)
