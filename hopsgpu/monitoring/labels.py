"""Values of labels: others' names, cleaned and of a bounded number."""

from __future__ import annotations

OTHER = "other"
_LONGEST = 100


def clean(text: str) -> str:
    """Return a name as the value of a label: printable and short, because users choose it."""
    shown = text[: _LONGEST + 1]
    shown = "".join(char if char.isprintable() else "?" for char in shown)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


class BoundedNames:
    """Gives names until there are too many, and "other" for each further one, for good."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._given: set[str] = set()

    def name(self, text: str) -> str:
        name = clean(text)
        if name not in self._given:
            if len(self._given) >= self._most:
                return OTHER
            self._given.add(name)
        return name
