"""The states and decisions of a gang, as pure functions of values and of a clock's reading.

Nothing here uses Spark, YARN, a socket or the time; `hopsgpu.backends.spark` carries out what is
decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hopsgpu.core.gpu_names import has_type, is_slice


class GangState(Enum):
    """The state of a gang, and of the run that has it.

    requested → preparing → waiting → granted → ready → starting → running → publishing →
    releasing → succeeded.

    - preparing: data is written and inspected, or a Python environment is built, without a GPU.
    - starting: until the function runs in all ranks, which import its modules before.
    - releasing: the only way out once executors were requested. It follows every earlier state, and
      leads to succeeded, failed or cancelled. Before the request, a gang may end directly.
    - finishing: instead of releasing, for a launch on a held gang.

    The gang waits again if an executor is lost between granted and ready, or a failure is retried.
    A launch or attempt on a whole gang begins with ready. `hopsgpu.hold` itself shows a gang, which
    is not a run: it ends as held, and later as released.
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


_RUN_ENDS = (GangState.SUCCEEDED, GangState.FAILED, GangState.CANCELLED)
_RETRY = (GangState.WAITING, GangState.READY)
_AFTER_PREPARING = (*_RETRY, GangState.FAILED, GangState.CANCELLED)
_NEXT = {
    GangState.REQUESTED: (GangState.PREPARING, *_AFTER_PREPARING),
    GangState.PREPARING: _AFTER_PREPARING,
    GangState.WAITING: (GangState.GRANTED, GangState.READY),
    GangState.GRANTED: (GangState.READY, GangState.WAITING),
    GangState.READY: (GangState.STARTING,),
    # Ranks that end soon may never be seen running.
    GangState.STARTING: (GangState.RUNNING, GangState.PUBLISHING, *_RETRY),
    GangState.RUNNING: (GangState.PUBLISHING, *_RETRY),
    # An elastic gang that lost an executor meanwhile trains again from its latest checkpoint.
    GangState.PUBLISHING: _RETRY,
    GangState.RELEASING: (*_RUN_ENDS, GangState.RELEASED),
    GangState.FINISHING: (*_RUN_ENDS, GangState.HELD),
}
_ENDING_STATES = (GangState.RELEASING, GangState.FINISHING)
# The ends of a run, and of the acquisition of a held gang; the gang's later release is no end.
ENDS = (*_RUN_ENDS, GangState.HELD)


def may_follow(state: GangState, following: GangState) -> bool:
    if state.is_terminal:
        return False
    if following in _ENDING_STATES:
        return state not in _ENDING_STATES
    return following in _NEXT[state]


# A partial allocation keeps other gangs from being whole, and the cluster manager grants what it
# can in seconds.
PART_SECONDS = 30.0
_MIN_LOST = 3
_MIN_PARKED = 8
_MAX_BACKOFF_SECONDS = 30.0
# More than the longest backoff needs, and few enough for a float.
_MAX_DOUBLINGS: int = 64


class Verdict(Enum):
    """The next step of a gang that acquires its executors."""

    WAIT = "wait"
    GRANTED = "granted"
    GIVE_BACK = "give back"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class AcquisitionProgress:
    """The progress of a gang that acquires its executors.

    Attributes:
        connected: executors that are connected to the driver.
        granted: containers that the cluster manager has granted, including the connected ones.
        since: the clock's reading when `granted` last grew, or when the cluster manager was asked.
        lost: containers that ended, for example because they found no GPU or no Python.
        parked: executors that get no rank and are kept, so that the cluster manager does not grant
            them again.
        is_settled: whether every executor has introduced itself.
    """

    connected: int = 0
    granted: int = 0
    since: float = float("inf")
    lost: int = 0
    parked: int = 0
    is_settled: bool = True


def decide_acquire(
    progress: AcquisitionProgress, *, wanted: int, deadline: float | None, now: float
) -> Verdict:
    """Decide whether the gang is whole, continues to wait, or must release its partial allocation.

    If the cluster manager has granted the whole gang, the gang waits for its executors to start,
    however long that takes. The partial allocation is released, so that other gangs can
    be whole, if

    - the cluster manager has granted nothing more for 30 s,
    - more containers have ended than the gang needs, and at least four, or
    - more executors are parked than the gang needs, and more than a large node has GPUs (8).
    """
    if progress.connected >= wanted and progress.is_settled:
        return Verdict.GRANTED
    if deadline is not None and now >= deadline:
        return Verdict.TIMED_OUT
    if progress.granted < wanted and now - progress.since >= PART_SECONDS:
        return Verdict.GIVE_BACK
    if is_failing_repeatedly(progress.lost, wanted) or progress.parked > max(wanted, _MIN_PARKED):
        return Verdict.GIVE_BACK
    return Verdict.WAIT


