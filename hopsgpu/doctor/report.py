"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckState(StrEnum):
    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """The result of a check: what was seen, in one line, how to fix it, and more lines."""

    name: str
    state: CheckState
    seen: str
    fix: str = ""
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; the JSON name of `fix` is "mend"."""
        fields = asdict(self)
        fields["mend"] = fields.pop("fix")
        return {**fields, "state": self.state.value, "details": list(self.details)}


def ok(name: str, seen: str, details: Iterable[str] = ()) -> Check:
    return Check(name, CheckState.OK, seen, "", tuple(details))


def wrong(name: str, seen: str, fix: str, details: Iterable[str] = ()) -> Check:
    return Check(name, CheckState.WRONG, seen, fix, tuple(details))


def unknown(name: str, why: str, fix: str = "", details: Iterable[str] = ()) -> Check:
    return Check(name, CheckState.UNKNOWN, why, fix, tuple(details))


def join_names(names: Iterable[str], maximum: int = 8) -> str:
    """Return the first names, and how many more there are, in one line."""
    items = list(names)
    more = [f"and {len(items) - maximum} more"] if len(items) > maximum else []
    return ", ".join([*items[:maximum], *more])
