"""Which runs a reader wants to see in a list. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from hopsgpu.artifacts.runs import UNREADABLE, start_in_id
from hopsgpu.core.run_record import LOST
from hopsgpu.core.usage_report import moment_of
from hopsgpu.display.run_view import RunSummary
from hopsgpu.errors import ConfigError

ACTIVE = "active"
STATES = (ACTIVE, "succeeded", "failed", "cancelled", LOST, UNREADABLE)
PERIODS = ("1h", "24h", "7d", "30d", "90d", "365d")
_TEXTS = ("user", "name", "model")
_MAX_TEXT = 100


@dataclass(frozen=True)
class RunFilter:
    """The restrictions of a list of runs; "" for none.

    Attributes:
        state: one of `STATES`.
        since: one of `PERIODS`: how long ago a run began at most.
        user: a part of the user's name.
        name: a part of the run's name or id.
        model: a part of the model's name and version.
    """

    state: str = ""
    since: str = ""
    user: str = ""
    name: str = ""
    model: str = ""

    @property
    def is_restricted(self) -> bool:
        return any(astuple(self))

    def query(self) -> dict[str, str]:
        """Return the fields of the query that `filter_of` makes this filter of."""
        return {name: text for name, text in vars(self).items() if text}

    def can_accept(self, run_id: str, now: float) -> bool:
        """Return whether a run may be accepted, as far as its id shows."""
        began = start_in_id(run_id)
        least = moment_of(self.since, "since", now) if self.since else None
        return began is None or least is None or began >= least

    def is_accepted(self, row: RunSummary) -> bool:
        if self.state and not (row.is_running if self.state == ACTIVE else row.state == self.state):
            return False
        return (
            _has(row.user, self.user)
            and _has(f"{row.run_id} {row.name}", self.name)
            and _has(row.model, self.model)
        )


def _has(text: str, part: str) -> bool:
    return part.casefold() in text.casefold()


def filter_of(query: Mapping[str, str]) -> RunFilter:
    """Return the filter that a query describes.

    Raises:
        ConfigError: the query has an unknown state or period, or a text of over 100 characters.
    """
    fields = {name: query.get(name, "").strip() for name in ("state", "since", *_TEXTS)}
    for name, choices in (("state", STATES), ("since", PERIODS)):
        if fields[name] and fields[name] not in choices:
            raise ConfigError(
                f"{name}={fields[name][:_MAX_TEXT]!r}: must be one of {', '.join(choices)}"
            )
    for name in _TEXTS:
        if len(fields[name]) > _MAX_TEXT:
            raise ConfigError(f"{name} has more than {_MAX_TEXT} characters")
    return RunFilter(**fields)
