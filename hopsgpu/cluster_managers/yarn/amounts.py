"""Amounts of resources in the ResourceManager's answers. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from hopsgpu.cluster_managers.resources import Amount

# The resource of YARN's own GPU plugin.
DEFAULT_GPU_RESOURCE = "yarn.io/gpu"
CORES, MEMORY = "vcores", "memory-mb"


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
