"""The queue of gangs on the lake: files on which `hopsgpu.core.queue_policy` decides."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from hopsgpu.core.queue_policy import (
    Bound,
    Candidate,
    Entry,
    Offer,
    QueueSnapshot,
    Ticket,
    TurnDecision,
    asking_name,
    count_passes,
    decide_turn,
    executors_to_give,
    queue_tag,
    read_line,
    renewal_seconds,
    stale_entries,
    turn_name,
)
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, LakePath

_SHARED = 0o1777
# All users may make directories beside those of the partitions.
_MOST_PARTITIONS = 100
# For how long a time that a reader saw counts: a clock may be set back.
_REMEMBERED_SECONDS = 120.0


class QueuePlace:
    """One gang's place in the queue of gangs; use `queued`, which leaves it on every path.

    All methods raise StoreError if the lake refuses. What they have done by then is remembered, so
    that the next call continues from there.

    Args:
        directory: directory of the queue.
        application: YARN's id.
        executors: number of executors that the gang needs.
        gpus: GPUs of each executor.
        grows: whether it belongs to a search that would like more executors.
        clock: returns the time in seconds.

    Attributes:
        ticket: the ticket that the other gangs read.
        owner: the user, by the lake's name.
    """

    def __init__(
        self,
        directory: LakePath,
        *,
        application: str,
        executors: int,
        gpus: int,
        grows: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._seen: QueueSnapshot | None = None
        self._rank = 0
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

    @property
    def rank(self) -> int:
        """Return the gang's rank when it last looked; it says when the next look is due."""
        return self._rank

    @property
    def seen(self) -> QueueSnapshot | None:
        """Return the queue when the gang last asked for the turn; None if it has not yet."""
        return self._seen

    def ask(
        self,
        bound: Bound,
        queue: str,
        queues: tuple[str, ...],
        node_gpus: Sequence[int],
        probe: bool,
    ) -> TurnDecision:
        """Look at the queue, file the ticket or bring it up to date, and take the turn if it may.

        Args:
            bound: the limit that keeps the gang from being granted now.
            queue: short name of the YARN queue whose limit that is, else of the gang's own.
            queues: short names of its queue and of all parents of that queue, its own first.
            node_gpus: number of all GPUs of each node, used or not.
            probe: whether to ask although the gang does not seem to fit.

        Returns:
            The decision; its `take` says whether the gang has the turn now.
        """
        ticket = dataclasses.replace(self.ticket, bound=bound, queue=queue)
        if not self._filed:
            self.file(ticket)
        line = self._current()
        ticket = dataclasses.replace(ticket, filed=self.ticket.filed)
        self.update(count_passes(ticket, self._seen or line, line))
        self._seen = line
        self._find_rank(line)
        turn = decide_turn(Candidate(self.ticket, self.owner, queues), line, node_gpus, probe)
        if turn.take and not self.take(line):
            return TurnDecision(False, "another gang took the turn first")
        return turn

    def file(self, ticket: Ticket) -> None:
        """Put the ticket into the queue, or back into it at the same place."""
        self.give_back()
        # Its own turns do not count as other gangs that passed it.
        self._seen = None
        self._name = f"draft-{self.ticket.id}"
        self._renew()
        status = (self._directory / self._name).stat()
        self._note(status.modified, status.owner)
        self.ticket = dataclasses.replace(ticket, filed=ticket.filed or status.modified)
        self._filed = self._rename(self.ticket.name)

    def look(self) -> QueueSnapshot:
        """Return the queue as it is now; renew the gang's own file if that is due."""
        line = self._current()
        self._find_rank(line)
        return line

    def keep(self) -> bool:
        """Renew the turn if that is due; return False if other gangs thought its owner dead."""
        if self._turn is None or not self._is_due(0):
            return True
        self._renew()
        return self._line().generation <= self._turn

    def update(self, ticket: Ticket) -> None:
        """Make the ticket say something else: its bound, how often it was passed."""
        if ticket != self.ticket:
            self._rename(ticket.name)
            self.ticket = ticket

    def take(self, line: QueueSnapshot) -> bool:
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
        self.ticket = dataclasses.replace(self.ticket, turns=self.ticket.turns + 1)
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

    def _current(self) -> QueueSnapshot:
        """Return the queue in which the gang's ticket is; renew the ticket before if that is due.

        The ticket's file may be missing: when the gang came so far to the front at once that its
        ticket did not count for a while, another gang of the same user may have removed it.
        """
        if self._is_due(self._rank):
            self._renew()
        entries = self._entries()
        if self._filed and all(entry.name != self._name for entry in entries):
            self._renew()
        return read_line(entries, self._now())

    def _find_rank(self, line: QueueSnapshot) -> None:
        """Note the rank; renew the ticket if that is due because the rank is another one now."""
        self._rank = line.rank_of(self.ticket, self.owner)
        if self._is_due(self._rank):
            self._renew()

    def _line(self) -> QueueSnapshot:
        return read_line(self._entries(), self._now())

    def _entries(self) -> list[Entry]:
        """Return all files; note what the gang's own says of the NameNode's clock."""
        statuses = self._directory.entries()
        for status in statuses:
            if status.name == self._name:
                self._note(status.modified, status.owner)
        return [Entry(status.name, status.modified, status.owner) for status in statuses]

    def _note(self, modified: int, owner: str) -> None:
        self.owner = owner
        self._behind = modified - self._renewed * 1000

    def _now(self) -> int:
        """Return the NameNode's time: what it said of our file, plus our clock's progress since.

        The time is in milliseconds since the epoch. It is late by what that request took, and never
        early: a slow lake does not make others look dead.
        """
        return int(self._clock() * 1000 + self._behind)

    def _is_due(self, rank: int) -> bool:
        return self._clock() - self._renewed >= renewal_seconds(rank)

    def _renew(self) -> None:
        """Touch the gang's own file; the next listing says when, by the NameNode's clock."""
        self._touch(self._name)
        self._renewed = self._clock()

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


