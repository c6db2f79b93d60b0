"""Sources of an observation: each is asked again and again, and may hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hopsgpu.storage.timed_reads import ReadResult, TimedRead

T = TypeVar("T")


class Source(Generic[T]):
    """Something that is asked again and again, and may hang.

    As long as a question is not answered, the source is asked no other one. An answer that comes
    too late is dropped.

    Args:
        on_change: called with a line when the source no longer answers, for another reason than
            before, and when it answers again.
    """

    def __init__(self, name: str, on_change: Callable[[str], None]) -> None:
        self.name = name
        self._on_change = on_change
        self._told = ""
        self._question: TimedRead[T] | None = None

    def ask(self, look: Callable[[], T]) -> None:
        """Begin to ask; return at once."""
        if self._question is None or self._question.is_done:
            self._question = TimedRead(self.name, look)

    def answer(self, until: float) -> ReadResult[T]:
        """Wait for the answer to the last question."""
        assert self._question is not None, "it was asked"
        answer = self._question.answer(until)
        if answer is None:
            # A constant text, because each change of the text is reported.
            answer = ReadResult(None, "no answer in time", seconds=self._question.seconds_waited)
        self._note(answer.problem)
        return answer

    def no_answer(self, problem: str) -> ReadResult[T]:
        """Note why the source is not even asked."""
        self._note(problem)
        return ReadResult(None, problem)

    def _note(self, problem: str) -> None:
        if problem == self._told:
            return
        self._on_change(f"{self.name}: {problem or 'answers again'}")
        self._told = problem
