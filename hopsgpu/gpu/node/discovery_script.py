"""The discovery script: it reports to Spark which GPUs an executor may use.

Spark runs `gpus-N` of the archive that `hopsgpu.gpu.script_archive` packs, in the container's
directory and without arguments. N is the number of GPUs to give out; `gpus-1-PROFILE` prefers MIG
devices of a profile. The script needs Python 3.6 and the NVIDIA driver, but no installed hopsgpu.

The script prints `{"name": "gpu", "addresses": [UUID, …]}` for Spark: exactly N addresses, those of
healthy GPUs first. For the agent, it describes the GPUs in a file of the container's directory. If
there is no better GPU, the script gives out a bad one, or one that another process computes on.
YARN counts such a GPU too: if the executor failed because of it, its successors would fail again.
"""

import contextlib
import functools
import json
import os
import pwd
import sys
import time
from pathlib import Path
from typing import (
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Sequence,
    Set,
    Tuple,
)

from hopsgpu.core.gpu_names import has_type
from hopsgpu.gpu.node.devices import (
    ANSWER_SECONDS,
    DriverError,
    GpuDevice,
    GpuProcess,
    Listing,
    list_devices,
)
from hopsgpu.gpu.node.health import BAD, Readings
from hopsgpu.gpu.node.lease_keeper import Ancestor, WatchedProcess, ancestors, start_keepers
from hopsgpu.gpu.node.leases import (
    VARIABLE,
    LeaseError,
    Leases,
    lease_directory,
    owner,
    read_leases,
)

CONTAINER_GPUS = "hopsgpu-gpus.json"
OWN_LEASES = "hopsgpu-gpu-leases"
_POLL_SECONDS = 0.3
_MAX_LISTED_PROCESSES = 5
_JAVA = "java"
_SHELLS = frozenset(("sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"))


class DiscoveryFailure(Exception):
    """The reason why no GPU is given out; Spark logs it and gives up the executor."""


class WaitLimits(NamedTuple):
    """The longest waits, in seconds.

    Attributes:
        leased: wait for a GPU that another executor has leased. The ResourceManager can free a GPU
            before the process that used it has ended.
        busy: wait for the end of a process without a lease, before its GPU counts as bad.
        bad: wait before a bad GPU is taken while another executor has a better one.
        driver: wait for the driver's answer.
    """

    leased: float = 20.0
    busy: float = 5.0
    bad: float = 5.0
    driver: float = ANSWER_SECONDS


DEFAULT_LIMITS = WaitLimits()


def choose_gpus(
    devices: Sequence[GpuDevice],
    leased: Collection[str],
    busy: Collection[str],
    should_take_bad: bool,
    gpu_type: str = "",
) -> List[str]:
    """Return the addresses to try to lease, the best first.

    The first MIG device of each GPU precedes the second ones: NCCL does not connect ranks on MIG
    devices of one GPU.

    Args:
        leased: addresses that this process has leased already.
        should_take_bad: whether to take a bad GPU while another executor has a better one.
        gpu_type: words of the product name that the gang requests; "" for any GPU.
    """
    numbers = numbers_in_parents(devices)
    free = sorted(
        (gpu for gpu in devices if gpu.address not in leased and gpu.address not in busy),
        key=lambda gpu: (
            bool(gpu_type) and not has_type(gpu.name, gpu_type),
            gpu.badness,
            numbers[gpu.address],
        ),
    )
    better = [gpu.address for gpu in free if gpu.verdict.state != BAD]
    bad = [gpu.address for gpu in free if gpu.verdict.state == BAD]
    return better + bad if should_take_bad or not better else better


def numbers_in_parents(devices: Sequence[GpuDevice]) -> Dict[str, int]:
    """Return the number of each device among the MIG devices of its GPU; 0 for whole GPUs."""
    counts: Dict[str, int] = {}
    numbers = {}
    for gpu in devices:
        numbers[gpu.address] = counts.get(gpu.parent, 0) if gpu.parent else 0
        counts[gpu.parent] = counts.get(gpu.parent, 0) + 1
    return numbers