class StandingOffer:
    """An elastic gang's offer in the queue of gangs, renewed as long as it stands.

    All methods raise StoreError if the lake refuses.

    Args:
        directory: directory of the queue.
        application: YARN's id.
        gpus: GPUs of each executor.
        run: name of the run.
    """

    def __init__(self, directory: LakePath, *, application: str, gpus: int, run: str) -> None:
        self._directory = directory
        self._name = ""
        self._offer = Offer(secrets.token_hex(4), 0, gpus, 0, queue_tag(""), application, run)

    def needed(self, executors: int, giving: int, queues: Sequence[str], free: int) -> int:
        """Put up the offer, or renew it; return how many executors waiting gangs need of it.

        Args:
            executors: number of executors above the gang's minimum.
            giving: how many of them it gives back at its next checkpoint.
            queues: short names of its queue and of all parents of that queue, its own first.
            free: number of free GPUs of the cluster.
        """
        offer = dataclasses.replace(
            self._offer, executors=executors, giving=giving, queue=queues[0]
        )
        renewed, self._name, before = self._directory / offer.name, offer.name, self._name
        renewed.write(b"")
        if before not in ("", offer.name):
            (self._directory / before).remove()
        status = renewed.stat()
        entries = [Entry(s.name, s.modified, s.owner) for s in self._directory.entries()]
        line = read_line(entries, status.modified)
        return executors_to_give(offer, status.owner, queues, line, free)

    def withdraw(self) -> None:
        """Remove the offer."""
        if self._name:
            (self._directory / self._name).remove()
            self._name = ""


class GangQueueReader:
    """Reads the queues of gangs of a cluster, without taking part in them.

    A reader touches no file, so it knows the NameNode's clock only from what others do: whenever a
    file of a queue is renewed, the NameNode dates the queue's directory. Its clock is at least the
    newest such time that was seen in the last minutes, and goes on since. A gang that is gone may
    therefore count for longer while a reader is new, and later does not. The files' own times say
    nothing about the clock: their owners may set them to any.

    Args:
        directory: the directory that has one for each cluster partition.
        clock: returns the time in seconds.
        wall_clock: returns the time in seconds since the epoch, which is the clock of a local
            directory.
    """

    def __init__(
        self,
        directory: LakePath,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._wall_clock = wall_clock
        # By partition and the clock's reading: the NameNode's time was at least that with this
        # added, in ms.
        self._ahead: dict[str, deque[tuple[float, float]]] = defaultdict(deque)

    def look(self) -> tuple[Mapping[str, tuple[QueueSnapshot, int]], Sequence[str]]:
        """Return the queues by partition, and which directories are kept from the reader.

        Each queue comes with the NameNode's time in milliseconds. Without a directory there is
        none: no gang has waited yet.

        Raises:
            StoreError: the lake refused.
        """
        lines: dict[str, tuple[QueueSnapshot, int]] = {}
        problems = []
        for name, modified in self._partitions():
            try:
                entries = self._entries(name)
            except StoreError as error:
                if error.kind == PERMISSION:
                    problems.append(str(error))
                elif error.kind != ABSENT:  # it was removed since it was listed
                    raise
                continue
            there = self._there(name, modified)
            lines[name] = read_line(entries, there), there
        for name in self._ahead.keys() - lines.keys():
            del self._ahead[name]
        return lines, problems

    def _partitions(self) -> list[tuple[str, int]]:
        """Return the name of each queue's directory, and when it was last changed, in ms."""
        try:
            entries = self._directory.entries()
        except StoreError as error:
            if error.kind == ABSENT:
                return []
            raise
        # Anybody may create directories there; such a name is no partition's.
        found = sorted(
            (e.name, e.modified)
            for e in entries
            if e.is_directory and not UNSAFE_CHARACTERS.search(e.name)
        )
        return found[:_MOST_PARTITIONS]

    def _there(self, partition: str, modified: int) -> int:
        """Return the time of the file system in milliseconds.

        Args:
            partition: name of a queue's directory; anybody may have made one and set its time, so
                each has a clock of its own.
            modified: when it was last changed.
        """
        now = self._clock() * 1000
        # Renewing a file changes no local directory.
        seen = self._wall_clock() * 1000 if self._directory.is_local else modified
        ahead = self._ahead[partition]
        ahead.append((now, seen - now))
        while ahead[0][0] < now - _REMEMBERED_SECONDS * 1000:
            ahead.popleft()
        return int(now + max(one for _, one in ahead))

    def _entries(self, partition: str) -> list[Entry]:
        """Return the files of a partition."""
        statuses = (self._directory / partition).entries()
        return [Entry(status.name, status.modified, status.owner) for status in statuses]


def make_line(base: LakePath, *names: str) -> LakePath:
    """Return the directory of a queue of gangs, made for all users if it does not exist.

    It is sticky, so that nobody removes or renames another user's files.
    """
    directory = base
    for name in names:
        directory = directory / name
        directory.make()
        # If another user has just made it, that user is about to set the bits.
        with contextlib.suppress(StoreError):
            directory.set_mode(_SHARED)
    return directory


@contextlib.contextmanager
def queued(place: QueuePlace) -> Iterator[QueuePlace]:
    """Let the place be filed while inside; leave it on every path."""
    try:
        yield place
    finally:
        with contextlib.suppress(StoreError):  # what is left behind counts for its lease at most
            place.leave()
