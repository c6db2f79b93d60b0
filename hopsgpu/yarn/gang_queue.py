"""The queue of gangs on the lake: files on which `hopsgpu.core.queue_policy` decides."""

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
    queue_tag,
    read_line,
    stale_entries,
    turn_name,
)
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import Lake

_SHARED = 0o1777


class QueuePlace:
    """One gang's place in the queue of gangs; use `stand_in_line`, which leaves it on every path.

    All methods raise StoreError if the lake refuses. What they have done by then is remembered, so
    that the next call continues from there.

    Attributes:
        ticket: the ticket that the other gangs read.
        owner: the user, by the lake's name.
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
        """Return whether the ticket is in the queue; that of the gang with the turn is not."""
        return self._filed

    def file(self, ticket: Ticket) -> None:
        """Put the ticket into the queue, or back into it at the same place."""
        self.give_back()
        self._name = f"draft-{self.ticket.id}"
        filed = self._renew()
        self.ticket = dataclasses.replace(ticket, filed=ticket.filed or filed)
        self._filed = self._rename(self.ticket.name)

    def look(self) -> Line:
        """Return the queue as it is now; renew the gang's own file if that is due."""
        if time.monotonic() - self._renewed >= RENEW_SECONDS:
            self._renew()
        return self._line()

    def keep(self) -> bool:
        """Renew the turn if that is due; return False if other gangs thought its owner dead."""
        if self._turn is None or time.monotonic() - self._renewed < RENEW_SECONDS:
            return True
        self._renew()
        return self._line().generation <= self._turn

    def update(self, ticket: Ticket) -> None:
        """Make the ticket say something else: its bound, how often it was passed."""
        if ticket != self.ticket:
            self._rename(ticket.name)
            self.ticket = ticket

    def take(self, line: Line) -> bool:
        """Take the turn; return False if another gang was quicker.

        The ticket may then have to be filed again.
        """
        generation = line.next_generation
        self._renew()
        if not self._rename(turn_name(generation)):
            return False
        self._filed, self._turn = False, generation
        if self._line().generation > generation:
            # The queue has advanced since `line` was read: this number was passed long ago.
            self._turn = None
            self._remove()
            return False
        self._touch(asking_name(generation, self.ticket.application))
        return True

    def give_back(self) -> None:
        """Give the turn back, so that the next gang can ask."""
        if self._turn is None:
            return
        turn = self._turn
        self._rename(turn_name(turn + 1))
        self._name, self._turn = "", None
        (self._directory / asking_name(turn, self.ticket.application)).remove()

    def leave(self) -> None:
        """Leave the queue; also remove what dead applications of the same user left in it."""
        self.give_back()
        self._filed = False
        self._remove()
        if self.owner:
            for name in stale_entries(self._entries(), self.owner, self._now()):
                (self._directory / name).remove()

    def _line(self) -> Line:
        return read_line(self._entries(), self._now())

    def _entries(self) -> list[Entry]:
        statuses = self._directory.entries()
        return [Entry(status.name, status.modified, status.owner) for status in statuses]

    def _now(self) -> int:
        """Return the NameNode's time: what it said of our file, plus our clock's progress since.

        The time is in milliseconds since the epoch. It is late by what that request took, and never
        early: a slow lake does not make others look dead.
        """
        return int(time.monotonic() * 1000 + self._behind)

    def _renew(self) -> int:
        """Touch the gang's own file; return when that was, by the NameNode's clock."""
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
    """Return the directory of a queue of gangs, made for all users if it does not exist.

    It is sticky, so that nobody removes or renames another user's files.
    """
    directory = base
    for name in names:
        directory = directory / name
        directory.make()
        # If another user has just made it, that user is about to set the bits.
        with contextlib.suppress(StoreError):
            directory.share(_SHARED)
    return directory


@contextlib.contextmanager
def stand_in_line(place: QueuePlace) -> Iterator[QueuePlace]:
    """Let the place be filed while inside; leave it on every path."""
    try:
        yield place
    finally:
        with contextlib.suppress(StoreError):  # what is left behind counts for 20 s at most
            place.leave()