def processes_on_leased(
    devices: Iterable[GpuDevice], leased: Collection[str]
) -> Dict[str, Tuple[GpuProcess, ...]]:
    """Return the processes that compute on leased GPUs, by address.

    Bad GPUs do not count, because no rank will compute on them.
    """
    return {
        gpu.address: gpu.processes
        for gpu in devices
        if gpu.address in leased and gpu.processes and gpu.verdict.state != BAD
    }


def acquire_gpus(
    amount: int,
    leases: Leases,
    list_gpus: Callable[[], Listing],
    limits: WaitLimits,
    environ: Mapping[str, str],
    gpu_type: str = "",
) -> Tuple[List[GpuDevice], bool]:
    """Lease GPUs that nobody else has leased and nobody else computes on.

    If there are too few, GPUs that others compute on are given out as bad ones. If there are too
    few of the type, GPUs of other types are given out.

    Returns:
        Exactly `amount` GPUs, the healthy ones first, and whether the container is isolated.

    Raises:
        DiscoveryFailure: there are too few GPUs; the message says which there are and who has them.
    """
    began = time.monotonic()
    listing = list_gpus()
    in_use_since: Dict[str, float] = {}
    busy: Dict[str, Tuple[GpuProcess, ...]] = {}
    log = _WaitLog()
    while True:
        should_take_bad = time.monotonic() - began >= limits.bad
        chosen = choose_gpus(listing.devices, leases.addresses, busy, should_take_bad, gpu_type)
        _take(leases, chosen, amount)
        is_hopeless = len(listing.devices) - len(busy) - len(leases.refused) < amount
        if is_hopeless or time.monotonic() - began >= limits.leased:
            # Take the busy GPUs as bad ones: an executor's successor would get them again.
            _take(leases, busy, amount)
            if len(leases.addresses) < amount:
                raise DiscoveryFailure(_shortage(amount, listing, leases, busy, environ))
        if len(leases.addresses) == amount:
            # List the GPUs again, now that no other executor can start anything on these.
            listing = list_gpus()
            leased = set(leases.addresses)
            gpus = [_with_use(gpu, busy) for gpu in listing.devices if gpu.address in leased]
            processes_by_gpu = processes_on_leased(gpus, leased)
            if len(gpus) == amount and not processes_by_gpu:
                return sorted(gpus, key=lambda gpu: gpu.badness), listing.is_isolated
            for address in leased.difference(gpu.address for gpu in gpus):
                leases.release(address)  # the GPU fell off the bus
            for address, processes in processes_by_gpu.items():
                log.log_once(address, functools.partial(_busy_text, address, processes))
                since = in_use_since.setdefault(address, time.monotonic())
                if time.monotonic() - since >= limits.busy:
                    leases.release(address)
                    busy[address] = processes
        else:
            reason = functools.partial(_shortage, amount, listing, leases, busy, environ)
            log.log_once("waits", reason)
        # Poll: nothing reports the end of another executor or process.
        time.sleep(_POLL_SECONDS)


class _WaitLog:
    def __init__(self) -> None:
        self._written: Set[str] = set()

    def log_once(self, key: str, reason: Callable[[], str]) -> None:
        """Log the reason of a wait, unless one was logged for the key before."""
        if key not in self._written:
            self._written.add(key)
            # In an isolated container, the lease directory of the environment may be unusable.
            with contextlib.suppress(LeaseError, OSError):
                _log(f"waits: {reason()}")


def _busy_text(address: str, processes: Sequence[GpuProcess]) -> str:
    return f"{address} is in use by process {describe_processes(processes)}"


def _take(leases: Leases, addresses: Iterable[str], amount: int) -> None:
    for address in addresses:
        if len(leases.addresses) < amount:
            leases.take(address)


def _with_use(device: GpuDevice, busy: Collection[str]) -> GpuDevice:
    """Return a GPU as it is, or as a bad one if its processes did not end in time."""
    if device.address not in busy or not device.processes or device.verdict.state == BAD:
        return device
    problem = f"in use by process {describe_processes(device.processes)}"
    return device._replace(readings=Readings(problem))


