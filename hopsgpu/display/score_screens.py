"""The live display of a score: what it shows, in a terminal and in a notebook's cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.display import score_phrases as say
from hopsgpu.display.cell import folded_logs, heading
from hopsgpu.display.picture import LogTail, StatusScene
from hopsgpu.display.subjects import status_view
from hopsgpu.display.terminal import head, line_style, tail

if TYPE_CHECKING:
    from rich.text import Text

_WHOLE_LOGS = "whole logs: `hopsgpu logs ID --worker N`"


@dataclass(frozen=True)
class ScorePicture:
    """A score at a moment.

    Attributes:
        elapsed: seconds since its start.
    """

    status: ScoreStatus
    elapsed: float
    recent: LogTail


class ScoreScene(StatusScene[ScoreStatus]):
    """The reports of a score so far."""

    def line(self, worker: int, host: str, texts: Sequence[str]) -> None:
        self._take(texts, say.label(worker, host))

    def picture(self, now: float) -> ScorePicture:
        return ScorePicture(*self._snapshot(now))


def lines_of(picture: ScorePicture, width: int, height: int, encoding: str) -> list[Text]:
    """Return a picture as lines of a terminal.

    Args:
        encoding: the terminal's encoding; missing characters are written in ASCII.
    """
    shown = line_style(width, encoding)
    lines = head(status_view(picture.status, picture.elapsed), (), shown, width)
    lines += tail(picture.recent, height - len(lines), _WHOLE_LOGS, shown)
    return lines[: max(height, 1)]


def summary(picture: ScorePicture) -> str:
    text = say.summary(picture.status)
    return f"hopsgpu {picture.status.run_id} {picture.elapsed:.1f} s: {text}"


def page(picture: ScorePicture, key: str) -> Html:
    """Return a picture as HTML."""
    return html.box(
        *heading(status_view(picture.status, picture.elapsed)),
        *folded_logs(picture.recent, "log of all workers", key, _WHOLE_LOGS),
    )