def is_failing_repeatedly(lost: int, wanted: int) -> bool:
    """Return whether so many containers have ended that other gangs go first.

    Args:
        lost: containers that ended before they arrived.
    """
    return lost > max(wanted, _MIN_LOST)


def backoff_seconds(attempts: int, chance: float) -> float:
    """Return for how many seconds other gangs go first, after a partial allocation was released.

    The "full jitter" separates two gangs that collide repeatedly; `chance` is random in [0, 1).
    """
    doublings = min(attempts, _MAX_DOUBLINGS)
    return 1.0 + chance * min(2.0**doublings, _MAX_BACKOFF_SECONDS)


@dataclass(frozen=True)
class Device:
    """A GPU, as the discovery script found it; what is unknown is "".

    Attributes:
        gpu: its address: the UUID of a GPU or of a MIG device, or the PCI bus id of a lost GPU.
        bad: why the GPU gets no rank.
        parent: address of the GPU of which it is a MIG device; "" for a whole GPU.
    """

    gpu: str
    model: str = ""
    driver: str = ""
    bad: str = ""
    parent: str = ""


@dataclass(frozen=True)
class GangExecutor:
    """An executor of a gang, as its agent introduced itself.

    Attributes:
        key: identifies the agent on the control channel.
        container_id: the ID that the cluster manager gave.
        address: address at which other containers reach it.
        gpus: UUIDs that the discovery script gave it, and that Spark assigns.
        interface: network interface of the address; "" if it is unknown.
        clock: seconds to add to the node's clock to get the driver's.
        missing_modules: modules that ranks may need and that its Python does not have.
    """

    key: int
    container_id: str
    host: str
    address: str
    gpus: tuple[str, ...]
    interface: str = ""
    clock: float = 0.0
    devices: tuple[Device, ...] = ()
    missing_modules: tuple[str, ...] = ()


WORKER = "worker"
PARAMETER_SERVER = "ps"


@dataclass(frozen=True)
class RankPlacement:
    """The place where a process of the gang runs, in torchrun's terms.

    Attributes:
        rank: in [0, world_size) for a worker. A parameter server has no rank: this is its number
            among all processes, world_size or above, for logs and reports.
        local_rank: number within its container, parameter servers after the workers.
        node_rank: number of its container.
        gpus: UUIDs of its own GPUs; none for a parameter server.
        role: "worker" or "ps".
    """

    rank: int
    local_rank: int
    node_rank: int
    container: GangExecutor
    gpus: tuple[str, ...]
    role: str = WORKER


@dataclass(frozen=True)
class World:
    """All processes of a gang.

    Attributes:
        places: the workers, in the order of their ranks.
        servers: the parameter servers, in order.
    """

    places: tuple[RankPlacement, ...]
    ranks_per_container: int
    servers: tuple[RankPlacement, ...] = ()

    @property
    def size(self) -> int:
        """Return the world size, which counts only workers."""
        return len(self.places)

    @property
    def processes(self) -> tuple[RankPlacement, ...]:
        """Return workers and parameter servers, each at the index that is its number."""
        return self.places + self.servers

    def of_container(self, key: int) -> tuple[RankPlacement, ...]:
        """Return the processes of one container, workers first."""
        return tuple(p for p in self.processes if p.container.key == key)


