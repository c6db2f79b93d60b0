"""Whose turn it is to ask YARN for a gang's executors: file names go in, decisions come out.

Waiting gangs stand in one line (the queue of gangs) per cluster partition, across applications and
users. The line is a directory on the lake that holds only empty files:

    ticket-FILED-ID-KIND-SIZE-QUEUE-BOUND-PASSED-TURNS-APPLICATION    a gang that waits
    turn-GENERATION                                                  odd: a gang asks; even: free
    asking-GENERATION-APPLICATION                                    who asks
    offer-ID-SURPLUS-GIVING-QUEUE-APPLICATION-RUN                    what an elastic gang may give

A gang takes the turn, and gives it back, by a strict rename of its own file to the name of the next
generation, of which only one can succeed. The highest generation counts and is never removed, so
that no number is used twice. A file that its owner has not renewed for `TICKET_TTL_SECONDS`, by
the NameNode's clock alone, does not count, so that an application that crashed stops nobody.

Each look costs the NameNode a listing, and each renewal two more operations. So gangs look, and
renew their tickets, more rarely the lower they rank (`look_seconds`, `renewal_seconds`), and their
tickets count for longer (`lease_seconds`). The rank follows from the listing alone, so that all
gangs judge a ticket by the same rank. Of the first ranks a ticket counts for `TICKET_TTL_SECONDS`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hopsgpu.units import count_of

TICKET_TTL_SECONDS = 20.0
RENEW_SECONDS = 4.0
# A gang of the first ranks looks this often; each rank below adds to it.
_LOOK_SECONDS = 0.4
_LOOK_SECONDS_OF_RANK = 1.5
_LONGEST_LOOK_SECONDS = 60.0
# Gangs that look at the same time spread: pauses differ by this share.
LOOK_SPREAD = 0.2
# At which share of the time for which a ticket counts it is renewed at the latest.
_RENEWED_BEFORE = 0.8
_LONGEST_RENEWAL_SECONDS = 120.0
# What a ticket below the first ranks counts longer, for each of these.
_LEASE_SECONDS_OF_RANK = 10.5
_FIRST_RANKS = 4
_LONGEST_LEASE_SECONDS = 300.0
# How often later gangs that fit beside a gang may pass it.
MOST_PASSES = 3
# A gang that does not seem to fit asks anyway after this time, and then ever more rarely, because
# YARN preempts, and clusters grow, only for pending requests.
_PROBE_SECONDS = 30.0
_LONGEST_PROBE = 600.0

_TICKET = re.compile(
    r"ticket-(\d{15})-([0-9a-f]{8})-(gang|grow)-(\d+)x(\d+)-([0-9a-f]{8})-([a-z]+)-(\d+)"
    r"-(\d+)-(\w+)"
)
_TURN = re.compile(r"turn-(\d{12})")
_DRAFT = re.compile(r"draft-[0-9a-f]{8}")
_ASKING = re.compile(r"asking-(\d{12})-(\w+)")
_OFFER = re.compile(r"offer-([0-9a-f]{8})-(\d+)x(\d+)-(\d+)-([0-9a-f]{8})-(\w+?)-(.+)")
# Of a run's name, which has up to 200 bytes; a file's may have 255.
_OFFER_NAME = 30


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
        passed: how often later tickets have passed this one; not counted beyond `MOST_PASSES`.
        application: YARN's id.
        turns: how many turns the gang has had.
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
    turns: int = 0

    @property
    def name(self) -> str:
        """Return the name of the ticket's file."""
        kind = "grow" if self.grows else "gang"
        return (
            f"ticket-{self.filed:015d}-{self.id}-{kind}-{self.executors}x{self.gpus}"
            f"-{self.queue}-{self.bound.value}-{self.passed}-{self.turns}"
            f"-{self.application}"
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
        turns=int(match[9]),
        application=match[10],
    )


