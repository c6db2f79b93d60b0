"""Whose turn it is to ask YARN for a gang's executors: names of files go in, decisions come out.

Gangs that wait stand in one line per cluster partition, across applications and users. The line
is a directory on the lake that holds only empty files:

    ticket-FILED-ID-KIND-SIZE-QUEUE-BOUND-PASSED-APPLICATION    a gang that waits
    turn-GENERATION                                            odd: someone asks; even: free
    asking-GENERATION-APPLICATION                              who

A turn is taken and given back by strict renames of one's own file to the next generation's name,
of which only one can succeed. The highest generation counts and is never removed, so that no
number is used twice. A file that its owner has not renewed for `LEASE_SECONDS`, by the name
node's clock alone, does not count: whoever crashed stops nobody.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from hopsgpu.units import counted

LEASE_SECONDS = 20.0
RENEW_SECONDS = 4.0
# How often one gang may be passed by later ones that fit beside it.
MOST_PASSES = 3

_TICKET = re.compile(
    r"ticket-(\d{15})-([0-9a-f]{8})-(gang|grow)-(\d+)x(\d+)-([0-9a-f]{8})-([a-z]+)-(\d+)-(\w+)"
)
_TURN = re.compile(r"turn-(\d{12})")
_DRAFT = re.compile(r"draft-[0-9a-f]{8}")
_ASKING = re.compile(r"asking-(\d{12})-(\w+)")


class Bound(Enum):
    """What keeps a gang from being granted now."""

    NONE = "none"
    CLUSTER = "cluster"
    NODES = "nodes"
    QUEUE = "queue"
    USER = "user"


@dataclass(frozen=True)
class Ticket:
    """A gang that waits for its executors.

    Attributes:
        filed: when it began to wait, milliseconds since the epoch by the name node's clock.
        id: tells it from others of the same time.
        grows: a search that would like more; it stands behind all gangs.
        executors: that it needs.
        gpus: of each executor.
        queue: short name (`queue_tag`) of the queue whose limit bounds it, else of its own.
        bound: what kept it from being granted when it last looked.
        passed: how often later tickets have passed it.
        application: YARN's id.
    """

    filed: int
    id: str
    grows: bool
    executors: int
    gpus: int
    queue: str
    bound: Bound
    passed: int
    application: str

    @property
    def name(self) -> str:
        """Of its file."""
        kind = "grow" if self.grows else "gang"
        return (
            f"ticket-{self.filed:015d}-{self.id}-{kind}-{self.executors}x{self.gpus}"
            f"-{self.queue}-{self.bound.value}-{self.passed}-{self.application}"
        )

    @property
    def order(self) -> tuple[bool, int, str]:
        """Sorts the line: gangs before searches that grow, then first come first served."""
        return self.grows, self.filed, self.id


def ticket_of(name: str) -> Ticket | None:
    """The ticket that a file's name describes, or None for another file."""
    match = _TICKET.fullmatch(name)
    if match is None or match[7] not in {bound.value for bound in Bound}:
        return None
    return Ticket(
        filed=int(match[1]),
        id=match[2],
        grows=match[3] == "grow",
        executors=int(match[4]),
        gpus=int(match[5]),
        queue=match[6],
        bound=Bound(match[7]),
        passed=int(match[8]),
        application=match[9],
    )


def queue_tag(queue: str) -> str:
    """Short name of a queue's path, as file names bear it."""
    return hashlib.sha256(queue.encode()).hexdigest()[:8]


def turn_name(generation: int) -> str:
    """Name of a turn's file."""
    return f"turn-{generation:012d}"


def asking_name(generation: int, application: str) -> str:
    """Name of the file that tells who has a turn."""
    return f"asking-{generation:012d}-{application}"


@dataclass(frozen=True)
class Entry:
    """A file in the line's directory.

    Attributes:
        name: of the file.
        modified: milliseconds since the epoch by the name node's clock.
        owner: the user whose it is.
    """

    name: str
    modified: int
    owner: str


@dataclass(frozen=True)
class Line:
    """Who waits, and who has the turn.

    Attributes:
        standing: tickets that count, with their owners, in order.
        generation: the highest of all turns; 0 where there has been none.
        asking: who has the turn, in words; None where it is free.
    """

    standing: tuple[tuple[Ticket, str], ...]
    generation: int
    asking: str | None

    @property
    def next_generation(self) -> int:
        """The odd number under which the turn is taken next."""
        return self.generation + (2 if self.generation % 2 else 1)

    def ahead_of(self, own: Ticket) -> tuple[tuple[Ticket, str], ...]:
        """The tickets before one's own, with their owners."""
        return tuple((t, user) for t, user in self.standing if t.order < own.order)


