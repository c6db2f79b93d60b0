"""Whose turn it is to request a gang's executors: file names go in, decisions come out.

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

All users may write into the directory, so names and times are not trusted. A file is ignored if a
number in its name is larger than any cluster needs, or if the file is dated in the future; so are a
user's tickets and offers beyond the first ones. `QueueSnapshot.ignored` lists these files. Nobody
can prevent that a user takes a place, or the turn, before it is due.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from hopsgpu.units import count_of

T = TypeVar("T")
K = TypeVar("K", str, tuple[str, str])

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

# Largest numbers in file names. Other users may write any numbers; no cluster needs larger ones.
MAX_EXECUTORS = 100_000
MAX_GPUS_PER_EXECUTOR = 1000
MAX_GANG_GPUS = 1_000_000
MAX_TURNS = 999_999
MAX_WAIT_SECONDS = 366 * 86_400
# Number of a user's tickets, and of a user's offers, that count.
MAX_FILES_PER_USER = 100
# How far a file may be dated in the future. A gang's reading of the NameNode's clock may be late by
# the duration of a renewal.
MAX_SECONDS_AHEAD = 60.0
# Generations that a queue can have had: a first allowance, and so many a second since 2025-01-01.
# Real turns are rarer by far, so no file makes honest gangs run out of numbers.
_FIRST_GENERATIONS = 1_000_000
_GENERATIONS_PER_SECOND = 20
_GENERATIONS_SINCE = 1_735_689_600
# Number of offers that a sentence lists.
_MAX_OFFERS_LISTED = 5


class Bound(Enum):
    """The limit that keeps a gang from being granted now."""

    NONE = "none"
    CLUSTER = "cluster"
    NODES = "nodes"
    QUEUE = "queue"
    USER = "user"


_SIZE = r"([0-9]{1,6})x([0-9]{1,4})"
# Hyphens separate the parts of a name, so that dots replace those of an application's ID.
_APPLICATION = r"([A-Za-z0-9_.]{1,64})"
_TICKET = re.compile(
    rf"ticket-([0-9]{{15}})-([0-9a-f]{{8}})-(gang|grow)-{_SIZE}-([0-9a-f]{{8}})"
    rf"-({'|'.join(bound.value for bound in Bound)})-([0-9])-([0-9]{{1,6}})-{_APPLICATION}"
)
_TURN = re.compile(r"turn-([0-9]{12})")
_DRAFT = re.compile(r"draft-[0-9a-f]{8}")
_ASKING = re.compile(rf"asking-([0-9]{{12}})-{_APPLICATION}")
_OFFER = re.compile(
    rf"offer-([0-9a-f]{{8}})-{_SIZE}-([0-9]{{1,6}})-([0-9a-f]{{8}})-{_APPLICATION}"
    r"-([\w.+=-]{1,30})"
)
# Number of characters of the run's name in a file name, as in `_OFFER`: a run's name has up to 200
# bytes, a file's up to 255.
_MAX_RUN_NAME = 30


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
        application: the ID that the cluster manager gave.
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
            f"-{_in_name(self.application)}"
        )

    @property
    def order(self) -> tuple[bool, int, str]:
        """Return the sort key: gangs before growth, then first come first served."""
        return self.is_growth, self.filed, self.id


def parse_ticket(name: str) -> Ticket | None:
    """Return the ticket that a file's name describes, or None for another file.

    A name with a number that no gang has describes no ticket.
    """
    match = _TICKET.fullmatch(name)
    if match is None:
        return None
    executors, gpus, passed = int(match[4]), int(match[5]), int(match[8])
    if not (executors and _is_possible_size(executors, gpus) and passed <= MAX_PASSES):
        return None
    return Ticket(
        filed=int(match[1]),
        id=match[2],
        is_growth=match[3] == "grow",
        executors=executors,
        gpus=gpus,
        queue=match[6],
        bound=Bound(match[7]),
        passed=passed,
        turns=int(match[9]),
        application=_from_name(match[10]),
    )


def _is_possible_size(executors: int, gpus: int) -> bool:
    return (
        executors <= MAX_EXECUTORS
        and gpus <= MAX_GPUS_PER_EXECUTOR
        and executors * gpus <= MAX_GANG_GPUS
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
            f"-{_in_name(self.application)}-{self.run[:_MAX_RUN_NAME]}"
        )


def parse_offer(name: str) -> Offer | None:
    """Return the offer that a file's name describes, or None for another file.

    A name with a number that no gang has describes no offer.
    """
    match = _OFFER.fullmatch(name)
    if match is None:
        return None
    executors, gpus, promised = map(int, match.group(2, 3, 4))
    if not _is_possible_size(executors, gpus) or promised > MAX_EXECUTORS:
        return None
    application = _from_name(match[6])
    return Offer(match[1], executors, gpus, promised, match[5], application, match[7])


def queue_tag(queue: str) -> str:
    """Return the short name of a queue's path for the names of files."""
    return hashlib.sha256(queue.encode()).hexdigest()[:8]


