"""The gang's states and decisions: values and a clock go in, values come out.

Nothing here touches Spark, YARN, a socket or the time; `hopsgpu.backends.spark` performs what is
decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hopsgpu.core.gpu_types import has_type


class GangState(Enum):
    """Where a gang stands, and the run that has it.

    requested → preparing → waiting → granted → ready → starting → running → publishing →
    releasing → succeeded. It prepares where it has data, which is written and looked at, or a
    Python environment, which is made: no GPU is held meanwhile. It is starting until the function
    runs in all ranks, whose Python imports what the function needs. From every state before it a
    gang may go to releasing: that is the one way out, whatever happened, to succeeded, failed or
    cancelled. An executor lost between grant and ready has the gang wait again; so has a failure
    that is tried again. A launch on a gang that is held goes to finishing where others go to
    releasing. Where the gang is whole already, a launch or another attempt begins with ready.

    `hopsgpu.hold` itself shows a gang, which is no run: it ends as held, and later as released.
    """

    REQUESTED = "requested"
    PREPARING = "preparing"
    WAITING = "waiting"
    GRANTED = "granted"
    READY = "ready"
    STARTING = "starting"
    RUNNING = "running"
    PUBLISHING = "publishing"
    RELEASING = "releasing"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HELD = "held"
    RELEASED = "released"

    @property
    def is_terminal(self) -> bool:
        return self not in _NEXT


_NEXT = {
    GangState.REQUESTED: {
        GangState.PREPARING,
        GangState.WAITING,
        GangState.READY,
        GangState.FAILED,
        GangState.CANCELLED,
    },
    GangState.PREPARING: {
        GangState.WAITING,
        GangState.READY,
        GangState.FAILED,
        GangState.CANCELLED,
    },
    GangState.WAITING: {GangState.GRANTED, GangState.READY},
    GangState.GRANTED: {GangState.READY, GangState.WAITING},
    GangState.READY: {GangState.STARTING},
    # Of ranks that end soon none may be seen running.
    GangState.STARTING: {
        GangState.RUNNING,
        GangState.PUBLISHING,
        GangState.WAITING,
        GangState.READY,
    },
    GangState.RUNNING: {GangState.PUBLISHING, GangState.WAITING, GangState.READY},
    GangState.PUBLISHING: set[GangState](),
    GangState.RELEASING: {
        GangState.SUCCEEDED,
        GangState.FAILED,
        GangState.CANCELLED,
        GangState.RELEASED,
    },
    GangState.FINISHING: {
        GangState.SUCCEEDED,
        GangState.FAILED,
        GangState.CANCELLED,
        GangState.HELD,
    },
}
_WAYS_OUT = (GangState.RELEASING, GangState.FINISHING)
# Of a run, and of the acquisition of a gang that is held; its later release is none.
ENDS = (GangState.SUCCEEDED, GangState.FAILED, GangState.CANCELLED, GangState.HELD)


def may_follow(state: GangState, following: GangState) -> bool:
    """Whether a gang in `state` may go to `following`."""
    if state.is_terminal:
        return False
    if following in _WAYS_OUT:
        return state not in _WAYS_OUT
    return following in _NEXT[state]


# A part of a gang keeps others from being whole; YARN grants what it can within seconds.
PART_SECONDS = 30.0
_LEAST_LOST = 3
_LEAST_PARKED = 8
_LONGEST_BACKOFF = 30.0
# Far more than lead to the longest, and few enough for a float.
_MOST_DOUBLINGS: int = 64


class Verdict(Enum):
    """What an acquiring gang does next."""

    WAIT = "wait"
    GRANTED = "granted"
    GIVE_BACK = "give back"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Grants:
    """How far an acquiring gang has come.

    Attributes:
        connected: executors that are here.
        allotted: containers that YARN has granted, these included.
        since: the clock's reading when `allotted` last grew, or when YARN was asked.
        lost: containers that have ended again, a GPU not found, say, or Python.
        parked: executors that get no rank and are held aside, so that they do not come again.
        settled: whether all executors that are there have shown what they are.
    """

    connected: int = 0
    allotted: int = 0
    since: float = float("inf")
    lost: int = 0
    parked: int = 0
    settled: bool = True


def decide_acquire(grants: Grants, *, wanted: int, deadline: float | None, now: float) -> Verdict:
    """Whether the gang is whole, may go on waiting, or must let go of what it has.

    A gang that YARN has granted whole waits for its executors to start, however long that takes;
    one that holds a part, and got no more for 30 s, gives it back for others to be whole. So does
    one whose containers end again and again, more than it has and four at least, and one that
    holds aside more than it has, and more than the GPUs of a large node (8).

    Args:
        grants: how far it has come.
        wanted: executors the gang needs.
        deadline: the clock's reading at which the wait ends, or None.
        now: the clock's reading.
    """
    if grants.connected >= wanted and grants.settled:
        return Verdict.GRANTED
    if deadline is not None and now >= deadline:
        return Verdict.TIMED_OUT
    if grants.allotted < wanted and now - grants.since >= PART_SECONDS:
        return Verdict.GIVE_BACK
    if end_again(grants.lost, wanted) or grants.parked > max(wanted, _LEAST_PARKED):
        return Verdict.GIVE_BACK
    return Verdict.WAIT


def end_again(lost: int, wanted: int) -> bool:
    """Whether so many containers have ended before they came that others are to go first."""
    return lost > max(wanted, _LEAST_LOST)


def backoff_seconds(attempts: int, chance: float) -> float:
    """How long to let others go first, once a part was given back.

    "Full jitter": two that meet again and again part ways.

    Args:
        attempts: parts given back so far, at least 1.
        chance: a random number in [0, 1).
    """
    doublings = min(attempts, _MOST_DOUBLINGS)
    return 1.0 + chance * min(2.0**doublings, _LONGEST_BACKOFF)


@dataclass(frozen=True)
class Device:
    """A GPU, as the discovery script found it.

    Attributes:
        gpu: its address: UUID of a GPU or of a MIG device; of a lost GPU its PCI bus id.
        model: product name; "" where it is not known.
        driver: version; "" where it is not known.
        bad: why it gets no rank, or "".
    """

    gpu: str
    model: str = ""
    driver: str = ""
    bad: str = ""


@dataclass(frozen=True)
class Container:
    """An executor of a gang, as its agent introduced itself.

    Attributes:
        key: names the agent on the control channel.
        container_id: YARN's.
        host: the node's name.
        address: at which other containers reach it.
        gpus: UUIDs that the discovery script gave it, and Spark assigns.
        interface: name of the network interface that has the address; "" where it is not known.
        clock: seconds to add to what the node's clock says to have the driver's.
        devices: what is known of its GPUs.
        lacks: modules that its Python does not have, of those that ranks may need.
    """

    key: int
    container_id: str
    host: str
    address: str
    gpus: tuple[str, ...]
    interface: str = ""
    clock: float = 0.0
    devices: tuple[Device, ...] = ()
    lacks: tuple[str, ...] = ()


WORKER = "worker"
PARAMETER_SERVER = "ps"


@dataclass(frozen=True)
class RankPlace:
    """Where a process of the gang runs, in the words of torchrun.

    Attributes:
        rank: in [0, world_size) for a worker. A parameter server has no rank: here is its number
            among all processes, world_size and above, for logs and reports.
        local_rank: within its container, parameter servers after the workers.
        node_rank: of its container.
        container: that runs it.
        gpus: its own UUIDs; none for a parameter server.
        role: "worker" or "ps".
    """

    rank: int
    local_rank: int
    node_rank: int
    container: Container
    gpus: tuple[str, ...]
    role: str = WORKER


@dataclass(frozen=True)
class World:
    """All processes of a gang.

    Attributes:
        places: the workers, in the order of their ranks.
        ranks_per_container: workers in each container.
        servers: the parameter servers, in order.
    """

    places: tuple[RankPlace, ...]
    ranks_per_container: int
    servers: tuple[RankPlace, ...] = ()

    @property
    def size(self) -> int:
        """The world size: workers only."""
        return len(self.places)

    @property
    def processes(self) -> tuple[RankPlace, ...]:
        """Workers and parameter servers; each stands at its number."""
        return self.places + self.servers

    def of_container(self, key: int) -> tuple[RankPlace, ...]:
        """The processes of one container, workers first."""
        return tuple(p for p in self.processes if p.container.key == key)


def assign_ranks(
    containers: Sequence[Container], ranks_per_container: int, parameter_servers: int = 0
) -> World:
    """Ranks for containers: neighbours in rank share a node as far as possible.

    A container's GPUs are dealt to its ranks in equal, consecutive parts; where it has fewer GPUs
    than ranks, neighbours share one. Parameter servers are
    dealt one by one to the containers, from the first on.
    """
    # The containers of a node have one clock. Of its estimates, each of which is too large by the
    # time that a message took, the least is the best.
    clocks: dict[str, float] = {}
    for each in containers:
        clocks[each.host] = min(each.clock, clocks.get(each.host, each.clock))
    timed = [replace(each, clock=clocks[each.host]) for each in containers]
    ordered = sorted(timed, key=lambda c: (c.host, c.container_id, c.key))
    places = []
    for node_rank, container in enumerate(ordered):
        for local_rank in range(ranks_per_container):
            gpus = _share(container.gpus, local_rank, ranks_per_container)
            rank = node_rank * ranks_per_container + local_rank
            places.append(RankPlace(rank, local_rank, node_rank, container, gpus))
    servers = []
    for number in range(parameter_servers):
        round_, node_rank = divmod(number, len(ordered))
        local_rank = ranks_per_container + round_
        rank = len(places) + number
        server = RankPlace(rank, local_rank, node_rank, ordered[node_rank], (), PARAMETER_SERVER)
        servers.append(server)
    return World(tuple(places), ranks_per_container, tuple(servers))


def _share(gpus: Sequence[str], local_rank: int, ranks: int) -> tuple[str, ...]:
    """A rank's own of its container's GPUs."""
    each = len(gpus) // ranks
    if each or not gpus:
        return tuple(gpus[local_rank * each : (local_rank + 1) * each])
    return (gpus[local_rank * len(gpus) // ranks],)


@dataclass(frozen=True)
class Avoid:
    """What gets no rank, because an earlier attempt failed by its fault.

    Attributes:
        gpus: host and UUID of each.
        hosts: names of nodes.
    """

    gpus: frozenset[tuple[str, str]] = frozenset()
    hosts: frozenset[str] = frozenset()

    def __or__(self, other: Avoid) -> Avoid:
        return Avoid(self.gpus | other.gpus, self.hosts | other.hosts)

    def __str__(self) -> str:
        return ", ".join(
            [*(f"{gpu} of {host}" for host, gpu in sorted(self.gpus)), *sorted(self.hosts)]
        )

    @property
    def is_any(self) -> bool:
        """Whether there is anything to avoid."""
        return bool(self.gpus or self.hosts)

    def reason(self, container: Container) -> str | None:
        """Which part of a container is to be avoided, or None."""
        if gpus := {gpu for _, gpu in self.gpus}.intersection(container.gpus):
            return f"{', '.join(sorted(gpus))} of {container.host} failed an earlier attempt"
        if container.host in self.hosts:
            return f"{container.host} failed an earlier attempt"
        return None


def unwanted(container: Container, avoid: Avoid, gpu_type: str | None) -> str | None:
    """Why a container gets no rank: its GPU is to blame, bad or of another type; None if it may."""
    if (blamed := avoid.reason(container)) is not None:
        return blamed
    for device in container.devices:
        if device.bad:
            return f"{device.gpu} of {container.host} is bad: {device.bad}"
        if gpu_type is not None and not has_type(device.model, gpu_type):
            model = device.model or "a GPU that tells no name"
            return f"{container.host} has {model}, not {gpu_type!r}"
    return None


def duplicate_gpu(containers: Sequence[Container]) -> tuple[str, Container, Container] | None:
    """The first (UUID, container, container) of a GPU that two containers were given."""
    owner: dict[str, Container] = {}
    for container in containers:
        for gpu in container.gpus:
            if gpu in owner:
                return gpu, owner[gpu], container
            owner[gpu] = container
    return None


def shared_hosts(containers: Iterable[Container]) -> tuple[str, ...]:
    """Hosts that have more than one of the containers, sorted."""
    counts = Counter(container.host for container in containers)
    return tuple(sorted(host for host, count in counts.items() if count > 1))