def read_line(entries: Iterable[Entry], now: int) -> Line:
    """The line, from the files of its directory.

    Args:
        entries: all files.
        now: milliseconds since the epoch by the name node's clock.
    """
    alive = now - LEASE_SECONDS * 1000
    standing = []
    turns: dict[int, Entry] = {}
    askers: dict[int, str] = {}
    for entry in entries:
        if (ticket := ticket_of(entry.name)) is not None:
            if entry.modified >= alive:
                standing.append((ticket, entry.owner))
        elif match := _TURN.fullmatch(entry.name):
            turns[int(match[1])] = entry
        elif match := _ASKING.fullmatch(entry.name):
            askers[int(match[1])] = match[2]
    generation = max(turns, default=0)
    asking = None
    if generation % 2 and turns[generation].modified >= alive:
        asking = f"{askers.get(generation, 'a gang')} of {turns[generation].owner}"
    standing.sort(key=lambda pair: pair[0].order)
    return Line(tuple(standing), generation, asking)


def litter(entries: Iterable[Entry], owner: str, now: int) -> tuple[str, ...]:
    """Names of a user's own files that count no more: passed turns, tickets of the dead."""
    entries = list(entries)
    generation = read_line(entries, now).generation
    alive = now - LEASE_SECONDS * 1000

    def is_over(entry: Entry) -> bool:
        if turn := _TURN.fullmatch(entry.name) or _ASKING.fullmatch(entry.name):
            return int(turn[1]) < generation
        waits = ticket_of(entry.name) is not None or _DRAFT.fullmatch(entry.name) is not None
        return waits and entry.modified < alive

    return tuple(entry.name for entry in entries if entry.owner == owner and is_over(entry))


@dataclass(frozen=True)
class Turn:
    """Whether to ask YARN now.

    Attributes:
        take: whether the turn is ours to take.
        why: what it waits for in the line, "" where it does not wait for others.
    """

    take: bool
    why: str = ""


@dataclass(frozen=True)
class Own:
    """The one who looks at the line.

    Attributes:
        ticket: its ticket, whose `bound` says whether it could be granted now.
        user: whose it is.
        queues: short names of its queue and of all parents of that, its own first.
    """

    ticket: Ticket
    user: str
    queues: tuple[str, ...]


def decide_turn(own: Own, line: Line, node_gpus: Sequence[int], probe: bool) -> Turn:
    """Whether a gang may take the turn.

    First come first served, as far as sizes allow: a gang that cannot be granted now lets later
    ones pass that can, if both fit into the cluster beside each other, and a bounded number of
    times; those who have no part in the limit of queue or user that bounds it, always.

    Args:
        own: the gang.
        line: all tickets.
        node_gpus: all GPUs of each node, used or not.
        probe: whether to ask although it does not seem to fit; YARN may preempt, or grow.
    """
    if line.asking is not None:
        return Turn(False, f"another gang's turn: {line.asking} asks YARN for its executors")
    ahead = line.ahead_of(own.ticket)
    blocking = [pair for pair in ahead if not _may_pass(own, *pair, node_gpus)]
    if blocking:
        first, user = blocking[0]
        return Turn(
            False,
            f"another gang's turn: {len(ahead)} before this one, first that of"
            f" {first.application} of {user} ({first.executors} x {counted(first.gpus, 'GPU')})",
        )
    return Turn(own.ticket.bound is Bound.NONE or probe)


def _may_pass(own: Own, ahead: Ticket, user: str, node_gpus: Sequence[int]) -> bool:
    if ahead.bound is Bound.QUEUE and ahead.queue not in own.queues:
        return True
    if ahead.bound is Bound.USER and (ahead.queue, user) != (own.queues[0], own.user):
        return True
    return (
        own.ticket.bound is Bound.NONE
        and ahead.bound is not Bound.NONE
        and ahead.passed < MOST_PASSES
        and _fit_together((ahead, own.ticket), node_gpus)
    )


def _fit_together(tickets: Sequence[Ticket], node_gpus: Sequence[int]) -> bool:
    """Whether all executors fit onto the empty nodes; the largest are placed first."""
    free = sorted(node_gpus, reverse=True)
    wanted = sorted((t.gpus for t in tickets for _ in range(t.executors)), reverse=True)
    for gpus in wanted:
        # On the fullest node that takes it, so that large executors find room.
        fitting = [i for i, left in enumerate(free) if left >= gpus]
        if not fitting:
            return False
        free[min(fitting, key=lambda i: free[i])] -= gpus
    return True


def count_passes(own: Ticket, before: Line, line: Line) -> Ticket:
    """One's own ticket, with those counted who stood behind it and have taken the turn since."""
    taken = (line.generation + 1) // 2 - (before.generation + 1) // 2
    there = {ticket.id for ticket, _ in line.standing}
    went_ahead = sum(ticket.id not in there for ticket, _ in before.ahead_of(own))
    passes = taken - went_ahead
    if passes <= 0 or own.bound is Bound.NONE:
        return own
    return dataclasses.replace(own, passed=own.passed + passes)