def describe_processes(processes: Sequence[GpuProcess]) -> str:
    names = [
        f"{process.pid}"
        f" ({', '.join(filter(None, (process.name, _user_of(process.pid)))) or 'unknown'})"
        for process in processes
    ]
    return ", ".join(names[:_MAX_LISTED_PROCESSES])


def _user_of(pid: int) -> str:
    """Return the owner of a process, or "" if the process is not visible from here."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return ""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _shortage(
    amount: int,
    listing: Listing,
    leases: Leases,
    busy: Mapping[str, Tuple[GpuProcess, ...]],
    environ: Mapping[str, str],
) -> str:
    owners = {lease.address: lease.owner for lease in read_leases(environ) if lease.is_held}
    reasons = []
    for device in listing.devices:
        address = device.address
        if address in busy:
            reasons.append(_busy_text(address, busy[address]))
        elif address in leases.refused:
            reasons.append(f"{address}: {leases.refused[address]}")
        elif address in owners and address not in leases.addresses:
            fields = [f"{key} {value}" for key, value in owners[address].items() if value]
            reasons.append(f"{address} is leased to another executor ({', '.join(fields)})")
    requested = "1 GPU was" if amount == 1 else f"{amount} GPUs were"
    available = f"{len(leases.addresses)} {'is' if len(leases.addresses) == 1 else 'are'} available"
    return (
        f"{requested} requested; this node has {len(listing.devices)}, and {available}"
        + "".join(f"; {reason}" for reason in reasons)
    )


def find_executor(ancestors_of_script: Sequence[Ancestor]) -> int:
    """Return the pid of the executor, with which the leases must end.

    Spark's executor is the nearest Java process. If a node's `python3` is a shell script, there is
    a shell between the executor and this script, which ends with this script.

    Args:
        ancestors_of_script: at least one, the nearest first.
    """
    java = [process for process in ancestors_of_script if _JAVA in process.names]
    # No Java process is visible, or the script was run by hand.
    other = [p for p in ancestors_of_script if not p.names & _SHELLS and p.pid != 1]
    return [*java[:1], *other[:1], ancestors_of_script[0]][0].pid


@contextlib.contextmanager
def _watch_executor() -> Iterator[WatchedProcess]:
    ancestors_of_script = ancestors()
    pid = find_executor(ancestors_of_script)
    if not any(_JAVA in process.names for process in ancestors_of_script):
        # Somebody who runs the script by hand should know how long the GPU stays leased.
        _log(f"no Java process is an ancestor: the lease lasts until process {pid} ends")
    with WatchedProcess(pid) as watched:
        # Check again: the pid may have been reused before this process began to watch it.
        if find_executor(ancestors()) != pid:
            raise ProcessLookupError("the executor that requested the GPUs has ended")
        yield watched


def write_container_gpus(devices: Iterable[GpuDevice], is_isolated: bool) -> None:
    """Describe the GPUs in a file of the container's directory, for the agent."""
    fields = {"gpus": [device.as_json() for device in devices], "isolated": is_isolated}
    try:
        new = Path(f"{CONTAINER_GPUS}.new")
        new.write_text(json.dumps(fields), encoding="ascii")
        new.replace(CONTAINER_GPUS)
    except OSError as error:
        raise DiscoveryFailure(f"cannot write {CONTAINER_GPUS} for the agent: {error}") from None


def has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether YARN gave the container GPUs of its own, by Docker's or runc's runtime.

    YARN's GPU plugin then names them in this variable, and NVIDIA's runtime shows no others. An
    image itself may set the variable to "all".
    """
    devices = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    is_in_image = environ.get("YARN_CONTAINER_RUNTIME_TYPE") in ("docker", "runc")
    return is_in_image and devices not in ("", "all")


def _find_directory(environ: Mapping[str, str], list_gpus: Callable[[], Listing]) -> Path:
    """Return the node's lease directory; an isolated container may use one of its own."""
    in_container = {VARIABLE: str(Path(OWN_LEASES).absolute())}
    if has_own_gpus(environ):
        return lease_directory(in_container)
    try:
        return lease_directory(environ)
    except (LeaseError, OSError):
        if not list_gpus().is_isolated:
            raise
        return lease_directory(in_container)


