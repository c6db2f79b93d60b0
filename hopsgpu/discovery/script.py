"""Tells Spark which GPUs an executor may use.

Spark runs `gpus-N` of the archive that `hopsgpu.discovery.shipping` packs, in the container's
directory and without arguments; N is how many GPUs to give out. It needs Python 3.6 and the
NVIDIA driver, and nothing installed of hopsgpu.

Prints `{"name": "gpu", "addresses": [UUID, …]}` for Spark, exactly so many and the healthy ones
first, and leaves what is known of them in the container's directory for the agent. A bad GPU is
given out where there is no better one: YARN counts it, and an executor that failed for it would
come again and again.
"""

import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Callable, Collection, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Tuple

from hopsgpu.discovery.devices import (
    ANSWER_SECONDS,
    Device,
    DriverError,
    Listing,
    Process,
    list_devices,
)
from hopsgpu.discovery.health import BAD
from hopsgpu.discovery.keeper import Watched, keeping
from hopsgpu.discovery.leases import LeaseError, Leases, lease_directory, owner, read_leases

GIVEN_OUT = "hopsgpu-gpus.json"
_POLL_SECONDS = 0.3
_MOST_NAMED = 5


class DiscoveryFailure(Exception):
    """Why no GPU is given out; Spark logs it and gives up the executor."""


class Patience(NamedTuple):
    """How long to wait, each in seconds.

    Attributes:
        leased: for one of another executor: the ResourceManager can free a GPU before the
            process that had it is gone.
        busy: for a process without a lease to end, before its GPU is passed over.
        bad: before a bad GPU is taken while a better one is another executor's.
        driver: for the driver to answer.
    """

    leased: float = 20.0
    busy: float = 5.0
    bad: float = 5.0
    driver: float = ANSWER_SECONDS


PATIENCE = Patience()


def wanted(
    devices: Iterable[Device], had: Collection[str], busy: Collection[str], settled: bool
) -> List[str]:
    """Addresses to try to lease, the best first.

    Args:
        devices: of the node.
        had: addresses that are leased already.
        busy: addresses whose GPUs were found in use.
        settled: whether a bad GPU is taken while a better one is another executor's.
    """
    free = sorted(
        (one for one in devices if one.address not in had and one.address not in busy),
        key=lambda one: one.rank,
    )
    better = [one.address for one in free if one.verdict.state != BAD]
    bad = [one.address for one in free if one.verdict.state == BAD]
    return better + bad if settled or not better else better


def in_use(devices: Iterable[Device], had: Collection[str]) -> Dict[str, Tuple[Process, ...]]:
    """The leased GPUs that others compute on; on a bad one nothing is going to be computed."""
    return {
        one.address: one.processes
        for one in devices
        if one.address in had and one.processes and one.verdict.state != BAD
    }


def obtain(
    amount: int,
    leases: Leases,
    look: Callable[[], Listing],
    patience: Patience,
    environ: Mapping[str, str],
) -> Tuple[List[Device], bool]:
    """Leases GPUs that nobody else has and nobody else computes on.

    Args:
        look: lists the node's GPUs.
        environ: names the directory of the leases.

    Returns:
        Exactly the amount, the healthy ones first, and whether the container is isolated.

    Raises:
        DiscoveryFailure: there are not so many; says which there are and who has them.
        DriverError: from `look`.
    """
    began = time.monotonic()
    listing = look()
    taken: Dict[str, float] = {}
    busy: Dict[str, Tuple[Process, ...]] = {}
    while True:
        settled = time.monotonic() - began >= patience.bad
        for address in wanted(listing.devices, leases.held, busy, settled):
            if len(leases.held) < amount and leases.take(address):
                taken[address] = time.monotonic()
        if len(leases.held) < amount:
            hopeless = len(listing.devices) - len(busy) - len(leases.refused) < amount
            if hopeless or time.monotonic() - began >= patience.leased:
                raise DiscoveryFailure(_why(amount, listing, leases, busy, environ))
        else:
            # Again, now that no other executor can start anything on them.
            listing = look()
            found = [one for one in listing.devices if one.address in leases.held]
            using = in_use(found, leases.held)
            if len(found) == amount and not using:
                return sorted(found, key=lambda one: one.rank), listing.isolated
            for address in set(leases.held).difference(one.address for one in found):
                leases.release(address)  # it fell off the bus
            for address, processes in using.items():
                if time.monotonic() - taken[address] >= patience.busy:
                    leases.release(address)
                    busy[address] = processes
        # Another executor's end, and a process's, are nothing that anybody tells us of.
        time.sleep(_POLL_SECONDS)


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
            names = [f"{one.pid} ({one.name or 'unknown'})" for one in busy[address]]
            said.append(f"{address} is in use by process {', '.join(names[:_MOST_NAMED])}")
        elif address in leases.refused:
            said.append(f"{address}: {leases.refused[address]}")
        elif address in owners and address not in leases.held:
            told = [f"{key} {value}" for key, value in owners[address].items() if value]
            said.append(f"{address} is leased to another executor ({', '.join(told)})")
    return (
        f"{amount} GPUs were asked for; this node shows {len(listing.devices)}, and"
        f" {len(leases.held)} of them can be had" + "".join(f"; {one}" for one in said)
    )


@contextlib.contextmanager
def _executor() -> Iterator[Watched]:
    """Spark's executor runs the script directly: our parent is the JVM."""
    pid = os.getppid()
    with Watched(pid) as watched:
        # Watched only now: it may have ended before, and its number be another's.
        if os.getppid() != pid:
            raise ProcessLookupError("the executor that asked has ended")
        yield watched


def _leave(devices: Iterable[Device], isolated: bool) -> None:
    said = {"gpus": [device.as_json() for device in devices], "isolated": isolated}
    try:
        new = Path(f"{GIVEN_OUT}.new")
        new.write_text(json.dumps(said), encoding="ascii")
        new.replace(GIVEN_OUT)
    except OSError as error:
        raise DiscoveryFailure(f"the agent's {GIVEN_OUT} cannot be written: {error}") from None


def _discover(amount: int, patience: Patience) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(GIVEN_OUT).unlink()  # of an earlier run
    look = functools.partial(list_devices, patience.driver)
    with _executor() as executor, Leases(lease_directory(os.environ)) as leases:
        devices, isolated = obtain(amount, leases, look, patience, os.environ)
        leases.sign(owner(os.environ, executor.pid))
        with keeping(leases, executor) as stay:
            _leave(devices, isolated)
            said = {"name": "gpu", "addresses": [device.address for device in devices]}
            # Not by print: a pipe that nobody reads has to be known before the keeper stays.
            os.write(sys.stdout.fileno(), json.dumps(said).encode() + b"\n")
            stay()


def main(amount: int, patience: Patience = PATIENCE) -> int:
    """Gives out GPUs, or says on stderr why not.

    Args:
        amount: of GPUs.
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
