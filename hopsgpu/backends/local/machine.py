"""The resources of this machine, and the check whether a gang fits."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hopsgpu.core.gpu_names import has_type
from hopsgpu.core.spec import ExecutorShape, GangSpec, GpuRequest
from hopsgpu.errors import CapacityError, ConfigError, DiscoveryError
from hopsgpu.gpu.node.devices import DriverError, GpuDevice, NoDriverError, list_devices
from hopsgpu.gpu.node.discovery_script import numbers_in_parents
from hopsgpu.gpu.node.health import BAD
from hopsgpu.units import count_of

_MIB = 2**20
NO_GPU = "this machine has no GPU, so the ranks run on its CPUs"


@dataclass(frozen=True)
class Machine:
    """The resources of this machine.

    Attributes:
        cores: number of cores that this process may use.
    """

    cores: int
    memory_mib: int
    gpus: tuple[GpuDevice, ...] = ()

    def __str__(self) -> str:
        names = sorted({gpu.name or "GPU" for gpu in self.gpus})
        gpus = f"{count_of(len(self.gpus), 'GPU')} ({', '.join(names)})" if self.gpus else "no GPU"
        return f"{count_of(self.cores, 'core')}, {self.memory_mib / 1024:.0f} GiB, {gpus}"


def this_machine(*, should_list_gpus: bool = True) -> Machine:
    """Return the resources of this machine; listing the GPUs takes tenths of a second.

    Raises:
        DiscoveryError: there is an NVIDIA driver, but it does not list its GPUs.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
    return Machine(len(os.sched_getaffinity(0)), memory, own_gpus() if should_list_gpus else ())


def own_gpus() -> tuple[GpuDevice, ...]:
    """Return the GPUs of this machine, bad ones included; empty without an NVIDIA driver.

    Raises:
        DiscoveryError: there is an NVIDIA driver, but it does not list its GPUs.
    """
    try:
        return list_devices().devices
    except NoDriverError:
        return ()
    except (DriverError, OSError) as error:
        raise DiscoveryError(
            f"this machine's GPUs cannot be listed: {error}. See what nvidia-smi says;"
            " gpus_per_worker=0 trains on the CPUs"
        ) from error


def usable(
    gpus: Sequence[GpuDevice], gpu_type: str | None, excluded_gpus: Collection[str]
) -> tuple[GpuDevice, ...]:
    """Return the GPUs that a gang may use, the healthy ones and MIG devices of unused GPUs first.

    Args:
        gpu_type: words that their product name must contain; None for any GPU.
    """
    good = (
        gpu
        for gpu in gpus
        if gpu.verdict.state != BAD
        and gpu.address not in excluded_gpus
        and (gpu_type is None or has_type(gpu.name, gpu_type))
    )
    numbers = numbers_in_parents(gpus)
    return tuple(sorted(good, key=lambda gpu: (gpu.badness, numbers[gpu.address])))


def check_gpus(
    wanted: int,
    gpus: Sequence[GpuDevice],
    gpu_type: str | None,
    excluded_gpus: Collection[str] = (),
) -> None:
    """Check that this machine has enough usable GPUs for a gang that needs GPUs.

    Raises:
        ConfigError: the machine has no GPU of the type.
        CapacityError: it has fewer usable GPUs than the gang needs.
    """
    if gpu_type is not None and not any(has_type(gpu.name, gpu_type) for gpu in gpus):
        names = ", ".join(sorted({repr(gpu.name) for gpu in gpus}))
        raise ConfigError(f"gpu_type={gpu_type!r}: this machine has no such GPU. It has: {names}")
    available = len(usable(gpus, gpu_type, excluded_gpus))
    if available >= wanted:
        return
    why = [
        f"{gpu.address} is bad: {gpu.verdict.reason}" for gpu in gpus if gpu.verdict.state == BAD
    ]
    why += [f"{address} failed an earlier attempt" for address in sorted(excluded_gpus)]
    raise CapacityError(
        f"the gang needs {count_of(wanted, 'GPU')}, and this machine has {available} that it can"
        f" use{''.join(f'; {text}' for text in why)}. With a local master all ranks are on this"
        " machine: request fewer workers, gpus_per_worker=0.5 (two ranks on a GPU) or 0 (CPUs),"
        " or run it on a cluster"
    )


def fit_on_machine(
    spec: GangSpec, machine: Machine
) -> tuple[GangSpec, ExecutorShape, tuple[str, ...]]:
    """Return a gang as it runs on a machine: all ranks in one container.

    Only GPUs are reserved; cores and memory are not.

    Returns:
        The gang, on CPUs if the machine has no GPU; the shape of its container; and warnings.

    Raises:
        ConfigError: the machine has no GPUs of the requested type.
        CapacityError: the machine has fewer usable GPUs than the gang needs.
    """
    warnings = []
    if spec.gpus.per_worker and not machine.gpus:
        spec = replace(spec, gpus=GpuRequest(0), gpu_type=None)
        warnings.append(NO_GPU)
    gpus = spec.gpus.of(spec.workers)
    if gpus:
        check_gpus(gpus, machine.gpus, spec.gpu_type)
    cores = (spec.cores_per_worker or 1) * spec.workers
    memory = -(-spec.memory_per_worker // _MIB) * (spec.workers + spec.parameter_servers)
    if spec.cores_per_worker is not None and cores > machine.cores:
        warnings.append(
            f"the ranks request {count_of(cores, 'core')}, but share the {machine.cores} that this"
            " machine has"
        )
    if memory > machine.memory_mib:
        warnings.append(
            f"the ranks may use {memory} MiB together, which is more than the"
            f" {machine.memory_mib} MiB of this machine, and no memory is reserved here"
        )
    if spec.placement == "spread" and spec.workers > 1:
        warnings.append("spread: all ranks run on this machine, because there is no other")
    return spec, ExecutorShape(cores, gpus, 0, memory), tuple(warnings)