@dataclass(frozen=True)
class Offer:
    """What an elastic gang has above its minimum, and gives back if gangs wait for it.

    Attributes:
        id: distinguishes the offer from others.
        executors: number of executors above the minimum.
        gpus: GPUs of each executor.
        giving: how many of the executors it gives back at its next checkpoint.
        queue: short name (`queue_tag`) of its queue.
        application: YARN's id.
        run: name of the run, abbreviated.
    """

    id: str
    executors: int
    gpus: int
    giving: int
    queue: str
    application: str
    run: str

    @property
    def name(self) -> str:
        """Return the name of the offer's file."""
        return (
            f"offer-{self.id}-{self.executors}x{self.gpus}-{self.giving}-{self.queue}"
            f"-{self.application}-{self.run[:_OFFER_NAME]}"
        )


def offer_of(name: str) -> Offer | None:
    """Return the offer that a file's name describes, or None for another file."""
    match = _OFFER.fullmatch(name)
    if match is None:
        return None
    executors, gpus, giving = map(int, match.group(2, 3, 4))
    return Offer(match[1], executors, gpus, giving, match[5], match[6], match[7])


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
class QueueSnapshot:
    """The gangs that wait, and the one that has the turn.

    Attributes:
        standing: tickets that count, with their owners, in order.
        generation: the highest generation of all turns; 0 if there has been no turn.
        asking: who has the turn, in words; None if it is free.
        offers: what elastic gangs have above their minimum, with their owners.
    """

    standing: Sequence[tuple[Ticket, str]]
    generation: int
    asking: str | None
    offers: tuple[tuple[Offer, str], ...] = ()

    @property
    def next_generation(self) -> int:
        """Return the odd number under which the turn is taken next."""
        return self.generation + (2 if self.generation % 2 else 1)

    def rank_of(self, own: Ticket, user: str) -> int:
        """Return a gang's rank, whether its ticket counts or not.

        Args:
            own: the gang's ticket.
            user: its owner.
        """
        ranking = _Ranking()
        for ticket, owner in self.ahead_of(own):
            ranking.add(ticket, owner)
        return ranking.next(own, user)

    def ahead_of(self, own: Ticket) -> Sequence[tuple[Ticket, str]]:
        """Return the tickets before a gang's own, with their owners."""
        return self.standing[: bisect_left(self.standing, own.order, key=lambda p: p[0].order)]


def read_line(entries: Iterable[Entry], now: int) -> QueueSnapshot:
    """Return the line that the files of its directory describe.

    Args:
        entries: all files.
        now: milliseconds since the epoch by the name node's clock.
    """
    alive = now - TICKET_TTL_SECONDS * 1000
    tickets, offers = [], []
    turns: dict[int, Entry] = {}
    askers: dict[int, str] = {}
    for entry in entries:
        if (ticket := ticket_of(entry.name)) is not None:
            tickets.append((ticket, entry))
        elif (offer := offer_of(entry.name)) is not None:
            if entry.modified >= alive:
                offers.append((offer, entry.owner))
        elif match := _TURN.fullmatch(entry.name):
            turns[int(match[1])] = entry
        elif match := _ASKING.fullmatch(entry.name):
            askers[int(match[1])] = match[2]
    generation = max(turns, default=0)
    asking = None
    if generation % 2 and turns[generation].modified >= alive:
        asking = f"{askers.get(generation, 'a gang')} of {turns[generation].owner}"
    tickets.sort(key=lambda pair: pair[0].order)
    offers.sort(key=lambda pair: pair[0].id)
    return QueueSnapshot(tuple(_counting(tickets, now)), generation, asking, tuple(offers))


def _counting(tickets: Iterable[tuple[Ticket, Entry]], now: int) -> Iterator[tuple[Ticket, str]]:
    """Return the tickets that count, with their owners; each is judged by the rank that it has.

    Args:
        tickets: all tickets with their files, in order.
        now: milliseconds since the epoch by the name node's clock.
    """
    ranking = _Ranking()
    for ticket, entry in tickets:
        rank = ranking.next(ticket, entry.owner)
        if entry.modified >= now - lease_seconds(rank) * 1000:
            ranking.add(ticket, entry.owner)
            yield ticket, entry.owner


