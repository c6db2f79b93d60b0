"""The live display of a score: what it shows, in a terminal, in a notebook's cell, and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.core import html
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_losses import largest_loss
from hopsgpu.core.html import Html
from hopsgpu.core.scores import ScoreOutcome, ScoreStatus
from hopsgpu.display import phrases
from hopsgpu.display import score_phrases as say
from hopsgpu.display.cards import known_facts, timeline, warning_lines
from hopsgpu.display.cell import below, folded_log, heading
from hopsgpu.display.picture import Log
from hopsgpu.display.status_scene import StatusScene
from hopsgpu.display.terminal import head, packed, shown_in, tail, wrapped
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from rich.text import Text

_WHOLE_LOGS = "whole logs: `hopsgpu logs ID --worker N`"


@dataclass(frozen=True)
class ScorePicture:
    """A score at a moment.

    Attributes:
        status: status of the score.
        elapsed: seconds since its start.
        recent: the last lines of all workers.
    """

    status: ScoreStatus
    elapsed: float
    recent: Log


class ScoreScene(StatusScene[ScoreStatus]):
    """The reports of a score so far."""

    def line(self, worker: int, host: str, texts: Sequence[str]) -> None:
        """Record the last lines of a worker."""
        self._take(texts, say.label(worker, host))

    def picture(self, now: float) -> ScorePicture:
        """Return what to show."""
        return ScorePicture(*self._shown(now))


def _facts(picture: ScorePicture) -> list[str]:
    status = picture.status
    is_over = GangState(status.state).is_terminal
    here = "" if is_over or not status.most else say.held(status)
    speed = [] if is_over else [say.rate(status), say.left(status)]
    took = phrases.seconds(picture.elapsed)
    return [took, say.rows(status), *speed, say.failed(status), here]


def lines_of(picture: ScorePicture, width: int, height: int, encoding: str) -> list[Text]:
    """Return a picture as lines of a terminal.

    Args:
        picture: picture of the score.
        width: characters of a line.
        height: largest number of lines.
        encoding: the terminal's encoding; missing characters are written in ASCII.
    """
    status, shown = picture.status, shown_in(width, encoding)
    lines = head(status, [phrases.state(status.state), *_facts(picture)], shown, width)
    lines += packed(status.waiting_for.split("; "), "; ", shown, width)
    lines += wrapped(phrases.loss(status), shown, width)
    lines += tail(picture.recent, height - len(lines), _WHOLE_LOGS, shown)
    return lines[: max(height, 1)]


def summary(picture: ScorePicture) -> str:
    """Return a picture in one line, for viewers without HTML."""
    told = say.summary(picture.status)
    return f"hopsgpu {picture.status.run_id} {picture.elapsed:.1f} s: {told}"


def page(picture: ScorePicture, key: str) -> Html:
    """Return a picture as HTML.

    Args:
        picture: picture of the score.
        key: key of the display, letters and digits; it keeps unfolded parts unfolded.
    """
    status = picture.status
    parts = [
        heading(status, phrases.state(status.state), _facts(picture), status.waiting_for),
        below(phrases.loss(status)),
    ]
    if picture.recent.total:
        parts.append(folded_log(picture.recent, "log of all workers", f"{key}-all"))
        parts.append(html.element("div", _WHOLE_LOGS, style="opacity:.7"))
    return html.box(*parts)


def score_card(result: ScoreOutcome) -> str:
    """Return a card of a score's result."""
    columns = "" if result.schema is None else ", ".join(result.schema.names)
    pairs: dict[str, object] = {
        "output": result.url,
        "rows": f"{result.rows:,}",
        "columns": columns,
        "left out": count_of(len(result.failed_parts), "part") if result.failed_parts else "",
        "time": timeline(result.timeline),
        "GPU seconds": " · ".join(phrases.spent(result.gpu_seconds))
        if result.gpu_seconds.held
        else "",
        "largest loss": largest_loss(result.gpu_seconds),
    }
    return html.box(
        html.title("ScoreResult", result.run_id),
        html.facts(known_facts(pairs)),
        *warning_lines(result.warnings),
    )