def turn_name(generation: int) -> str:
    return f"turn-{generation:012d}"


def asking_name(generation: int, application: str) -> str:
    """Return the name of the file that says who has a turn."""
    return f"asking-{generation:012d}-{_in_name(application)}"


def _in_name(application: str) -> str:
    """Return the ID of an application as the names of files have it."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", application.replace("-", "."))[:64]


def _from_name(text: str) -> str:
    return text.replace(".", "-")


@dataclass(frozen=True)
class QueueFile:
    """A file of the queue; `modified` is the NameNode's time in milliseconds since the epoch."""

    name: str
    modified: int
    owner: str


class IgnoredReason(Enum):
    """Why a file in the directory of a queue does not count."""

    NAME = "its name is none that hopsgpu writes"
    TIME = "it is dated in the future"
    EXCESS = f"its user has more than {MAX_FILES_PER_USER} tickets or offers"


@dataclass(frozen=True)
class IgnoredFile:
    """A file in the directory of a queue that does not count."""

    name: str
    owner: str
    reason: IgnoredReason

    def __str__(self) -> str:
        return f"{self.name!r} of {self.owner}: {self.reason.value}"


@dataclass(frozen=True)
class TurnHolder:
    """The gang that asks the cluster manager; its application is "" if it is unknown."""

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
        ignored: the files that do not count, for another reason than that they have expired.
        has_unlimited_passes: whether later gangs may now pass more than `MAX_PASSES` times.
    """

    tickets: Sequence[tuple[Ticket, str]]
    generation: int
    turn_holder: TurnHolder | None
    offers: tuple[tuple[Offer, str], ...] = ()
    ignored: tuple[IgnoredFile, ...] = ()
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

    The time that this takes is linear in the number of files, but for a sort.

    Args:
        now: milliseconds since the epoch by the NameNode's clock.
    """
    contents = _Contents()
    for file in files:
        if reason := contents.add(file, now):
            contents.ignored.append(IgnoredFile(file.name, file.owner, reason))
    tickets = sorted(contents.tickets, key=lambda pair: pair[0].order)
    offers = sorted(contents.offers, key=lambda pair: pair[0].id)
    return QueueSnapshot(
        tuple(_first_of_each_user(_live_tickets(tickets, now), contents.ignored)),
        max(contents.turns, default=0),
        contents.turn_holder(now),
        tuple(_first_of_each_user(offers, contents.ignored)),
        tuple(contents.ignored),
        has_unlimited_passes(now / 1000),
    )


class _Contents:
    """The files of a queue's directory, by what their names describe."""

    def __init__(self) -> None:
        self.tickets: list[tuple[Ticket, QueueFile]] = []
        self.offers: list[tuple[Offer, QueueFile]] = []
        self.turns: dict[int, QueueFile] = {}
        self.ignored: list[IgnoredFile] = []
        # By generation and owner, who asks.
        self._applications: dict[tuple[int, str], str] = {}

    def add(self, file: QueueFile, now: int) -> IgnoredReason | None:
        """Add a file; return why it does not count, or None if it counts or has expired."""
        # A turn counts whatever its time: its number must not be used again.
        if (generation := _generation_of(_TURN, file, now)) is not None:
            self.turns[generation] = file
            return None
        if file.modified > now + MAX_SECONDS_AHEAD * 1000:
            return IgnoredReason.TIME
        if (ticket := parse_ticket(file.name)) is not None:
            if not now - MAX_WAIT_SECONDS * 1000 <= ticket.filed <= now + MAX_SECONDS_AHEAD * 1000:
                return IgnoredReason.NAME
            self.tickets.append((ticket, file))
        elif (offer := parse_offer(file.name)) is not None:
            if _is_live(file, now):
                self.offers.append((offer, file))
        elif (generation := _generation_of(_ASKING, file, now)) is not None:
            application = _from_name(file.name.rpartition("-")[2])
            self._applications[generation, file.owner] = application
        elif not _DRAFT.fullmatch(file.name):
            return IgnoredReason.NAME
        return None

    def turn_holder(self, now: int) -> TurnHolder | None:
        generation = max(self.turns, default=0)
        if generation % 2 == 0 or not _is_live(self.turns[generation], now):
            return None
        owner = self.turns[generation].owner
        return TurnHolder(self._applications.get((generation, owner), ""), owner)


