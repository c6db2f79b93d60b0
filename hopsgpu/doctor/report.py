"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The state of a check."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: name of what was checked.
        state: whether it is fine, wrong, or unknown.
        seen: what was seen, or why it is unknown, in one line.
        fix: what to do; "" for nothing.
        details: more lines, for example one per node.
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
    """Return a check that found no problem."""
    return Check(name, State.OK, seen, "", tuple(details))


def wrong(name: str, seen: str, fix: str, details: Iterable[str] = ()) -> Check:
    """Return a check that found what must be fixed."""
    return Check(name, State.WRONG, seen, fix, tuple(details))


def unknown(name: str, why: str, fix: str = "", details: Iterable[str] = ()) -> Check:
    """Return a check that could not be made, and why."""
    return Check(name, State.UNKNOWN, why, fix, tuple(details))


def join_names(names: Iterable[str], most: int = 8) -> str:
    """Return names in one line, only the first of many."""
    whole = list(names)
    more = [f"and {len(whole) - most} more"] if len(whole) > most else []
    return ", ".join([*whole[:most], *more])
