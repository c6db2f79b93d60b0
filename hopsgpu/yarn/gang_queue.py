"""The queue of waiting gangs, on the lake: files on which `hopsgpu.core.queue_policy` decides."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator

from hopsgpu.core.queue_policy import (
    RENEW_SECONDS,
    Bound,
    Entry,
    Line,
    Ticket,
    asking_name,
    litter,
    queue_tag,
    read_line,
    turn_name,
)
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import Lake

_SHARED = 0o1777


class Place:
    """One gang's place in the line; use `stand_in_line`, which leaves it on every path.

    All methods raise StoreError where the lake refuses; what they had done by then stays known,
    so that the next call goes on from there.

    Attributes:
        ticket: what the others read.
        owner: the user, as the lake knows it.
    """

    def __init__(
        self,
        directory: Lake,
        *,
        application: str,
        executors: int,
        gpus: int,
        grows: bool = False,
    ) -> None:
        self._directory = directory
        self._name = ""
        self._filed = False
        self._turn: int | None = None
        self._behind = 0.0
        self._renewed = float("-inf")
        self.owner = ""
        self.ticket = Ticket(
            filed=0,
            id=secrets.token_hex(4),
            grows=grows,
            executors=executors,
            gpus=gpus,
            queue=queue_tag(""),
            bound=Bound.NONE,
            passed=0,
            application=application,
        )

    @property
    def is_filed(self) -> bool:
        """Whether it stands in the line; who has the turn does not."""
        return self._filed

    def file(self, ticket: Ticket) -> None:
        """Begins to stand in the line, or stands in it again at the same place."""
        self.give_back()
        self._name = f"draft-{self.ticket.id}"
        filed = self._renew()
        self.ticket = dataclasses.replace(ticket, filed=ticket.filed or filed)
        self._filed = self._rename(self.ticket.name)

    def look(self) -> Line:
        """The line as it is now; one's own file is renewed where that is due."""
        if time.monotonic() - self._renewed >= RENEW_SECONDS:
            self._renew()
        return self._line()

    def keep(self) -> bool:
        """Renews the turn where that is due; False where others had thought its owner dead."""
        if self._turn is None or time.monotonic() - self._renewed < RENEW_SECONDS:
            return True
        self._renew()
        return self._line().generation <= self._turn

    def update(self, ticket: Ticket) -> None:
        """Has the ticket say something else: its bound, how often it was passed."""
        if ticket != self.ticket:
            self._rename(ticket.name)
            self.ticket = ticket

    def take(self, line: Line) -> bool:
        """Takes the turn; False where another was quicker, and then it may have to be filed."""
        generation = line.next_generation
        self._renew()
        if not self._rename(turn_name(generation)):
            return False
        self._filed, self._turn = False, generation
        if self._line().generation > generation:
            # The line had gone on since it was looked at: this number was passed long ago.
            self._turn = None
            self._remove()
            return False
        self._touch(asking_name(generation, self.ticket.application))
        return True

    def give_back(self) -> None:
        """Lets the next one ask."""
        if self._turn is None:
            return
        turn = self._turn
        self._rename(turn_name(turn + 1))
        self._name, self._turn = "", None
        (self._directory / asking_name(turn, self.ticket.application)).remove()

    def leave(self) -> None:
        """Leaves the line; what a user's dead applications left in it goes too."""
        self.give_back()
        self._filed = False
        self._remove()
        if self.owner:
            for name in litter(self._entries(), self.owner, self._now()):
                (self._directory / name).remove()

    def _line(self) -> Line:
        return read_line(self._entries(), self._now())

    def _entries(self) -> list[Entry]:
        found = self._directory.entries()
        return [Entry(status.name, status.modified, status.owner) for status in found]

    def _now(self) -> int:
        """The name node's clock: what it said of our file, and our clock's progress since.

        Late by what the asking took, never early: others are not thought dead by a slow lake.
        """
        return int(time.monotonic() * 1000 + self._behind)

    def _renew(self) -> int:
        """Touches one's own file; when that was, by the name node's clock."""
        self._touch(self._name)
        status = (self._directory / self._name).stat()
        self.owner = status.owner
        self._renewed = time.monotonic()
        self._behind = status.modified - self._renewed * 1000
        return status.modified

    def _touch(self, name: str) -> None:
        (self._directory / name).write(b"")

    def _rename(self, name: str) -> bool:
        done = (self._directory / self._name).rename(self._directory / name)
        if done:
            self._name = name
        return done

    def _remove(self) -> None:
        if self._name:
            (self._directory / self._name).remove()
            self._name = ""


def make_line(base: Lake, *names: str) -> Lake:
    """The directory of a line, made for all users where it is not there yet.

    Sticky, so that nobody removes or renames another user's files.
    """
    directory = base
    for name in names:
        directory = directory / name
        directory.make()
        # Whoever made it a moment ago sets the bits in a moment.
        with contextlib.suppress(StoreError):
            directory.share(_SHARED)
    return directory


@contextlib.contextmanager
def stand_in_line(place: Place) -> Iterator[Place]:
    """While inside, the place may be filed; it is left on every path."""
    try:
        yield place
    finally:
        with contextlib.suppress(StoreError):  # what is left behind counts for 20 s at most
            place.leave()
