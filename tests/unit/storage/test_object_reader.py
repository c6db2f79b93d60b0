"""Reads of an object that others replace meanwhile."""

from __future__ import annotations

import io
from typing import Any

from hopsgpu.storage.object_store import _Reader


class Replaced:
    """A store whose object is another one at each request."""

    def __init__(self, *contents: bytes) -> None:
        self._contents = iter(contents)

    def range(self, path: str, start: int, end: int | None) -> bytes:
        return next(self._contents)[start:end]


def test_a_short_answer_is_the_end_of_the_object() -> None:
    """The size is that of the first object; a third one is longer than the second."""
    store: Any = Replaced(b"A" * 50, b"B" * 60)
    reader = _Reader(store, "record", 70)
    assert io.BufferedReader(reader).read(2**20) == b"A" * 50