class _Ranking:
    """Ranks the tickets of a line, in order.

    Gangs of one kind wait for the same: none of them is served before those of its kind ahead, but
    what becomes free may serve the first of each kind. Gangs at the limit of one YARN queue, or of
    a user there, are of one kind; of all others, those that have the same size.

    The rank is the product of two places, less one: of the kind, and of the gang among those of its
    kind. Places count from 1 in the order of the line. Gangs at limits do not count for kinds that
    wait for the cluster, and all of the latter's kinds count as one for those at limits. No rank
    exceeds the number of gangs ahead.
    """

    def __init__(self) -> None:
        self._places = 0
        # How many gangs of each kind stand ahead, in the order in which the kinds appear.
        self._waiting: dict[object, int] = {}
        self._limited: dict[object, int] = {}

    def next(self, ticket: Ticket, owner: str) -> int:
        """Return the rank that a ticket has behind those that were added."""
        kinds, kind, before = self._kind_of(ticket, owner)
        place = before + (list(kinds).index(kind) if kind in kinds else len(kinds)) + 1
        return min(place * (kinds.get(kind, 0) + 1) - 1, self._places)

    def add(self, ticket: Ticket, owner: str) -> None:
        """Add a ticket that counts."""
        kinds, kind, _ = self._kind_of(ticket, owner)
        kinds[kind] = kinds.get(kind, 0) + 1
        self._places += 1

    def _kind_of(self, ticket: Ticket, owner: str) -> tuple[dict[object, int], object, int]:
        """Return the kinds among which a ticket's counts, the kind, and how many come before."""
        match ticket.bound:
            case Bound.QUEUE:
                return self._limited, ticket.queue, 1
            case Bound.USER:
                return self._limited, (ticket.queue, owner), 1
        return self._waiting, (ticket.grows, ticket.executors, ticket.gpus), 0


def look_seconds(rank: int) -> float:
    """Return the seconds from one look at the line to the next of a gang that waits.

    They are as short for the second gang as for the first, so that a turn that becomes free is
    taken at once.
    """
    return min(_LOOK_SECONDS + _LOOK_SECONDS_OF_RANK * max(rank - 1, 0), _LONGEST_LOOK_SECONDS)