def select_assigned(listing: Listing, assigned: Sequence[str]) -> Listing:
    """Return the devices that a cluster manager assigned, in the order of the assignment.

    Args:
        assigned: UUIDs, or numbers in the order of PCI bus ids, as the workers' script lists them.
    """
    by_address = {device.address: device for device in listing.devices}
    by_address.update((str(number), device) for number, device in enumerate(listing.devices))
    reason = "this node's driver does not list it"
    devices = [by_address.get(address) or _bad_device(address, reason) for address in assigned]
    return Listing(tuple(devices), listing.is_isolated)


def _bad_device(address: str, reason: str) -> GpuDevice:
    """Return a device of which only the assigned address is known."""
    uuid = f"GPU-{address}" if address.isdigit() else address
    return GpuDevice(uuid, readings=Readings(reason))


def _claim_assigned(assigned: Sequence[str], limits: WaitLimits) -> None:
    """Lease the assigned GPUs; describe them as bad ones if they cannot be leased."""

    def list_gpus() -> Listing:
        try:
            return select_assigned(list_devices(limits.driver), assigned)
        except DriverError as error:
            return Listing(tuple(_bad_device(address, str(error)) for address in assigned))

    try:
        _lease_assigned(len(assigned), list_gpus, limits)
    except (DiscoveryFailure, LeaseError, OSError) as error:
        # The driver learns the reason from the executor, which gets no rank.
        _log(str(error))
        unusable = Readings(str(error))
        gpus = [device._replace(readings=unusable) for device in list_gpus().devices]
        write_container_gpus(gpus, is_isolated=False)


def _lease_assigned(amount: int, list_gpus: Callable[[], Listing], limits: WaitLimits) -> None:
    with _watch_executor() as executor, Leases(_find_directory(os.environ, list_gpus)) as leases:
        devices, is_isolated = acquire_gpus(amount, leases, list_gpus, limits, os.environ)
        leases.write_owner(owner(os.environ, executor.pid))
        with start_keepers(leases, executor) as keep_leases:
            write_container_gpus(devices, is_isolated)
            keep_leases()


def _discover(amount: int, limits: WaitLimits, gpu_type: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(CONTAINER_GPUS).unlink()  # of an earlier run
    list_gpus = functools.partial(list_devices, limits.driver)
    with _watch_executor() as executor, Leases(_find_directory(os.environ, list_gpus)) as leases:
        devices, is_isolated = acquire_gpus(amount, leases, list_gpus, limits, os.environ, gpu_type)
        leases.write_owner(owner(os.environ, executor.pid))
        with start_keepers(leases, executor) as keep_leases:
            write_container_gpus(devices, is_isolated or has_own_gpus(os.environ))
            for device in devices:
                state, reason = device.verdict
                _log(f"gives out {device.address}, {state}{reason and ': ' + reason}")
            answer = {"name": "gpu", "addresses": [device.address for device in devices]}
            # Not print(): a broken pipe must raise its error before the keepers stay.
            os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
            keep_leases()


def main(
    amount: int,
    limits: WaitLimits = DEFAULT_LIMITS,
    gpu_type: str = "",
    assigned: Sequence[str] = (),
) -> int:
    """Give out GPUs, or write to stderr why not; return the exit code.

    Args:
        gpu_type: words of the product name of the GPUs to prefer; "" for any.
        assigned: the GPUs that the cluster manager has chosen; empty if this script chooses.
    """
    try:
        if assigned:
            _claim_assigned(assigned, limits)
        else:
            _discover(amount, limits, gpu_type)
    except (DiscoveryFailure, DriverError, LeaseError, OSError) as error:
        print(f"hopsgpu discovery: {error}", file=sys.stderr)
        return 1
    return 0


def _log(message: str) -> None:
    """Write a line to stderr, which Spark copies into the executor's log.

    The prefix differs from that of a failure, which hopsgpu's doctor searches for.
    """
    with contextlib.suppress(OSError):  # stderr is closed
        print(f"hopsgpu discovery INFO: {message}", file=sys.stderr)
