"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: of what was looked at.
        state: whether it is fine, is not, or could not be found out.
        seen: what was seen, or why it could not be, in a line.
        fix: which setting to change to what; "" where nothing is to be done.
        details: more lines, a node each for one.
    """

    name: str
    state: State
    seen: str
    fix: str = ""
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values; what to do is under "mend", as programs know it."""
        fields = asdict(self)
        fields["mend"] = fields.pop("fix")
        return {**fields, "state": self.state.value, "details": list(self.details)}


def ok(name: str, seen: str, details: Iterable[str] = ()) -> Check:
    """Return a check that found all well."""
    return Check(name, State.OK, seen, "", tuple(details))


def wrong(name: str, seen: str, fix: str, details: Iterable[str] = ()) -> Check:
    """Return a check that found what must be fixed."""
    return Check(name, State.WRONG, seen, fix, tuple(details))


def unknown(name: str, why: str, fix: str = "", details: Iterable[str] = ()) -> Check:
    """Return what could not be checked, and why."""
    return Check(name, State.UNKNOWN, why, fix, tuple(details))


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names in a line, the first of many."""
    whole = list(names)
    more = [f"and {len(whole) - most} more"] if len(whole) > most else []
    return ", ".join([*whole[:most], *more])