def renewal_seconds(rank: int) -> float:
    """Return the age at which a gang renews its ticket when it looks.

    The first two renew it as often as the gang with the turn. Others renew it so that it counts at
    their next look, even if half of the gangs ahead go before, and even if the lake is slow.
    """
    if rank <= 1:
        return RENEW_SECONDS
    latest = _RENEWED_BEFORE * lease_seconds(-(-rank // 2))
    period = latest - (1.0 + LOOK_SPREAD) * look_seconds(rank)
    return min(max(RENEW_SECONDS, period), _LONGEST_RENEWAL_SECONDS)


def lease_seconds(rank: int) -> float:
    """Return the seconds for which a ticket counts after it was renewed.

    In the first ranks, a gang that died counts no longer than one that died with the turn. A gang
    that is alive counts even if half of the gangs ahead go between two of its looks. If more go,
    it may not count until it looks, within 72 s; then it has its place again.
    """
    further = _LEASE_SECONDS_OF_RANK * max(rank - _FIRST_RANKS + 1, 0)
    return min(TICKET_TTL_SECONDS + further, _LONGEST_LEASE_SECONDS)


def stale_entries(entries: Iterable[Entry], owner: str, now: int) -> tuple[str, ...]:
    """Return the names of a user's own files that no longer count.

    These are the files of past turns, and the tickets, drafts and offers of applications that died.
    """
    entries = list(entries)
    line = read_line(entries, now)
    counting = {ticket.name for ticket, _ in line.standing}
    alive = now - TICKET_TTL_SECONDS * 1000

    def is_over(entry: Entry) -> bool:
        if turn := _TURN.fullmatch(entry.name) or _ASKING.fullmatch(entry.name):
            return int(turn[1]) < line.generation
        held = ticket_of(entry.name), offer_of(entry.name), _DRAFT.fullmatch(entry.name)
        is_old = entry.modified < alive and entry.name not in counting
        return is_old and any(one is not None for one in held)

    return tuple(entry.name for entry in entries if entry.owner == owner and is_over(entry))


@dataclass(frozen=True)
class TurnDecision:
    """A decision whether to ask YARN now.

    Attributes:
        take: whether the gang may take the turn.
        why: what the gang waits for in the line; "" if it does not wait for others.
        is_behind: whether gangs ahead of it are to be served first; None while another gang asks,
            which is in no line meanwhile.
    """

    take: bool
    why: str = ""
    is_behind: bool | None = False


@dataclass(frozen=True)
class Candidate:
    """The gang that looks at the line.

    Attributes:
        ticket: its ticket, whose `bound` says whether it could be granted now.
        user: the ticket's owner.
        queues: short names of its queue and of all parents of that queue, its own first.
    """

    ticket: Ticket
    user: str
    queues: tuple[str, ...]


class Probes:
    """When a gang asks YARN although it does not seem to fit; the clock's reading is a parameter.

    Nobody else can ask during a probe. So only a gang that has been first for a while makes one:
    otherwise, while the first lets others go first after a probe, each of the gangs behind it would
    make its own, and the line would be closed to gangs that fit.

    Args:
        now: the clock's reading when the gang began to wait.
    """

    def __init__(self, now: float) -> None:
        self._after = _PROBE_SECONDS
        self._next = now + _PROBE_SECONDS
        self._was_behind = False

    @property
    def next(self) -> float:
        """Return the clock's reading from which on the next probe is due."""
        return self._next

    def is_due(self, bound: Bound, now: float) -> bool:
        """Return whether a gang that a limit keeps from being granted asks all the same."""
        return bound is not Bound.NONE and now >= self._next

    def looked(self, now: float, *, is_behind: bool | None) -> None:
        """Record whether gangs ahead are to be served first, as `TurnDecision.is_behind` says.

        The time in which another gang asks is none in which this one is first, if it was not.
        """
        if is_behind or self._was_behind:
            self._next = max(self._next, now + _PROBE_SECONDS)
        if is_behind is not None:
            self._was_behind = is_behind

    def made(self, now: float) -> None:
        """Record a probe: the next one comes after twice the time."""
        self._after = min(2 * self._after, _LONGEST_PROBE)
        self._next = now + self._after


def decide_turn(
    own: Candidate, line: QueueSnapshot, node_gpus: Sequence[int], probe: bool
) -> TurnDecision:
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
        why = f"another gang's turn: {line.asking} asks YARN for its executors"
        return TurnDecision(False, why, is_behind=None)
    ahead = line.ahead_of(own.ticket)
    blocking = (pair for pair in ahead if not _may_pass(own, *pair, node_gpus))
    if (pair := next(blocking, None)) is not None:
        (first, user), count = pair, count_of(len(ahead), "gang")
        return TurnDecision(
            False,
            f"another gang's turn: {count} ahead of this one; the first is of"
            f" {first.application} of {user} ({first.executors} x {count_of(first.gpus, 'GPU')})",
            is_behind=True,
        )
    return TurnDecision(own.ticket.bound is Bound.NONE or probe)


def _may_pass(own: Candidate, ahead: Ticket, user: str, node_gpus: Sequence[int]) -> bool:
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


def count_passes(own: Ticket, before: QueueSnapshot, line: QueueSnapshot) -> Ticket:
    """Return a gang's ticket, with the later gangs added that have taken the turn since `before`.

    Nothing is added if the gang could be granted now.

    Args:
        own: the gang's ticket.
        before: the line when the gang last looked.
        line: the line now.
    """
    taken = (line.generation + 1) // 2 - (before.generation + 1) // 2
    if not taken or own.bound is Bound.NONE:
        return own
    # A gang that gave its turn back, because it got nothing or a part, stands where it stood.
    turns = {ticket.id: ticket.turns for ticket, _ in line.standing}

    def taken_by(tickets: Sequence[tuple[Ticket, str]]) -> int:
        return sum(turns.get(t.id, t.turns + 1) - t.turns for t, _ in tickets)

    ahead = before.ahead_of(own)
    passes = taken - taken_by(ahead)
    if any(ticket.id not in turns for ticket, _ in ahead):
        # It may have had several turns, the last of which it was granted.
        behind = before.standing[len(ahead) :]
        passes = min(passes, taken_by([pair for pair in behind if pair[0].id != own.id]))
    # More makes no difference, and each change of a ticket costs the NameNode a rename.
    passed = min(own.passed + max(passes, 0), MOST_PASSES)
    return dataclasses.replace(own, passed=max(own.passed, passed))


def executors_to_give(
    own: Offer, user: str, queues: Sequence[str], line: QueueSnapshot, free: int
) -> int:
    """Return how many of an elastic gang's executors the gang that waits first needs.

    Nothing is given that cannot help: only if the offers and the free GPUs together suffice for
    that gang, only executors that have as many GPUs as one of its own, and only under a limit that
    binds the elastic gang too. The largest offers give first. Where GPUs lie is not considered, nor
    what is free under a limit of a queue or user.

    Args:
        own: the elastic gang's offer.
        user: its owner.
        queues: short names of its queue and of all parents of that queue, its own first.
        line: the tickets and the offers, its own too.
        free: number of free GPUs of the cluster.
    """
    first = first_helped(line, user, queues)
    if first is None:
        return 0
    return executors_given(first, [offer for offer, _ in line.offers], free).get(own.id, 0)


def first_helped(line: QueueSnapshot, user: str, queues: Sequence[str]) -> Ticket | None:
    """Return the ticket of the first gang that waits and that GPUs of another gang can serve.

    Args:
        line: the line.
        user: owner of the other gang.
        queues: short names of its queue and of all parents of that queue, its own first.
    """
    waiting = ((ticket, owner) for ticket, owner in line.standing if not ticket.grows)
    return next((t for t, owner in waiting if _would_help(t, owner, user, queues)), None)


def executors_given(ticket: Ticket, offers: Iterable[Offer], free: int) -> Mapping[str, int]:
    """Return how many executors each elastic gang gives to a gang that waits, by the offers' ids.

    Args:
        ticket: ticket of the gang that waits.
        offers: the offers.
        free: number of free GPUs of the cluster.
    """
    is_own_limit = ticket.bound in (Bound.QUEUE, Bound.USER)
    needed = ticket.executors * ticket.gpus - (0 if is_own_limit else free)
    ordered = sorted(
        {o.id: o for o in offers if o.gpus and o.gpus >= ticket.gpus}.values(),
        key=lambda offer: (-offer.executors * offer.gpus, offer.id),
    )
    given: dict[str, int] = {}
    if needed > sum(offer.executors * offer.gpus for offer in ordered):
        return given
    for offer in ordered:
        if needed <= 0:
            break
        given[offer.id] = min(offer.executors, -(-needed // offer.gpus))
        needed -= given[offer.id] * offer.gpus
    return given


def _would_help(ticket: Ticket, owner: str, user: str, queues: Sequence[str]) -> bool:
    """Return whether GPUs of a user's gang in a queue can serve a gang that waits."""
    match ticket.bound:
        case Bound.CLUSTER | Bound.NODES:
            return True
        case Bound.QUEUE:
            return ticket.queue in queues
        case Bound.USER:
            return (ticket.queue, owner) == (queues[0], user)
    return False


def coming(line: QueueSnapshot) -> str:
    """Return what elastic gangs are about to give back, in words; "" if nothing."""
    return "; ".join(
        f"{count_of(offer.giving * offer.gpus, 'GPU')} come{'s' * (offer.giving * offer.gpus == 1)}"
        f" from {owner}'s {offer.run!r} at its next checkpoint"
        for offer, owner in line.offers
        if offer.giving
    )
