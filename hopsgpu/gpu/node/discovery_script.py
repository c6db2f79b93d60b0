"""Tell Spark which GPUs an executor may use.

Spark runs `gpus-N` of the archive that `hopsgpu.gpu.script_archive` packs, in the container's
directory and without arguments; N is the number of GPUs to give out. The script needs Python 3.6
and the NVIDIA driver, but no installed hopsgpu.

It prints `{"name": "gpu", "addresses": [UUID, …]}` for Spark, exactly N addresses and those of
healthy GPUs first, and leaves what is known of the GPUs in the container's directory for the agent.
A bad GPU, or one that another process computes on, is given out if there is no better one: YARN
counts it, and an executor that failed because of it would come again and again.
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

from hopsgpu.gpu.node.devices import (
    ANSWER_SECONDS,
    Device,
    DriverError,
    Listing,
    Process,
    list_devices,
)
from hopsgpu.gpu.node.health import BAD, Readings
from hopsgpu.gpu.node.lease_keeper import Ancestor, WatchedProcess, ancestors, kept_by_processes
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
_MOST_NAMED = 5
_JAVA = "java"
_SHELLS = frozenset(("sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"))


class DiscoveryFailure(Exception):
    """The reason why no GPU is given out; Spark logs it and gives up the executor."""


class WaitLimits(NamedTuple):
    """The longest waits, in seconds.

    Attributes:
        leased: wait for a GPU that another executor has leased: the ResourceManager can free a GPU
            before the process that had it has ended.
        busy: wait for a process without a lease to end, before its GPU is taken for a bad one.
        bad: wait before a bad GPU is taken while a better one is another executor's.
        driver: wait for the driver's answer.
    """

    leased: float = 20.0
    busy: float = 5.0
    bad: float = 5.0
    driver: float = ANSWER_SECONDS


PATIENCE = WaitLimits()


def choose_gpus(
    devices: Iterable[Device], had: Collection[str], busy: Collection[str], settled: bool
) -> List[str]:
    """Return the addresses to try to lease, the best first.

    Args:
        devices: GPUs of the node.
        had: addresses that this process has leased already.
        busy: addresses of GPUs that were found in use.
        settled: whether to take a bad GPU while a better one is another executor's.
    """
    free = sorted(
        (one for one in devices if one.address not in had and one.address not in busy),
        key=lambda one: one.rank,
    )
    better = [one.address for one in free if one.verdict.state != BAD]
    bad = [one.address for one in free if one.verdict.state == BAD]
    return better + bad if settled or not better else better


def in_use(devices: Iterable[Device], had: Collection[str]) -> Dict[str, Tuple[Process, ...]]:
    """Return the leased GPUs that others compute on, with the processes that do.

    Bad ones do not count, because no rank will compute on them.
    """
    return {
        one.address: one.processes
        for one in devices
        if one.address in had and one.processes and one.verdict.state != BAD
    }


def acquire_gpus(
    amount: int,
    leases: Leases,
    look: Callable[[], Listing],
    patience: WaitLimits,
    environ: Mapping[str, str],
) -> Tuple[List[Device], bool]:
    """Lease GPUs that nobody else has leased and nobody else computes on.

    If there are too few, those that others compute on are given out as bad ones.

    Args:
        look: lists the node's GPUs.
        environ: may name the directory of the leases.

    Returns:
        Exactly `amount` GPUs, the healthy ones first, and whether the container is isolated.

    Raises:
        DiscoveryFailure: there are too few GPUs; the message says which there are and who has them.
        DriverError: `look` raises it.
    """
    began = time.monotonic()
    listing = look()
    in_use_since: Dict[str, float] = {}
    busy: Dict[str, Tuple[Process, ...]] = {}
    log = _WaitLog()
    while True:
        settled = time.monotonic() - began >= patience.bad
        _take(leases, choose_gpus(listing.devices, leases.held, busy, settled), amount)
        hopeless = len(listing.devices) - len(busy) - len(leases.refused) < amount
        if hopeless or time.monotonic() - began >= patience.leased:
            # Taken as bad ones: YARN counts them, and an executor that failed would come back to
            # them.
            _take(leases, busy, amount)
            if len(leases.held) < amount:
                raise DiscoveryFailure(_why(amount, listing, leases, busy, environ))
        if len(leases.held) == amount:
            # List them again, now that no other executor can start anything on them.
            listing = look()
            found = [_usable(one, busy) for one in listing.devices if one.address in leases.held]
            using = in_use(found, leases.held)
            if len(found) == amount and not using:
                return sorted(found, key=lambda one: one.rank), listing.isolated
            for address in set(leases.held).difference(one.address for one in found):
                leases.release(address)  # it fell off the bus
            for address, processes in using.items():
                log.once(address, functools.partial(_busy, address, processes))
                since = in_use_since.setdefault(address, time.monotonic())
                if time.monotonic() - since >= patience.busy:
                    leases.release(address)
                    busy[address] = processes
        else:
            log.once("waits", functools.partial(_why, amount, listing, leases, busy, environ))
        # Poll, since nothing reports the end of another executor, or of a process.
        time.sleep(_POLL_SECONDS)


class _WaitLog:
    """The log of what is waited for: each reason is written once."""

    def __init__(self) -> None:
        self._written: Set[str] = set()

    def once(self, key: str, reason: Callable[[], str]) -> None:
        """Write a reason, unless one was written for the key before."""
        if key not in self._written:
            self._written.add(key)
            # The directory that the environment names may be unusable in an isolated container.
            with contextlib.suppress(LeaseError, OSError):
                _log(f"waits: {reason()}")


def _busy(address: str, processes: Sequence[Process]) -> str:
    return f"{address} is in use by process {named(processes)}"


def _take(leases: Leases, addresses: Iterable[str], amount: int) -> None:
    for address in addresses:
        if len(leases.held) < amount:
            leases.take(address)


def _usable(device: Device, busy: Collection[str]) -> Device:
    """Return a GPU as it is, or as a bad one if the wait for its processes was in vain."""
    if device.address not in busy or not device.processes or device.verdict.state == BAD:
        return device
    return device._replace(readings=Readings(f"in use by process {named(device.processes)}"))


def named(processes: Sequence[Process]) -> str:
    """Return processes with their users, for people."""
    names = [
        f"{one.pid} ({', '.join(filter(None, (one.name, _user_of(one.pid)))) or 'unknown'})"
        for one in processes
    ]
    return ", ".join(names[:_MOST_NAMED])


def _user_of(pid: int) -> str:
    """Return who owns a process, or "" if the process is not visible from here."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return ""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _why(
    amount: int,
    listing: Listing,
    leases: Leases,
    busy: Mapping[str, Tuple[Process, ...]],
    environ: Mapping[str, str],
) -> str:
    owners = {lease.address: lease.owner for lease in read_leases(environ) if lease.held}
    said = []
    for device in listing.devices:
        address = device.address
        if address in busy:
            said.append(_busy(address, busy[address]))
        elif address in leases.refused:
            said.append(f"{address}: {leases.refused[address]}")
        elif address in owners and address not in leases.held:
            fields = [f"{key} {value}" for key, value in owners[address].items() if value]
            said.append(f"{address} is leased to another executor ({', '.join(fields)})")
    requested = "1 GPU was" if amount == 1 else f"{amount} GPUs were"
    available = f"{len(leases.held)} {'is' if len(leases.held) == 1 else 'are'} available"
    return (
        f"{requested} requested; this node has {len(listing.devices)}, and {available}"
        + "".join(f"; {reason}" for reason in said)
    )


