"""The leases of this machine's GPUs for one gang: all that it needs, or none.

The locks are those of the nodes' discovery script, so each GPU is assigned only once. Only one gang
of the machine collects GPUs at a time, until it has all of them. So two gangs never wait for each
other's GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from hopsgpu.backends.local.machine import check_gpus, own_gpus, usable
from hopsgpu.core.wait_reasons import WaitReason, leased_gpus, other_gang_here
from hopsgpu.gpu.node.devices import GpuDevice, foreign_processes
from hopsgpu.gpu.node.discovery_script import describe_processes
from hopsgpu.gpu.node.leases import Leases, read_leases, try_lock

_TURN = "turn"


class NoLongerNeeded(Exception):
    """The driver no longer needs the GPUs."""


def take_gpus(
    wanted: int,
    gpu_type: str | None,
    excluded_gpus: Collection[str],
    leases: Leases,
    directory: Path,
    wait: Callable[[WaitReason], bool],
    warn: Callable[[str], None],
) -> list[GpuDevice]:
    """Lease a number of GPUs of this machine.

    Args:
        gpu_type: words that their product name must contain; None for any GPU.
        leases: leases of this process, to which the GPUs are added.
        wait: waits a moment, given the reason; returns False if the GPUs are no longer needed.

    Raises:
        NoLongerNeeded: `wait` returned False.
        CapacityError, ConfigError: the machine does not have so many usable GPUs of the type.
        DiscoveryError: the machine's GPUs cannot be listed.
    """
    gpus = own_gpus()
    check_gpus(wanted, gpus, gpu_type, excluded_gpus)
    good = usable(gpus, gpu_type, excluded_gpus)
    while (turn := try_lock(directory / _TURN)) is None:
        if not wait(other_gang_here()):
            raise NoLongerNeeded
    try:
        while True:
            for gpu in good:
                if len(leases.addresses) < wanted:
                    leases.take(gpu.address)
            if len(leases.addresses) == wanted:
                break
            reasons = _why_not_free([gpu.address for gpu in good], leases)
            if not wait(leased_gpus(wanted, len(leases.addresses), reasons)):
                raise NoLongerNeeded
    finally:
        os.close(turn)
    for gpu in (held := [gpu for gpu in good if gpu.address in leases.addresses]):
        if processes := foreign_processes(gpu.processes):
            warn(f"{gpu.address} is also in use by process {describe_processes(processes)}")
    return held


def _why_not_free(addresses: Collection[str], leases: Leases) -> list[str]:
    reasons = [f"{address}: {why}" for address, why in leases.refused.items()]
    for lease in read_leases(os.environ):
        if lease.is_held and lease.address in addresses and lease.address not in leases.addresses:
            owner = ", ".join(f"{key} {value}" for key, value in lease.owner.items() if value)
            reasons.append(f"{lease.address} is leased to another gang ({owner})")
    return reasons
