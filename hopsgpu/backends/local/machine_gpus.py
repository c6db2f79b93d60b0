"""The report on this machine's GPUs, in the form of a report on a cluster's GPUs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Sequence

from hopsgpu.backends.local.machine import own_gpus
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, types_of
from hopsgpu.errors import DiscoveryError
from hopsgpu.gpu.node.devices import GpuDevice, foreign_processes
from hopsgpu.gpu.node.discovery_script import describe_processes
from hopsgpu.gpu.node.health import BAD
from hopsgpu.gpu.node.leases import LeaseError, read_leases


def machine_inventory(user: str) -> ClusterGpus:
    """Return the GPUs of this machine; those that gangs have leased count as used.

    Raises:
        DiscoveryError: the GPUs cannot be listed, or their leases cannot be read.
    """
    gpus = own_gpus()
    try:
        leased = {lease.address for lease in read_leases(os.environ) if lease.is_held}
    except LeaseError as error:
        raise DiscoveryError(
            f"the leases of this machine's GPUs cannot be read: {error}"
        ) from error
    return machine_gpus(gpus, leased, platform.node(), user, time.time())


def machine_gpus(
    gpus: Sequence[GpuDevice], leased: Collection[str], host: str, user: str, now: float
) -> ClusterGpus:
    """Return the machine's GPUs as those of a cluster of one node without queues."""
    used = [gpu for gpu in gpus if gpu.address in leased]
    bad = [gpu for gpu in gpus if gpu.verdict.state == BAD and gpu not in used]
    node = GpuNode(
        host=host,
        state="RUNNING",
        label="",
        types=types_of(
            (gpu.name or "GPU", gpu.memory_mib or None, gpu.parent or None) for gpu in gpus
        ),
        driver=next((gpu.driver for gpu in gpus if gpu.driver), ""),
        total=len(gpus),
        used=len(used),
        free=len(gpus) - len(used) - len(bad),
        unhealthy=len(bad),
        health="; ".join(f"{gpu.address} is bad: {gpu.verdict.reason}" for gpu in bad),
    )
    # GPUs that a process without a lease uses are still free for a gang.
    processes_by_gpu = {
        gpu.address: foreign_processes(gpu.processes) for gpu in gpus if gpu not in used
    }
    return ClusterGpus(
        time=now,
        user=user,
        nodes=(node,) if gpus else (),
        nodes_without=0 if gpus else 1,
        users=(),
        queues=(),
        # A lease names a process, not an application.
        unexplained=len(used),
        acls=None,
        executor="",
        problems=tuple(
            f"{address} is in use by process {describe_processes(processes)}"
            for address, processes in processes_by_gpu.items()
            if processes
        ),
    )
