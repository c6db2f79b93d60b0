"""Whose turn it is to ask YARN for a gang's executors: file names go in, decisions come out.

Waiting gangs stand in one line (the queue of gangs) per cluster partition, across applications and
users. The line is a directory on the lake that holds only empty files:

    ticket-FILED-ID-KIND-SIZE-QUEUE-BOUND-PASSED-APPLICATION    a gang that waits
    turn-GENERATION                                            odd: a gang asks; even: free
    asking-GENERATION-APPLICATION                              who asks

A gang takes the turn, and gives it back, by a strict rename of its own file to the name of the next
generation, of which only one can succeed. The highest generation counts and is never removed, so
that no number is used twice. A file that its owner has not renewed for `LEASE_SECONDS`, by the name
node's clock alone, does not count, so that an application that crashed stops nobody.
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
# How often later gangs that fit beside a gang may pass it.
MOST_PASSES = 3

_TICKET = re.compile(
    r"ticket-(\d{15})-([0-9a-f]{8})-(gang|grow)-(\d+)x(\d+)-([0-9a-f]{8})-([a-z]+)-(\d+)-(\w+)"
)
_TURN = re.compile(r"turn-(\d{12})")
_DRAFT = re.compile(r"draft-[0-9a-f]{8}")
_ASKING = re.compile(r"asking-(\d{12})-(\w+)")


class Bound(Enum):
    """The limit that keeps a gang from being granted now."""

    NONE = "none"
    CLUSTER = "cluster"
    NODES = "nodes"
    QUEUE = "queue"
    USER = "user"


@dataclass(frozen=True)
class Ticket:
    """The ticket of a gang that waits for its executors.

    Attributes:
        filed: when the gang began to wait, milliseconds since the epoch by the name node's clock.
        id: distinguishes the ticket from others of the same time.
        grows: whether it belongs to a search that would like more executors; such a ticket stands
            behind all gangs.
        executors: number of executors that the gang needs.
        gpus: GPUs of each executor.
        queue: short name (`queue_tag`) of the queue whose limit bounds the gang, else of its own.
        bound: what kept the gang from being granted when it last looked.
        passed: how often later tickets have passed this one.
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
        """Return the name of the ticket's file."""
        kind = "grow" if self.grows else "gang"
        return (
            f"ticket-{self.filed:015d}-{self.id}-{kind}-{self.executors}x{self.gpus}"
            f"-{self.queue}-{self.bound.value}-{self.passed}-{self.application}"
        )

    @property
    def order(self) -> tuple[bool, int, str]:
        """Return the sort key: gangs before searches that grow, then first come first served."""
        return self.grows, self.filed, self.id


def ticket_of(name: str) -> Ticket | None:
    """Return the ticket that a file's name describes, or None for another file."""
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
    """Return the short name of a queue's path for the names of files."""
    return hashlib.sha256(queue.encode()).hexdigest()[:8]


def turn_name(generation: int) -> str:
    """Return the name of a turn's file."""
    return f"turn-{generation:012d}"


def asking_name(generation: int, application: str) -> str:
    """Return the name of the file that says who has a turn."""
    return f"asking-{generation:012d}-{application}"


@dataclass(frozen=True)
class Entry:
    """A file in the line's directory.

    Attributes:
        name: the file's name.
        modified: milliseconds since the epoch by the name node's clock.
        owner: the user who owns the file.
    """

    name: str
    modified: int
    owner: str


@dataclass(frozen=True)
class Line:
    """The gangs that wait, and the one that has the turn.

    Attributes:
        standing: tickets that count, with their owners, in order.
        generation: the highest generation of all turns; 0 if there has been no turn.
        asking: who has the turn, in words; None if it is free.
    """

    standing: tuple[tuple[Ticket, str], ...]
    generation: int
    asking: str | None

    @property
    def next_generation(self) -> int:
        """Return the odd number under which the turn is taken next."""
        return self.generation + (2 if self.generation % 2 else 1)

    def ahead_of(self, own: Ticket) -> tuple[tuple[Ticket, str], ...]:
        """Return the tickets before a gang's own, with their owners."""
        return tuple((t, user) for t, user in self.standing if t.order < own.order)


def read_line(entries: Iterable[Entry], now: int) -> Line:
    """Return the line that the files of its directory describe.

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


def stale_entries(entries: Iterable[Entry], owner: str, now: int) -> tuple[str, ...]:
    """Return the names of a user's own files that no longer count.

    These are the files of past turns, and the tickets and drafts of applications that died.
    """
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
    """A decision whether to ask YARN now.

    Attributes:
        take: whether the gang may take the turn.
        why: what the gang waits for in the line; "" if it does not wait for others.
    """

    take: bool
    why: str = ""


@dataclass(frozen=True)
class Own:
    """The gang that looks at the line.

    Attributes:
        ticket: its ticket, whose `bound` says whether it could be granted now.
        user: the ticket's owner.
        queues: short names of its queue and of all parents of that queue, its own first.
    """

    ticket: Ticket
    user: str
    queues: tuple[str, ...]


def decide_turn(own: Own, line: Line, node_gpus: Sequence[int], probe: bool) -> Turn:
    """Decide whether a gang may take the turn.

    Gangs are served first come first served, as far as sizes allow. A gang that cannot be granted
    now lets later ones pass that can, if both fit into the cluster together, and only a bounded
    number of times. If a limit of a queue or user bounds it, gangs that do not fall under that
    limit may always pass.

    Args:
        own: the gang.
        line: all tickets.
        node_gpus: number of all GPUs of each node, used or not.
        probe: whether to ask although the gang does not seem to fit, because YARN may preempt
            others, or the cluster may grow.
    """
    if line.asking is not None:
        return Turn(False, f"another gang's turn: {line.asking} asks YARN for its executors")
    ahead = line.ahead_of(own.ticket)
    blocking = [pair for pair in ahead if not _may_pass(own, *pair, node_gpus)]
    if blocking:
        first, user = blocking[0]
        return Turn(
            False,
            f"another gang's turn: {counted(len(ahead), 'gang')} ahead of this one; the first is of"
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
    """Return whether all executors fit onto the empty nodes, if the largest are placed first."""
    free = sorted(node_gpus, reverse=True)
    demands = sorted((t.gpus for t in tickets for _ in range(t.executors)), reverse=True)
    for gpus in demands:
        # Take the fullest node that has room, so that large executors find room on others.
        fitting = [i for i, room in enumerate(free) if room >= gpus]
        if not fitting:
            return False
        free[min(fitting, key=lambda i: free[i])] -= gpus
    return True


def count_passes(own: Ticket, before: Line, line: Line) -> Ticket:
    """Return a gang's ticket, with the later gangs added that have taken the turn since `before`.

    Nothing is added if the gang could be granted now.

    Args:
        own: the gang's ticket.
        before: the line when the gang last looked.
        line: the line now.
    """
    taken = (line.generation + 1) // 2 - (before.generation + 1) // 2
    present = {ticket.id for ticket, _ in line.standing}
    went_ahead = sum(ticket.id not in present for ticket, _ in before.ahead_of(own))
    passes = taken - went_ahead
    if passes <= 0 or own.bound is Bound.NONE:
        return own
    return dataclasses.replace(own, passed=own.passed + passes)
