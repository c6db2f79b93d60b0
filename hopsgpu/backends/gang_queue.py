"""The queue of gangs: files of a directory on which `hopsgpu.core.queue_policy` decides."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from hopsgpu.backends.queue_directory import GangQueueDirectory, GangQueueRoot
from hopsgpu.core.queue_policy import (
    MAX_TURNS,
    Bound,
    Candidate,
    Offer,
    QueueFile,
    QueueSnapshot,
    Ticket,
    TurnDecision,
    asking_name,
    count_passes,
    decide_turn,
    executors_to_give,
    queue_tag,
    read_queue,
    renewal_seconds,
    stale_files,
    turn_name,
)
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, FileStatus, LakePath

log = logging.getLogger(__name__)

_SHARED = 0o1777
# Number of ignored files that a log names; other users can make any number.
_MAX_LOGGED = 20
# A reader reads this many: all users may make directories beside those of the partitions.
_MAX_PARTITIONS = 100
# The directory of the queue for nodes without a label.
DEFAULT_PARTITION = "default"
# A time that a reader saw is ignored after this many seconds, because a clock may be set back.
_REMEMBERED_SECONDS = 120.0


class _IgnoredLog:
    """Names each ignored file once in the log, up to a number of files."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def record(self, snapshot: QueueSnapshot) -> None:
        for file in snapshot.ignored:
            if len(self._logged) >= _MAX_LOGGED:
                return
            if file.name not in self._logged:
                self._logged.add(file.name)
                log.info("ignores a file in the queue of gangs: %s", file)
                if len(self._logged) == _MAX_LOGGED:
                    log.info("names no further ignored files in the queue of gangs")


