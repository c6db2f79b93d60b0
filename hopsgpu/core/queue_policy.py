"""Whose turn it is to ask YARN for a gang's executors: file names go in, decisions come out.

Waiting gangs form one queue per cluster partition, across applications and users. The queue of
gangs is a directory on the lake that holds only empty files:

    ticket-FILED-ID-KIND-SIZE-QUEUE-BOUND-PASSED-TURNS-APPLICATION    a gang that waits
    turn-GENERATION                                                  odd: a gang asks; even: free
    asking-GENERATION-APPLICATION                                    who asks
    offer-ID-SURPLUS-PROMISED-QUEUE-APPLICATION-RUN                  what an elastic gang may give

A gang takes the turn, and gives it back, by a strict rename of its own file to the name of the next
generation. Only one such rename can succeed. The highest generation counts and is never removed, so
no number is used twice. A file expires if its owner does not renew it for `TICKET_TTL_SECONDS` by
the NameNode's clock, so a crashed application blocks nobody for longer.

Each poll costs the NameNode a listing, and each renewal two more operations. Gangs therefore poll,
and renew their tickets, less often the lower they rank (`poll_seconds`, `renewal_seconds`), and
their tickets live longer (`ticket_ttl_seconds`). The rank follows from the listing alone, so all
gangs judge a ticket by the same rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hopsgpu.units import count_of

TICKET_TTL_SECONDS = 20.0
RENEW_SECONDS = 4.0
# Poll interval of the first ranks; each further rank adds to it.
_POLL_SECONDS = 0.4
_POLL_SECONDS_PER_RANK = 1.5
_MAX_POLL_SECONDS = 60.0
# Relative random deviation of each pause, so that gangs do not poll at the same time.
POLL_JITTER = 0.2
# A ticket is renewed at the latest after this share of its time to live.
_RENEWAL_SHARE = 0.8
_MAX_RENEWAL_SECONDS = 120.0
# Additional time to live per rank, for tickets behind the first ranks.
_TTL_SECONDS_PER_RANK = 10.5
_FIRST_RANKS = 4
_MAX_TTL_SECONDS = 300.0
# Number of times that later gangs that fit beside a gang may pass it.
MAX_PASSES = 3
# In the first 30 s of each hour by the NameNode's clock, such gangs may pass any number of times.
# Otherwise gangs that wait for whole nodes leave the rest of the cluster idle for days.
UNLIMITED_PASSES_PERIOD_SECONDS = 3600.0
_UNLIMITED_PASSES_SECONDS = 30.0
# A gang that does not fit requests executors after this time where that can help, and then less
# and less often. Within this time, elastic gangs can release executors at a checkpoint.
_PROBE_SECONDS = 30.0
_MAX_PROBE_SECONDS = 600.0

_TICKET = re.compile(
    r"ticket-(\d{15})-([0-9a-f]{8})-(gang|grow)-(\d+)x(\d+)-([0-9a-f]{8})-([a-z]+)-(\d+)"
    r"-(\d+)-(\w+)"
)
_TURN = re.compile(r"turn-(\d{12})")
_DRAFT = re.compile(r"draft-[0-9a-f]{8}")
_ASKING = re.compile(r"asking-(\d{12})-(\w+)")
_OFFER = re.compile(r"offer-([0-9a-f]{8})-(\d+)x(\d+)-(\d+)-([0-9a-f]{8})-(\w+?)-(.+)")
# Length of the run's name in a file name: a run's name has up to 200 bytes, a file's up to 255.
_MAX_RUN_NAME = 30


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
        filed: when the gang began to wait, milliseconds since the epoch by the NameNode's clock.
        id: distinguishes the ticket from others of the same time.
        is_growth: whether a running search or gang requests more executors; such a ticket is behind
            the tickets of all gangs.
        queue: short name (`queue_tag`) of the queue whose limit bounds the gang, else of its own
            queue.
        bound: the limit that kept the gang from being granted at its last poll.
        passed: how often later tickets have passed this one; not counted beyond `MAX_PASSES`.
        application: YARN's ID.
        turns: how many turns the gang has had.
    """

    filed: int
    id: str
    is_growth: bool
    executors: int
    gpus: int
    queue: str
    bound: Bound
    passed: int
    application: str
    turns: int = 0

    @property
    def name(self) -> str:
        kind = "grow" if self.is_growth else "gang"
        return (
            f"ticket-{self.filed:015d}-{self.id}-{kind}-{self.executors}x{self.gpus}"
            f"-{self.queue}-{self.bound.value}-{self.passed}-{self.turns}"
            f"-{self.application}"
        )

    @property
    def order(self) -> tuple[bool, int, str]:
        """Return the sort key: gangs before growth, then first come first served."""
        return self.is_growth, self.filed, self.id


