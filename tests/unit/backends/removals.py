"""Spark's messages about executors that have ended, without a JVM that logs them."""

from __future__ import annotations

from typing import Any


class Removals:
    def __init__(self, *messages: str) -> None:
        self.messages = list(messages)

    def drain(self) -> list[str]:
        drained, self.messages = self.messages, []
        return drained


def removals(*messages: str) -> Any:
    return Removals(*messages)