class QueueMember:
    """One gang in the queue of gangs; use `queued`, which leaves the queue on every path.

    Args:
        application: YARN's ID.
        is_growth: whether a running search or gang requests more executors.

    Attributes:
        ticket: the ticket that the other gangs read.
        has_ticket: whether the ticket is in the queue; that of the gang with the turn is not.
        rank: the gang's rank at its last poll, which determines when to poll next.
        last_snapshot: the queue when the gang last asked for the turn; None if it has not yet.
        owner: the user, by the lake's name.
    """

    def __init__(
        self,
        directory: GangQueueDirectory,
        *,
        application: str,
        executors: int,
        gpus: int,
        is_growth: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self.last_snapshot: QueueSnapshot | None = None
        self.rank = 0
        self.has_ticket = False
        # Name of the gang's own file: its draft, its ticket or its turn.
        self._name = ""
        self._turn: int | None = None
        # The NameNode's clock minus ours, in milliseconds.
        self._clock_offset = 0.0
        self._renewed = float("-inf")
        self._ignored = _IgnoredLog()
        self.owner = ""
        self.ticket = Ticket(
            filed=0,
            id=secrets.token_hex(4),
            is_growth=is_growth,
            executors=executors,
            gpus=gpus,
            queue=queue_tag(""),
            bound=Bound.NONE,
            passed=0,
            application=application,
        )

    def request_turn(
        self,
        bound: Bound,
        queue: str,
        queues: tuple[str, ...],
        node_gpus: Sequence[int],
        is_probe: bool,
    ) -> TurnDecision:
        """Read the queue, file or update the ticket, and take the turn if the gang may.

        Args:
            bound: the limit that keeps the gang from being granted now.
            queue: short name of the YARN queue whose limit that is, else of the gang's own.
            queues: short names of its queue and of all parents of that queue, its own first.
            node_gpus: number of all GPUs of each node, used or not.

        Returns:
            The decision; its `may_take` says whether the gang has the turn now.
        """
        ticket = dataclasses.replace(self.ticket, bound=bound, queue=queue)
        if not self.has_ticket:
            self.file_ticket(ticket)
        snapshot = self._read_with_own_ticket()
        ticket = dataclasses.replace(ticket, filed=self.ticket.filed)
        self.update_ticket(count_passes(ticket, self.last_snapshot or snapshot, snapshot))
        self.last_snapshot = snapshot
        self._update_rank(snapshot)
        candidate = Candidate(self.ticket, self.owner, queues)
        decision = decide_turn(candidate, snapshot, node_gpus, is_probe)
        if decision.may_take and not self.take_turn(snapshot):
            return TurnDecision(False)
        return decision

    def file_ticket(self, ticket: Ticket) -> None:
        """Put the ticket into the queue, or back into it at the same place."""
        self.give_back_turn()
        # The gang's own turns do not count as other gangs that passed it.
        self.last_snapshot = None
        self._name = f"draft-{self.ticket.id}"
        self._renew()
        status = (self._directory / self._name).stat()
        self._set_clock(status.modified, status.owner)
        self.ticket = dataclasses.replace(ticket, filed=ticket.filed or status.modified)
        self.has_ticket = self._rename(self.ticket.name)

    def poll(self) -> QueueSnapshot:
        """Return the queue as it is now; renew the gang's own file if that is due."""
        snapshot = self._read_with_own_ticket()
        self._update_rank(snapshot)
        return snapshot

    def renew_turn(self) -> bool:
        """Renew the turn if that is due; return False if it expired and another gang took it."""
        if self._turn is None or not self._is_due(0):
            return True
        self._renew()
        return self._read().generation <= self._turn

    def update_ticket(self, ticket: Ticket) -> None:
        """Replace the ticket by one with another bound or number of passes."""
        if ticket == self.ticket:
            return
        if not self._rename(ticket.name):
            # Another user has made a file with the new name, which can be guessed: an ID cannot.
            ticket = dataclasses.replace(ticket, id=secrets.token_hex(4))
            self._rename(ticket.name)
        self.ticket = ticket

    def take_turn(self, snapshot: QueueSnapshot) -> bool:
        """Take the turn; return False if another gang was quicker.

        The ticket may then have to be filed again.
        """
        generation = snapshot.next_generation
        self._renew()
        if not self._rename(turn_name(generation)):
            return False
        self.has_ticket, self._turn = False, generation
        if self._read().generation > generation:
            # Other gangs have had turns since `snapshot`, up to a higher generation.
            self._turn = None
            self._remove()
            return False
        turns = min(self.ticket.turns + 1, MAX_TURNS)
        self.ticket = dataclasses.replace(self.ticket, turns=turns)
        # The file only tells people who asks; another user may own a file with this name.
        with contextlib.suppress(StoreError):
            self._touch(asking_name(generation, self.ticket.application))
        return True

    def give_back_turn(self) -> None:
        """Give the turn back, so that the next gang can ask."""
        if self._turn is None:
            return
        turn = self._turn
        self._rename(turn_name(turn + 1))
        self._name, self._turn = "", None
        with contextlib.suppress(StoreError):  # another user may own a file with this name
            (self._directory / asking_name(turn, self.ticket.application)).remove()

    def leave(self) -> None:
        """Leave the queue; also remove the files of dead applications of the same user."""
        self.give_back_turn()
        self.has_ticket = False
        self._remove()
        if self.owner:
            for name in stale_files(self._files(), self.owner, self._now()):
                (self._directory / name).remove()

    def _read_with_own_ticket(self) -> QueueSnapshot:
        """Return the queue with the gang's own ticket in it.

        Renew the ticket if that is due or the ticket is missing. It expires early if many gangs
        ahead leave at once; another gang of the same user may then remove it.
        """
        if self._is_due(self.rank):
            self._renew()
        files = self._files()
        if self.has_ticket and all(file.name != self._name for file in files):
            self._renew()
        snapshot = read_queue(files, self._now())
        self._ignored.record(snapshot)
        return snapshot

    def _update_rank(self, snapshot: QueueSnapshot) -> None:
        """Set the rank; renew the ticket if that is due at the new rank."""
        self.rank = snapshot.rank_of(self.ticket, self.owner)
        if self._is_due(self.rank):
            self._renew()

    def _read(self) -> QueueSnapshot:
        return read_queue(self._files(), self._now())

    def _files(self) -> list[QueueFile]:
        """Return all files; learn the NameNode's clock from the gang's own file."""
        files = _files_in(self._directory)
        for file in files:
            if file.name == self._name:
                self._set_clock(file.modified, file.owner)
        return files

    def _set_clock(self, modified: int, owner: str) -> None:
        self.owner = owner
        self._clock_offset = modified - self._renewed * 1000

    def _now(self) -> int:
        """Return the NameNode's time in milliseconds since the epoch.

        The basis is the last renewal of the gang's own file. The result may be late by the duration
        of that renewal, but never early: a slow lake does not let other gangs expire.
        """
        return int(self._clock() * 1000 + self._clock_offset)

    def _is_due(self, rank: int) -> bool:
        return self._clock() - self._renewed >= renewal_seconds(rank)

    def _renew(self) -> None:
        """Touch the gang's own file; the next listing has the NameNode's time of this."""
        self._touch(self._name)
        self._renewed = self._clock()

    def _touch(self, name: str) -> None:
        (self._directory / name).write(b"")

    def _rename(self, name: str) -> bool:
        is_renamed = (self._directory / self._name).rename(self._directory / name)
        if is_renamed:
            self._name = name
        return is_renamed

    def _remove(self) -> None:
        if self._name:
            (self._directory / self._name).remove()
            self._name = ""


class StandingOffer:
    """An elastic gang's offer in the queue of gangs. All methods may raise StoreError."""

    def __init__(
        self, directory: GangQueueDirectory, *, application: str, gpus: int, run: str
    ) -> None:
        self._directory = directory
        self._name = ""
        self._offer = Offer(secrets.token_hex(4), 0, gpus, 0, queue_tag(""), application, run)

    def renew(
        self,
        executors: int,
        promised: int,
        queues: Sequence[str],
        free: int,
        held: Mapping[tuple[str, str], int],
    ) -> int:
        """Put up or renew the offer; return how many of its executors waiting gangs need.

        Args:
            promised: how many executors it releases at its next checkpoint.
            queues: short names of its queue and of all parents of that queue, its own first.
            held: the GPUs of each running application, by its ID and user.
        """
        offer = dataclasses.replace(
            self._offer, executors=executors, promised=promised, queue=queues[0]
        )
        file, self._name, before = self._directory / offer.name, offer.name, self._name
        file.write(b"")
        if before not in ("", offer.name):
            (self._directory / before).remove()
        status = file.stat()
        snapshot = read_queue(_files_in(self._directory), status.modified)
        return executors_to_give(offer, status.owner, queues, snapshot, free, held)

    def withdraw(self) -> None:
        if self._name:
            (self._directory / self._name).remove()
            self._name = ""


class GangQueueReader:
    """Reads the queues of gangs of a cluster, without taking part in them.

    A reader touches no file, so it learns the NameNode's clock only from others. Each renewal of a
    file sets the time of the queue's directory. The clock is at least at the newest such time of
    the last minutes, plus our clock's progress since. A dead gang may therefore be listed for
    longer by a new reader. The files' own times say nothing about the clock, because their owners
    may set them.

    Args:
        directory: the directory that has one for each cluster partition.
        find_partitions: returns the names of the cluster's partitions. It is called only if there
            are more directories than are read.
        wall_clock: returns the seconds since the epoch, by the clock of a local directory.
    """

    def __init__(
        self,
        directory: GangQueueRoot,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        find_partitions: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._directory = directory
        self._find_partitions = find_partitions
        self._clock = clock
        self._wall_clock = wall_clock
        self._ignored = _IgnoredLog()
        # By partition: readings of our clock, and the NameNode's lead over it, in ms.
        self._ahead: dict[str, deque[tuple[float, float]]] = defaultdict(deque)

    def read(self) -> tuple[Mapping[str, tuple[QueueSnapshot, int]], Sequence[str]]:
        """Return the queues by partition, and which directories the reader could not read.

        Each queue comes with the NameNode's time in milliseconds. If the directory does not exist,
        there are no queues: no gang has waited yet.

        Raises:
            StoreError: the lake refused.
        """
        queues: dict[str, tuple[QueueSnapshot, int]] = {}
        partitions, problems = self._partitions()
        for name, modified in partitions:
            try:
                files = _files_in(self._directory / name)
            except StoreError as error:
                if error.kind == PERMISSION:
                    problems.append(str(error))
                elif error.kind != ABSENT:  # the directory was removed after it was listed
                    raise
                continue
            now = self._filesystem_time_ms(name, modified)
            queues[name] = read_queue(files, now), now
            self._ignored.record(queues[name][0])
        for name in self._ahead.keys() - queues.keys():
            del self._ahead[name]
        return queues, problems

    def _partitions(self) -> tuple[list[tuple[str, int]], list[str]]:
        """Return each queue's directory and when it was last changed, in ms; and the problems."""
        try:
            entries = self._directory.entries()
        except StoreError as error:
            if error.kind == ABSENT:
                return [], []
            raise
        # Anybody may create directories here; a partition never has an unfit name.
        fit = [e for e in entries if e.is_directory and not UNSAFE_CHARACTERS.search(e.name)]
        problems = []
        if len(fit) > _MAX_PARTITIONS:
            problems.append(
                f"{self._directory.url} has {len(fit)} directories, and only {_MAX_PARTITIONS} of"
                " them are read: remove those that are no partition of the cluster"
            )
            fit = _fairest_first(fit, self._partition_names(problems))[:_MAX_PARTITIONS]
        return sorted((e.name, e.modified) for e in fit), problems

    def _partition_names(self, problems: list[str]) -> Collection[str]:
        try:
            return {DEFAULT_PARTITION, *self._find_partitions()}
        except HopsGpuError as error:
            problems.append(f"the partitions of the cluster are unknown: {error}")
            return {DEFAULT_PARTITION}

    def _filesystem_time_ms(self, partition: str, modified: int) -> int:
        """Return the time of the file system in milliseconds.

        Args:
            partition: name of a queue's directory. Anybody may have made a directory and set its
                time, so each has a clock of its own.
        """
        now = self._clock() * 1000
        # The renewal of a file does not change the time of a local directory.
        seen = self._wall_clock() * 1000 if self._directory.is_local else modified
        ahead = self._ahead[partition]
        ahead.append((now, seen - now))
        while ahead[0][0] < now - _REMEMBERED_SECONDS * 1000:
            ahead.popleft()
        return int(now + max(offset for _, offset in ahead))


def _fairest_first(directories: Sequence[FileStatus], first: Collection[str]) -> list[FileStatus]:
    """Return directories in an order in which no user's directories hide those of others. Pure.

    Args:
        first: names that come first. The other directories follow in turns of their owners.
    """
    turns: Counter[str] = Counter()
    order = []
    for entry in sorted(directories, key=lambda entry: entry.name):
        turns[entry.owner] += 1
        order.append((entry.name not in first, turns[entry.owner], entry.name, entry))
    return [entry for *_, entry in sorted(order, key=lambda item: item[:3])]


def _files_in(directory: GangQueueDirectory) -> list[QueueFile]:
    return [QueueFile(s.name, s.modified, s.owner) for s in directory.entries()]


def make_queue_dir(base: LakePath, *names: str) -> LakePath:
    """Return the directory of a queue of gangs; create it for all users if it does not exist.

    The directory is sticky, so that nobody can remove or rename another user's files. The mode of
    a directory that exists is its owner's.
    """
    directory = base
    for name in names:
        directory = directory / name
        if directory.exists():
            continue
        directory.make()
        # If another user has just made the directory, that user is about to set the bits.
        with contextlib.suppress(StoreError):
            directory.set_mode(_SHARED)
    return directory


@contextlib.contextmanager
def queued(member: QueueMember) -> Iterator[QueueMember]:
    try:
        yield member
    finally:
        with contextlib.suppress(StoreError):  # a ticket that stays expires
            member.leave()
