"""Amounts of resources, and how YARN compares, rounds and multiplies them. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.units import count_of

# The resource of YARN's own GPU plugin.
DEFAULT_GPU_RESOURCE = "yarn.io/gpu"
CORES, MEMORY = "vcores", "memory-mb"


@dataclass(frozen=True)
class Amount:
    """Resources, as the ResourceManager counts them."""

    gpus: int
    cores: int
    memory_mib: int

    def __str__(self) -> str:
        return (
            f"{count_of(self.gpus, 'GPU')}, {count_of(self.cores, 'core')}, {self.memory_mib} MiB"
        )

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.gpus + other.gpus, self.cores + other.cores, self.memory_mib + other.memory_mib
        )

    def __sub__(self, other: Amount) -> Amount:
        return self + other * -1

    def __mul__(self, times: int) -> Amount:
        return Amount(self.gpus * times, self.cores * times, self.memory_mib * times)

    @property
    def parts(self) -> tuple[int, int, int]:
        return (self.gpus, self.cores, self.memory_mib)

    def is_within(self, bound: Amount) -> bool:
        """Return whether this amount is at most the bound, in each resource."""
        return all(part <= most for part, most in zip(self.parts, bound.parts, strict=True))

    def min_with(self, other: Amount) -> Amount:
        """Return the smaller amount of each resource."""
        return Amount(*map(min, self.parts, other.parts))

    def max_with(self, other: Amount) -> Amount:
        """Return the larger amount of each resource."""
        return Amount(*map(max, self.parts, other.parts))

    def capacity_for(self, container: Amount) -> int:
        """Return how many such containers fit into this amount, at least 0."""
        pairs = zip(self.parts, container.parts, strict=True)
        return max(min((part // size for part, size in pairs if size > 0), default=0), 0)

    def round_up(self, step: Amount) -> Amount:
        """Round each resource up to a multiple of the step's; a step of 0 rounds nothing."""
        pairs = zip(self.parts, step.parts, strict=True)
        return Amount(*(-(-part // unit) * unit if unit > 0 else part for part, unit in pairs))


NOTHING = Amount(0, 0, 0)


def total(amounts: Iterable[Amount]) -> Amount:
    return sum(amounts, NOTHING)


def amount_of(resource: Mapping[str, Any] | None, gpu_resource: str) -> Amount:
    """Return the Amount in REST's `resourceInformations`; an absent resource counts as 0.

    Args:
        gpu_resource: name of the resource that counts GPUs.
    """
    return amount_in(_values(resource), gpu_resource)


def amount_in(values: Mapping[str, int], gpu_resource: str) -> Amount:
    """Return the Amount in numbers by the names of their resources."""
    return Amount(values.get(gpu_resource, 0), values.get(CORES, 0), values.get(MEMORY, 0))


def other_resources(resource: Mapping[str, Any] | None, gpu_resource: str) -> frozenset[str]:
    """Return the names of other resources with a positive amount."""
    values = _values(resource)
    counted = {gpu_resource, CORES, MEMORY}
    return frozenset(name for name in values.keys() - counted if values[name] > 0)


def _values(resource: Mapping[str, Any] | None) -> dict[str, int]:
    listed = ((resource or {}).get("resourceInformations") or {}).get("resourceInformation", [])
    return {entry["name"]: int(entry["value"]) for entry in listed}


def multiply_rounding_down(amount: Amount, factor: float) -> Amount:
    """Multiply each resource by a factor, and round down as the CapacityScheduler does.

    The CapacityScheduler keeps the factor as a 32-bit float: ten times 0.7 is 6.
    """
    single: float = struct.unpack("f", struct.pack("f", factor))[0]
    return Amount(*(math.floor(part * single) for part in amount.parts))


def exceeds_share(used: Amount, limit: Amount, cluster: Amount) -> bool:
    """Return whether `used` is more than `limit` for YARN's DominantResourceCalculator.

    YARN compares the largest shares of the cluster, then the next ones. So `used` may exceed the
    limit in one resource without being more. If all shares are equal, it is not more.
    """
    return _shares(used, cluster) > _shares(limit, cluster)


def _shares(amount: Amount, cluster: Amount) -> list[float]:
    pairs = zip(amount.parts, cluster.parts, strict=True)
    return sorted((part / size for part, size in pairs if size > 0), reverse=True)