def _generation_of(pattern: re.Pattern[str], file: QueueFile, now: int) -> int | None:
    """Return the generation in a file's name; None if it has none, or none that a queue can have.

    A file with a higher number than all turns until now could have made is not a turn. So honest
    gangs still find the next number, and others read it.
    """
    match = pattern.fullmatch(file.name)
    if match is None:
        return None
    seconds = max(now // 1000 - _GENERATIONS_SINCE, 0)
    generation = int(match[1])
    is_possible = generation <= _FIRST_GENERATIONS + seconds * _GENERATIONS_PER_SECOND
    return generation if is_possible else None


def _is_live(file: QueueFile, now: int, ttl_seconds: float | None = None) -> bool:
    """Return whether a file has been renewed within its time to live, and not in the future."""
    ttl = TICKET_TTL_SECONDS if ttl_seconds is None else ttl_seconds
    return now - ttl * 1000 <= file.modified <= now + MAX_SECONDS_AHEAD * 1000


def _first_of_each_user(
    entries: Iterable[tuple[T, QueueFile]], ignored: list[IgnoredFile]
) -> Iterator[tuple[T, str]]:
    """Yield the first entries of each user, with the user; add the others to `ignored`."""
    counts: Counter[str] = Counter()
    for entry, file in entries:
        counts[file.owner] += 1
        if counts[file.owner] <= MAX_FILES_PER_USER:
            yield entry, file.owner
        else:
            ignored.append(IgnoredFile(file.name, file.owner, IgnoredReason.EXCESS))


def _live_tickets(
    tickets: Iterable[tuple[Ticket, QueueFile]], now: int
) -> Iterator[tuple[Ticket, QueueFile]]:
    """Yield the tickets that have not expired by the TTL of their rank, with their files.

    Args:
        now: milliseconds since the epoch by the NameNode's clock.
    """
    ranking = _Ranking()
    for ticket, file in tickets:
        rank = ranking.rank(ticket, file.owner)
        if _is_live(file, now, ticket_ttl_seconds(rank)):
            ranking.add(ticket, file.owner)
            yield ticket, file


_Kinds = dict[object, tuple[int, int]]


class _Ranking:
    """Ranks the tickets of a queue, in order.

    Gangs of one kind wait for the same resources: a gang is not served before those of its kind
    ahead, but freed GPUs may serve the first gang of each kind. Gangs at the limit of one queue,
    or of a user there, are of one kind. Other gangs are of one kind if they have the same size.

    The rank is the product of two positions, less one: the position of the kind, and that of the
    gang within its kind. Positions count from 1 in the order of the queue. Gangs at limits do not
    count for kinds that wait for the cluster. All kinds that wait for the cluster count as one for
    those at limits. No rank exceeds the number of gangs ahead.
    """

    def __init__(self) -> None:
        self._count = 0
        # By kind: the position of the kind, from 0 in the order in which the kinds appear, and the
        # number of its gangs.
        self._cluster_kinds: _Kinds = {}
        self._limited_kinds: _Kinds = {}

    def rank(self, ticket: Ticket, owner: str) -> int:
        """Return the rank that a ticket has behind those that were added."""
        kinds, kind, before = self._kind_of(ticket, owner)
        position, count = kinds.get(kind, (len(kinds), 0))
        return min((before + position + 1) * (count + 1) - 1, self._count)

    def add(self, ticket: Ticket, owner: str) -> None:
        kinds, kind, _ = self._kind_of(ticket, owner)
        position, count = kinds.get(kind, (len(kinds), 0))
        kinds[kind] = position, count + 1
        self._count += 1

    def _kind_of(self, ticket: Ticket, owner: str) -> tuple[_Kinds, object, int]:
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
    live |= {file.name for file in queue.ignored if file.reason is IgnoredReason.EXCESS}

    def is_stale(file: QueueFile) -> bool:
        if turn := _TURN.fullmatch(file.name) or _ASKING.fullmatch(file.name):
            return int(turn[1]) < queue.generation
        if _is_live(file, now) or file.name in live:
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
    """A decision whether to ask the cluster manager now.

    Attributes:
        may_take: whether the gang may take the turn.
        obstacle: for whom the gang waits in the queue: the gang that asks the cluster manager, or
            gangs ahead; None if it does not wait for other gangs, or does not know for which.
        is_behind: whether gangs ahead are served first; None while another gang asks the cluster
            manager, because that gang has no ticket in the queue.
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
    """Decides when a gang asks the cluster manager although it does not fit, where that can help.

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
        is_probe: whether to ask although the gang does not fit, because the cluster manager may
            preempt others or add nodes for it.
    """
    if queue.turn_holder is not None:
        return TurnDecision(False, queue.turn_holder, is_behind=None)
    ahead = queue.ahead_of(candidate.ticket)
    nodes = Counter(node_gpus)
    passes = math.inf if queue.has_unlimited_passes else MAX_PASSES
    blocking = (pair for pair in ahead if not _may_pass(candidate, *pair, nodes, passes))
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
    candidate: Candidate, ahead: Ticket, user: str, nodes: Mapping[int, int], passes: float
) -> bool:
    if ahead.bound is Bound.QUEUE and ahead.queue not in candidate.queues:
        return True
    if ahead.bound is Bound.USER and (ahead.queue, user) != (candidate.queues[0], candidate.user):
        return True
    return (
        candidate.ticket.bound is Bound.NONE
        and ahead.bound is not Bound.NONE
        and ahead.passed < passes
        and _can_fit_together((ahead, candidate.ticket), nodes)
    )


def _can_fit_together(tickets: Sequence[Ticket], nodes: Mapping[int, int]) -> bool:
    """Return whether all executors fit onto the empty nodes, if the largest are placed first.

    The time that this takes does not depend on the number of executors, which others wrote.

    Args:
        nodes: number of nodes by their number of GPUs.
    """
    free = Counter(nodes)
    for ticket in sorted(tickets, key=lambda ticket: -ticket.gpus):
        unplaced = ticket.executors
        # Use the fullest nodes, so that emptier nodes remain for large executors.
        for capacity in sorted(c for c in free if c >= ticket.gpus):
            if not ticket.gpus or not unplaced:
                break
            per_node = capacity // ticket.gpus
            full, rest = divmod(min(unplaced, per_node * free[capacity]), per_node)
            unplaced -= full * per_node + rest
            free[capacity] -= full + bool(rest)
            free[capacity - per_node * ticket.gpus] += full
            free[capacity - rest * ticket.gpus] += bool(rest)
        if unplaced and ticket.gpus:
            return False
    return True


def count_passes(ticket: Ticket, before: QueueSnapshot, now: QueueSnapshot) -> Ticket:
    """Return a ticket, with the turns added that later gangs took between two snapshots.

    Nothing is added if the gang could be granted now.
    """
    turn_count = (now.generation + 1) // 2 - (before.generation + 1) // 2
    if not turn_count or ticket.bound is Bound.NONE:
        return ticket
    # A gang that gave its turn back, because it got nothing or a part, keeps its place.
    # Another user may file a ticket with the same ID.
    turns = {(owner, other.id): other.turns for other, owner in now.tickets}

    def turns_of(tickets: Sequence[tuple[Ticket, str]]) -> int:
        return sum(turns.get((owner, t.id), t.turns + 1) - t.turns for t, owner in tickets)

    ahead = before.ahead_of(ticket)
    passes = turn_count - turns_of(ahead)
    if any((owner, other.id) not in turns for other, owner in ahead):
        # A gang ahead that left may have had several turns before the one that was granted.
        behind = before.tickets[len(ahead) :]
        passes = min(passes, turns_of([pair for pair in behind if pair[0].id != ticket.id]))
    # More makes no difference, and each change of a ticket costs the NameNode a rename.
    passed = min(ticket.passed + max(passes, 0), MAX_PASSES)
    return dataclasses.replace(ticket, passed=max(ticket.passed, passed))


def executors_to_give(
    offer: Offer,
    user: str,
    queues: Sequence[str],
    queue: QueueSnapshot,
    free: int,
    held: Mapping[tuple[str, str], int],
) -> int:
    """Return how many of an elastic gang's executors the first waiting gang needs.

    Nothing is given that cannot help. The offers and the free GPUs must suffice for that gang. An
    offered executor must have at least as many GPUs as one of the gang's. A limit that binds the
    gang must bind the elastic gang too. The largest offers give first. The places of GPUs are not
    considered, nor what is free under a limit of a queue or user.

    Args:
        user: owner of the offer.
        queues: short names of the elastic gang's queue and of all parents, its own first.
        held: the GPUs of each running application, by its ID and user. Offers of other gangs count
            only as far as their application has the GPUs.
    """
    ticket = first_ticket_to_serve(queue, user, queues)
    if ticket is None:
        return 0
    key = (user, offer.id)
    offers = {(owner, other.id): other for other, owner in queue.offers}
    offers.pop(key, None)
    offers = {**_limit_offers(offers, held), key: offer}
    return split_among_offers(ticket, offers, free).get(key, 0)


def _limit_offers(
    offers: Mapping[tuple[str, str], Offer], held: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], Offer]:
    """Return the offers of which the applications have the GPUs, by owner and ID."""
    remaining = dict(held)
    limited = {}
    for (owner, number), offer in offers.items():
        gpus = remaining.get((offer.application, owner), 0)
        executors = min(offer.executors, gpus // offer.gpus) if offer.gpus else 0
        if executors:
            remaining[offer.application, owner] = gpus - executors * offer.gpus
            limited[owner, number] = dataclasses.replace(offer, executors=executors)
    return limited


def first_ticket_to_serve(queue: QueueSnapshot, user: str, queues: Sequence[str]) -> Ticket | None:
    """Return the ticket of the first waiting gang that GPUs of a user's gang can serve."""
    waiting = ((ticket, owner) for ticket, owner in queue.tickets if not ticket.is_growth)
    return next((t for t, owner in waiting if _can_serve(t, owner, user, queues)), None)


def split_among_offers(ticket: Ticket, offers: Mapping[K, Offer], free: int) -> Mapping[K, int]:
    """Return how many executors each elastic gang gives to a waiting gang, by the offer's key."""
    is_own_limit = ticket.bound in (Bound.QUEUE, Bound.USER)
    needed = ticket.executors * ticket.gpus - (0 if is_own_limit else free)
    ordered = sorted(
        ((key, o) for key, o in offers.items() if o.gpus and o.gpus >= ticket.gpus),
        key=lambda pair: (-pair[1].executors * pair[1].gpus, pair[0]),
    )
    shares: dict[K, int] = {}
    if needed > sum(offer.executors * offer.gpus for _, offer in ordered):
        return shares
    for key, offer in ordered:
        if needed <= 0:
            break
        shares[key] = min(offer.executors, -(-needed // offer.gpus))
        needed -= shares[key] * offer.gpus
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
    promising = [(offer, owner) for offer, owner in queue.offers if offer.promised]
    phrases = [
        f"{count_of(offer.promised * offer.gpus, 'GPU')}"
        f" come{'s' * (offer.promised * offer.gpus == 1)}"
        f" from {owner}'s {offer.run!r} at its next checkpoint"
        for offer, owner in promising[:_MAX_OFFERS_LISTED]
    ]
    if len(promising) > len(phrases):
        phrases.append(f"{count_of(len(promising) - len(phrases), 'other gang')} will release more")
    return "; ".join(phrases)


def describe_excess(queue: QueueSnapshot, ticket: Ticket) -> str:
    """Return that a gang's ticket does not count yet, in words; "" if it counts."""
    excess = (f.name for f in queue.ignored if f.reason is IgnoredReason.EXCESS)
    if not any(f"-{ticket.id}-" in name for name in excess):
        return ""
    return (
        f"the queue of gangs counts the first {MAX_FILES_PER_USER} tickets of a user; others wait"
    )