def assign_ranks(
    containers: Sequence[GangExecutor], ranks_per_container: int, parameter_servers: int = 0
) -> World:
    """Assign ranks to containers, so that neighbouring ranks share a node as far as possible.

    A container's GPUs are dealt to its ranks in equal, consecutive parts; if it has fewer GPUs than
    ranks, neighbours share one. Parameter servers are dealt one by one to the containers, from the
    first on.
    """
    # The containers of a node share a clock. Each estimated offset is too large by the time that
    # a message took, so the smallest estimate is the best.
    clocks: dict[str, float] = {}
    for container in containers:
        offset = min(container.clock, clocks.get(container.host, container.clock))
        clocks[container.host] = offset
    timed = [replace(container, clock=clocks[container.host]) for container in containers]
    ordered = sorted(timed, key=lambda c: (c.host, c.container_id, c.key))
    places = []
    for node_rank, container in enumerate(ordered):
        for local_rank in range(ranks_per_container):
            gpus = _share(container.gpus, local_rank, ranks_per_container)
            rank = node_rank * ranks_per_container + local_rank
            places.append(RankPlacement(rank, local_rank, node_rank, container, gpus))
    servers = []
    for number in range(parameter_servers):
        round_, node_rank = divmod(number, len(ordered))
        local_rank = ranks_per_container + round_
        rank = len(places) + number
        server = RankPlacement(
            rank, local_rank, node_rank, ordered[node_rank], (), PARAMETER_SERVER
        )
        servers.append(server)
    return World(tuple(places), ranks_per_container, tuple(servers))


def _share(gpus: Sequence[str], local_rank: int, ranks: int) -> tuple[str, ...]:
    count = len(gpus) // ranks
    if count or not gpus:
        return tuple(gpus[local_rank * count : (local_rank + 1) * count])
    return (gpus[local_rank * len(gpus) // ranks],)


@dataclass(frozen=True)
class Exclusions:
    """The GPUs and nodes that get no rank, because they made an earlier attempt fail.

    Attributes:
        gpus: host and UUID of each GPU.
    """

    gpus: frozenset[tuple[str, str]] = frozenset()
    hosts: frozenset[str] = frozenset()

    def __or__(self, other: Exclusions) -> Exclusions:
        return Exclusions(self.gpus | other.gpus, self.hosts | other.hosts)

    def __str__(self) -> str:
        return ", ".join(
            [*(f"{gpu} of {host}" for host, gpu in sorted(self.gpus)), *sorted(self.hosts)]
        )

    @property
    def is_any(self) -> bool:
        return bool(self.gpus or self.hosts)

    def reason(self, container: GangExecutor) -> str | None:
        if gpus := {gpu for _, gpu in self.gpus}.intersection(container.gpus):
            return f"{', '.join(sorted(gpus))} of {container.host} failed an earlier attempt"
        if container.host in self.hosts:
            return f"{container.host} failed an earlier attempt"
        return None


def exclusion_reason(
    container: GangExecutor, exclusions: Exclusions, gpu_type: str | None, gpus_per_rank: float
) -> str | None:
    """Return why a container gets no rank, or None if it may get one."""
    if (blamed := exclusions.reason(container)) is not None:
        return blamed
    for device in container.devices:
        if device.bad:
            return f"{device.gpu} of {container.host} is bad: {device.bad}"
        if gpu_type is not None and not has_type(device.model, gpu_type):
            model = device.model or "a GPU without a product name"
            return f"{container.host} has {model}, not {gpu_type!r}"
        if gpus_per_rank > 1 and (device.parent or is_slice(device.model)):
            return (
                f"{container.host} has MIG devices, of which a CUDA process uses one, and each rank"
                f" requests {gpus_per_rank:g} GPUs"
            )
    return None


def duplicate_gpu(
    containers: Sequence[GangExecutor],
) -> tuple[str, GangExecutor, GangExecutor] | None:
    """Return the first GPU that two containers have, as (UUID, container, container), or None."""
    owner: dict[str, GangExecutor] = {}
    for container in containers:
        for gpu in container.gpus:
            if gpu in owner:
                return gpu, owner[gpu], container
            owner[gpu] = container
    return None


def slices_of_one_gpu(world: World) -> tuple[str, RankPlacement, RankPlacement] | None:
    """Return the first two ranks that have different MIG devices of one GPU, or None.

    Returns:
        The GPU's address, and the two ranks.
    """
    parents = {
        device.gpu: device.parent for place in world.places for device in place.container.devices
    }
    # An address may be a bus id, which other hosts have too.
    first_ranks: dict[tuple[str, str], RankPlacement] = {}
    for place in world.places:
        for gpu in place.gpus:
            parent = parents.get(gpu, "")
            first = first_ranks.setdefault((place.container.host, parent), place)
            if parent and gpu not in first.gpus:
                return parent, first, place
    return None


def shared_hosts(containers: Iterable[GangExecutor]) -> tuple[str, ...]:
    """Return the hosts that have more than one of the containers, sorted."""
    counts = Counter(container.host for container in containers)
    return tuple(sorted(host for host, count in counts.items() if count > 1))