def parse_ticket(name: str) -> Ticket | None:
    """Return the ticket that a file's name describes, or None for another file."""
    match = _TICKET.fullmatch(name)
    if match is None or match[7] not in {bound.value for bound in Bound}:
        return None
    return Ticket(
        filed=int(match[1]),
        id=match[2],
        is_growth=match[3] == "grow",
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
    """The executors above its minimum that an elastic gang releases if gangs wait for them.

    Attributes:
        executors: number of executors above the gang's minimum.
        promised: how many of the executors the gang releases at its next checkpoint.
        queue: short name (`queue_tag`) of its queue.
        run: name of the run, abbreviated.
    """

    id: str
    executors: int
    gpus: int
    promised: int
    queue: str
    application: str
    run: str

    @property
    def name(self) -> str:
        return (
            f"offer-{self.id}-{self.executors}x{self.gpus}-{self.promised}-{self.queue}"
            f"-{self.application}-{self.run[:_MAX_RUN_NAME]}"
        )


def parse_offer(name: str) -> Offer | None:
    """Return the offer that a file's name describes, or None for another file."""
    match = _OFFER.fullmatch(name)
    if match is None:
        return None
    executors, gpus, promised = map(int, match.group(2, 3, 4))
    return Offer(match[1], executors, gpus, promised, match[5], match[6], match[7])


def queue_tag(queue: str) -> str:
    """Return the short name of a queue's path for the names of files."""
    return hashlib.sha256(queue.encode()).hexdigest()[:8]


def turn_name(generation: int) -> str:
    return f"turn-{generation:012d}"


def asking_name(generation: int, application: str) -> str:
    """Return the name of the file that says who has a turn."""
    return f"asking-{generation:012d}-{application}"


@dataclass(frozen=True)
class QueueFile:
    """A file of the queue; `modified` is the NameNode's time in milliseconds since the epoch."""

    name: str
    modified: int
    owner: str


@dataclass(frozen=True)
class TurnHolder:
    """The gang that asks YARN; its application is "" if it is unknown."""

    application: str
    user: str

    def __str__(self) -> str:
        return f"{self.application or 'a gang'} of {self.user}"


@dataclass(frozen=True)
class QueueSnapshot:
    """The gangs that wait, the gang that has the turn, and the offers of elastic gangs.

    Attributes:
        tickets: the live tickets with their owners, in order.
        generation: the highest generation of all turns; 0 if there has been no turn.
        turn_holder: who has the turn; None if the turn is free.
        offers: the live offers with their owners.
        has_unlimited_passes: whether later gangs may now pass more than `MAX_PASSES` times.
    """

    tickets: Sequence[tuple[Ticket, str]]
    generation: int
    turn_holder: TurnHolder | None
    offers: tuple[tuple[Offer, str], ...] = ()
    has_unlimited_passes: bool = False

    @property
    def next_generation(self) -> int:
        """Return the odd number under which the turn is taken next."""
        return self.generation + (2 if self.generation % 2 else 1)

    def rank_of(self, ticket: Ticket, user: str) -> int:
        """Return the rank of a user's ticket, even if the ticket has expired."""
        ranking = _Ranking()
        for other, owner in self.ahead_of(ticket):
            ranking.add(other, owner)
        return ranking.rank(ticket, user)

    def ahead_of(self, ticket: Ticket) -> Sequence[tuple[Ticket, str]]:
        return self.tickets[: bisect_left(self.tickets, ticket.order, key=lambda p: p[0].order)]


def read_queue(files: Iterable[QueueFile], now: int) -> QueueSnapshot:
    """Return the queue that the files of its directory describe.

    Args:
        now: milliseconds since the epoch by the NameNode's clock.
    """
    oldest = now - TICKET_TTL_SECONDS * 1000
    tickets, offers = [], []
    turns: dict[int, QueueFile] = {}
    applications: dict[int, str] = {}
    for file in files:
        if (ticket := parse_ticket(file.name)) is not None:
            tickets.append((ticket, file))
        elif (offer := parse_offer(file.name)) is not None:
            if file.modified >= oldest:
                offers.append((offer, file.owner))
        elif match := _TURN.fullmatch(file.name):
            turns[int(match[1])] = file
        elif match := _ASKING.fullmatch(file.name):
            applications[int(match[1])] = match[2]
    generation = max(turns, default=0)
    holder = None
    if generation % 2 and turns[generation].modified >= oldest:
        holder = TurnHolder(applications.get(generation, ""), turns[generation].owner)
    tickets.sort(key=lambda pair: pair[0].order)
    offers.sort(key=lambda pair: pair[0].id)
    return QueueSnapshot(
        tuple(_live_tickets(tickets, now)),
        generation,
        holder,
        tuple(offers),
        has_unlimited_passes(now / 1000),
    )


def _live_tickets(
    tickets: Iterable[tuple[Ticket, QueueFile]], now: int
) -> Iterator[tuple[Ticket, str]]:
    """Yield the tickets that have not expired by the TTL of their rank, with their owners.

    Args:
        now: milliseconds since the epoch by the NameNode's clock.
    """
    ranking = _Ranking()
    for ticket, file in tickets:
        rank = ranking.rank(ticket, file.owner)
        if file.modified >= now - ticket_ttl_seconds(rank) * 1000:
            ranking.add(ticket, file.owner)
            yield ticket, file.owner


class _Ranking:
    """Ranks the tickets of a queue, in order.

    Gangs of one kind wait for the same resources: a gang is not served before those of its kind
    ahead, but freed GPUs may serve the first gang of each kind. Gangs at the limit of one YARN
    queue, or of a user there, are of one kind. Other gangs are of one kind if they have the same
    size.

    The rank is the product of two positions, less one: the position of the kind, and that of the
    gang within its kind. Positions count from 1 in the order of the queue. Gangs at limits do not
    count for kinds that wait for the cluster. All kinds that wait for the cluster count as one for
    those at limits. No rank exceeds the number of gangs ahead.
    """

    def __init__(self) -> None:
        self._count = 0
        # Number of gangs of each kind, in the order in which the kinds appear.
        self._cluster_kinds: dict[object, int] = {}
        self._limited_kinds: dict[object, int] = {}

    def rank(self, ticket: Ticket, owner: str) -> int:
        """Return the rank that a ticket has behind those that were added."""
        kinds, kind, before = self._kind_of(ticket, owner)
        position = before + (list(kinds).index(kind) if kind in kinds else len(kinds)) + 1
        return min(position * (kinds.get(kind, 0) + 1) - 1, self._count)

    def add(self, ticket: Ticket, owner: str) -> None:
        kinds, kind, _ = self._kind_of(ticket, owner)
        kinds[kind] = kinds.get(kind, 0) + 1
        self._count += 1

    def _kind_of(self, ticket: Ticket, owner: str) -> tuple[dict[object, int], object, int]:
        """Return the kinds that a ticket competes with, its kind, and how many kinds are first."""
        match ticket.bound:
            case Bound.QUEUE:
                return self._limited_kinds, ticket.queue, 1
            case Bound.USER:
                return self._limited_kinds, (ticket.queue, owner), 1
        return self._cluster_kinds, (ticket.is_growth, ticket.executors, ticket.gpus), 0


def poll_seconds(rank: int) -> float:
    """Return the seconds between two polls of the queue.

    The second gang polls as often as the first, so that a free turn is taken at once.
    """
    return min(_POLL_SECONDS + _POLL_SECONDS_PER_RANK * max(rank - 1, 0), _MAX_POLL_SECONDS)


def renewal_seconds(rank: int) -> float:
    """Return the age at which a gang renews its ticket when it polls.

    The first two gangs renew as often as the gang with the turn. A later ticket stays alive until
    the next poll, even if half of the gangs ahead leave meanwhile and the lake is slow.
    """
    if rank <= 1:
        return RENEW_SECONDS
    latest = _RENEWAL_SHARE * ticket_ttl_seconds(-(-rank // 2))
    period = latest - (1.0 + POLL_JITTER) * poll_seconds(rank)
    return min(max(RENEW_SECONDS, period), _MAX_RENEWAL_SECONDS)


def ticket_ttl_seconds(rank: int) -> float:
    """Return the seconds after its renewal in which a ticket expires.

    In the first ranks, the ticket of a dead gang expires as soon as the turn of a dead gang. The
    ticket of a live gang does not expire even if half of the gangs ahead leave between two of its
    polls. If more leave, it may expire until the next poll, within 72 s; then the gang regains its
    place.
    """
    further = _TTL_SECONDS_PER_RANK * max(rank - _FIRST_RANKS + 1, 0)
    return min(TICKET_TTL_SECONDS + further, _MAX_TTL_SECONDS)


def stale_files(files: Iterable[QueueFile], owner: str, now: int) -> tuple[str, ...]:
    """Return a user's own files of past turns, and expired tickets, drafts and offers."""
    files = list(files)
    queue = read_queue(files, now)
    live = {ticket.name for ticket, _ in queue.tickets}
    oldest = now - TICKET_TTL_SECONDS * 1000

    def is_stale(file: QueueFile) -> bool:
        if turn := _TURN.fullmatch(file.name) or _ASKING.fullmatch(file.name):
            return int(turn[1]) < queue.generation
        if file.modified >= oldest or file.name in live:
            return False
        parsed = parse_ticket(file.name), parse_offer(file.name), _DRAFT.fullmatch(file.name)
        return any(value is not None for value in parsed)

    return tuple(file.name for file in files if file.owner == owner and is_stale(file))


@dataclass(frozen=True)
class GangsAhead:
    """The gangs that are served before another one.

    Attributes:
        count: number of gangs ahead.
        first: ticket of the first of them that may not be passed.
        user: owner of that ticket.
    """

    count: int
    first: Ticket
    user: str


@dataclass(frozen=True)
class TurnDecision:
    """A decision whether to ask YARN now.

    Attributes:
        may_take: whether the gang may take the turn.
        obstacle: for whom the gang waits in the queue: the gang that asks YARN, or gangs ahead;
            None if it does not wait for other gangs, or does not know for which.
        is_behind: whether gangs ahead are served first; None while another gang asks YARN, because
            that gang has no ticket in the queue.
        problem: why the queue could not be read; "" if it was.
    """

    may_take: bool
    obstacle: TurnHolder | GangsAhead | None = None
    is_behind: bool | None = False
    problem: str = ""


@dataclass(frozen=True)
class Candidate:
    """The gang for which `decide_turn` decides.

    Attributes:
        queues: short names of its queue and of all parents of that queue, its own first.
    """

    ticket: Ticket
    user: str
    queues: tuple[str, ...]


class Probes:
    """Decides when a gang asks YARN although it does not fit, where that can help.

    No other gang can ask during a probe. So only a gang that has been first for a while probes: if
    each gang behind probed too, gangs that fit could never ask.
    """

    def __init__(self, now: float) -> None:
        self._interval = _PROBE_SECONDS
        self._next = now + _PROBE_SECONDS
        self._was_behind = False

    @property
    def next(self) -> float:
        return self._next

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def record_poll(self, now: float, *, is_behind: bool | None) -> None:
        """Record the `TurnDecision.is_behind` of a poll.

        If it is None, the gang is still behind or first as before.
        """
        if is_behind or self._was_behind:
            self._next = max(self._next, now + _PROBE_SECONDS)
        if is_behind is not None:
            self._was_behind = is_behind

    def record_probe(self, now: float) -> None:
        """Record a probe: the next one is due after twice the interval."""
        self._interval = min(2 * self._interval, _MAX_PROBE_SECONDS)
        self._next = now + self._interval


def decide_turn(
    candidate: Candidate, queue: QueueSnapshot, node_gpus: Sequence[int], is_probe: bool
) -> TurnDecision:
    """Decide whether a gang may take the turn.

    Gangs are served first come first served, as far as sizes allow. A gang that cannot be granted
    now lets later ones pass that can, if both fit into the cluster together. They may do so
    `MAX_PASSES` times, and any number of times while passes are unlimited. If a limit of a queue or
    user bounds a gang, gangs that do not fall under that limit may always pass.

    Args:
        node_gpus: number of all GPUs of each node, used or not.
        is_probe: whether to ask although the gang does not fit, because YARN may preempt others or
            add nodes for it.
    """
    if queue.turn_holder is not None:
        return TurnDecision(False, queue.turn_holder, is_behind=None)
    ahead = queue.ahead_of(candidate.ticket)
    passes = math.inf if queue.has_unlimited_passes else MAX_PASSES
    blocking = (pair for pair in ahead if not _may_pass(candidate, *pair, node_gpus, passes))
    if (pair := next(blocking, None)) is not None:
        return TurnDecision(False, GangsAhead(len(ahead), *pair), is_behind=True)
    return TurnDecision(candidate.ticket.bound is Bound.NONE or is_probe)


def has_unlimited_passes(now: float) -> bool:
    """Return whether later gangs may pass any number of times.

    Args:
        now: seconds since the epoch by the NameNode's clock.
    """
    return now % UNLIMITED_PASSES_PERIOD_SECONDS < _UNLIMITED_PASSES_SECONDS


def _may_pass(
    candidate: Candidate, ahead: Ticket, user: str, node_gpus: Sequence[int], passes: float
) -> bool:
    if ahead.bound is Bound.QUEUE and ahead.queue not in candidate.queues:
        return True
    if ahead.bound is Bound.USER and (ahead.queue, user) != (candidate.queues[0], candidate.user):
        return True
    return (
        candidate.ticket.bound is Bound.NONE
        and ahead.bound is not Bound.NONE
        and ahead.passed < passes
        and _can_fit_together((ahead, candidate.ticket), node_gpus)
    )


def _can_fit_together(tickets: Sequence[Ticket], node_gpus: Sequence[int]) -> bool:
    """Return whether all executors fit onto the empty nodes, if the largest are placed first."""
    free = sorted(node_gpus, reverse=True)
    demands = sorted((t.gpus for t in tickets for _ in range(t.executors)), reverse=True)
    for gpus in demands:
        # Use the fullest node, so that emptier nodes remain for large executors.
        fitting = [i for i, capacity in enumerate(free) if capacity >= gpus]
        if not fitting:
            return False
        free[min(fitting, key=lambda i: free[i])] -= gpus
    return True


def count_passes(ticket: Ticket, before: QueueSnapshot, now: QueueSnapshot) -> Ticket:
    """Return a ticket, with the turns added that later gangs took between two snapshots.

    Nothing is added if the gang could be granted now.
    """
    turn_count = (now.generation + 1) // 2 - (before.generation + 1) // 2
    if not turn_count or ticket.bound is Bound.NONE:
        return ticket
    # A gang that gave its turn back, because it got nothing or a part, keeps its place.
    turns = {other.id: other.turns for other, _ in now.tickets}

    def turns_of(tickets: Sequence[tuple[Ticket, str]]) -> int:
        return sum(turns.get(t.id, t.turns + 1) - t.turns for t, _ in tickets)

    ahead = before.ahead_of(ticket)
    passes = turn_count - turns_of(ahead)
    if any(other.id not in turns for other, _ in ahead):
        # A gang ahead that left may have had several turns before the one that was granted.
        behind = before.tickets[len(ahead) :]
        passes = min(passes, turns_of([pair for pair in behind if pair[0].id != ticket.id]))
    # More makes no difference, and each change of a ticket costs the NameNode a rename.
    passed = min(ticket.passed + max(passes, 0), MAX_PASSES)
    return dataclasses.replace(ticket, passed=max(ticket.passed, passed))


def executors_to_give(
    offer: Offer, user: str, queues: Sequence[str], queue: QueueSnapshot, free: int
) -> int:
    """Return how many of an elastic gang's executors the first waiting gang needs.

    Nothing is given that cannot help. The offers and the free GPUs must suffice for that gang. An
    offered executor must have at least as many GPUs as one of the gang's. A limit that binds the
    gang must bind the elastic gang too. The largest offers give first. The places of GPUs are not
    considered, nor what is free under a limit of a queue or user.

    Args:
        user: owner of the offer.
        queues: short names of the elastic gang's queue and of all parents, its own first.
    """
    ticket = first_ticket_to_serve(queue, user, queues)
    if ticket is None:
        return 0
    return split_among_offers(ticket, [o for o, _ in queue.offers], free).get(offer.id, 0)


def first_ticket_to_serve(queue: QueueSnapshot, user: str, queues: Sequence[str]) -> Ticket | None:
    """Return the ticket of the first waiting gang that GPUs of a user's gang can serve."""
    waiting = ((ticket, owner) for ticket, owner in queue.tickets if not ticket.is_growth)
    return next((t for t, owner in waiting if _can_serve(t, owner, user, queues)), None)


def split_among_offers(ticket: Ticket, offers: Iterable[Offer], free: int) -> Mapping[str, int]:
    """Return how many executors each elastic gang gives to a waiting gang, by offer ID."""
    is_own_limit = ticket.bound in (Bound.QUEUE, Bound.USER)
    needed = ticket.executors * ticket.gpus - (0 if is_own_limit else free)
    ordered = sorted(
        {o.id: o for o in offers if o.gpus and o.gpus >= ticket.gpus}.values(),
        key=lambda offer: (-offer.executors * offer.gpus, offer.id),
    )
    shares: dict[str, int] = {}
    if needed > sum(offer.executors * offer.gpus for offer in ordered):
        return shares
    for offer in ordered:
        if needed <= 0:
            break
        shares[offer.id] = min(offer.executors, -(-needed // offer.gpus))
        needed -= shares[offer.id] * offer.gpus
    return shares


def _can_serve(ticket: Ticket, owner: str, user: str, queues: Sequence[str]) -> bool:
    match ticket.bound:
        case Bound.CLUSTER | Bound.NODES:
            return True
        case Bound.QUEUE:
            return ticket.queue in queues
        case Bound.USER:
            return (ticket.queue, owner) == (queues[0], user)
    return False


def describe_promised(queue: QueueSnapshot) -> str:
    """Return what elastic gangs are about to release, in words; "" if nothing."""
    return "; ".join(
        f"{count_of(offer.promised * offer.gpus, 'GPU')}"
        f" come{'s' * (offer.promised * offer.gpus == 1)}"
        f" from {owner}'s {offer.run!r} at its next checkpoint"
        for offer, owner in queue.offers
        if offer.promised
    )
