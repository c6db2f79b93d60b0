"""What `hopsgpu runs show` tells of a score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hopsgpu.cli.tables import Fact
from hopsgpu.display.score_phrases import recorded
from hopsgpu.storage.error_messages import JSON_ERRORS


def score_facts(score: Any, *, is_running: bool) -> list[Fact]:
    """Return the facts.

    Args:
        score: `score` of the record.
        is_running: whether the score goes on.
    """
    try:
        return list(_facts(score, is_running))
    except JSON_ERRORS as error:
        odd = f"another version of hopsgpu wrote its parts ({error!r}); --json shows them"
        return [Fact("score", odd, "yellow")]


def _facts(score: Any, is_running: bool) -> Iterator[Fact]:
    for name, text in recorded(score, is_running=is_running):
        is_there = name == "output" and score["is_complete"]
        yield Fact(name, text, "green" if is_there else "red" if name == "failed" else "")
    for part in score["failed_parts"]:
        yield Fact("left out", str(part["place"]), "red")