def executor_among(above: Sequence[Ancestor]) -> int:
    """Return the pid of the executor, whose end must be that of its leases.

    Spark's executor is the nearest Java process. Between it and the script there may be whatever a
    node has as `python3`: a shell that ends with the script.

    Args:
        above: ancestors of the script, the nearest first; at least one.
    """
    java = [one for one in above if _JAVA in one.names]
    # If no Java is visible, or the script was run by hand.
    other = [one for one in above if not one.names & _SHELLS and one.pid != 1]
    return [*java[:1], *other[:1], above[0]][0].pid


@contextlib.contextmanager
def _executor() -> Iterator[WatchedProcess]:
    above = ancestors()
    pid = executor_among(above)
    if not any(_JAVA in one.names for one in above):
        # Whoever runs the script by hand should know why the GPU is not free again.
        _log(f"no Java process is an ancestor: the lease lasts until process {pid} ends")
    with WatchedProcess(pid) as watched:
        # It is watched only from now on: it may have ended before, and its pid be another's.
        if executor_among(ancestors()) != pid:
            raise ProcessLookupError("the executor that requested the GPUs has ended")
        yield watched


def write_container_gpus(devices: Iterable[Device], isolated: bool) -> None:
    """Write what is known of the container's GPUs into its directory, for the agent.

    Raises:
        DiscoveryFailure: the file cannot be written.
    """
    said = {"gpus": [device.as_json() for device in devices], "isolated": isolated}
    try:
        new = Path(f"{CONTAINER_GPUS}.new")
        new.write_text(json.dumps(said), encoding="ascii")
        new.replace(CONTAINER_GPUS)
    except OSError as error:
        raise DiscoveryFailure(f"cannot write {CONTAINER_GPUS} for the agent: {error}") from None


def _directory(environ: Mapping[str, str], look: Callable[[], Listing]) -> Path:
    """Return the node's directory of leases, or, if it is unusable, an isolated container's own."""
    try:
        return lease_directory(environ)
    except (LeaseError, OSError):
        if not look().isolated:
            raise
        return lease_directory({VARIABLE: str(Path(OWN_LEASES).absolute())})


def _discover(amount: int, patience: WaitLimits) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(CONTAINER_GPUS).unlink()  # of an earlier run
    look = functools.partial(list_devices, patience.driver)
    with _executor() as executor, Leases(_directory(os.environ, look)) as leases:
        devices, isolated = acquire_gpus(amount, leases, look, patience, os.environ)
        leases.sign(owner(os.environ, executor.pid))
        with kept_by_processes(leases, executor) as stay:
            write_container_gpus(devices, isolated)
            for device in devices:
                state, reason = device.verdict
                _log(f"gives out {device.address}, {state}{reason and ': ' + reason}")
            said = {"name": "gpu", "addresses": [device.address for device in devices]}
            # Not print(): a pipe that nobody reads must be noticed before the keepers stay.
            os.write(sys.stdout.fileno(), json.dumps(said).encode() + b"\n")
            stay()


def main(amount: int, patience: WaitLimits = PATIENCE) -> int:
    """Give out GPUs, or say on stderr why not.

    Args:
        amount: number of GPUs.
        patience: how long to wait for better ones.

    Returns:
        The exit code.
    """
    try:
        _discover(amount, patience)
    except (DiscoveryFailure, DriverError, LeaseError, OSError) as error:
        print(f"hopsgpu discovery: {error}", file=sys.stderr)
        return 1
    return 0


def _log(message: str) -> None:
    """Write a line to stderr, which Spark copies into the executor's log.

    It differs from the line about a failure, which hopsgpu's doctor searches for.
    """
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"hopsgpu discovery INFO: {message}", file=sys.stderr)
