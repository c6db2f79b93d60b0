"""The resources of nodes and pods as exact amounts. Pure.

Pods request parts of cores, and hopsgpu's executors whole ones. Exact amounts are rounded once,
after what pods use has been subtracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hopsgpu.cluster_managers.kubernetes.quantities import parse_quantity
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.units import MIB


@dataclass(frozen=True)
class ExactAmount:
    """GPUs, cores and bytes of memory."""

    gpus: Fraction = Fraction(0)
    cores: Fraction = Fraction(0)
    memory: Fraction = Fraction(0)

    def __add__(self, other: ExactAmount) -> ExactAmount:
        return ExactAmount(
            self.gpus + other.gpus, self.cores + other.cores, self.memory + other.memory
        )

    def __sub__(self, other: ExactAmount) -> ExactAmount:
        return ExactAmount(
            self.gpus - other.gpus, self.cores - other.cores, self.memory - other.memory
        )

    def max_with(self, other: ExactAmount) -> ExactAmount:
        return ExactAmount(
            max(self.gpus, other.gpus),
            max(self.cores, other.cores),
            max(self.memory, other.memory),
        )

    def round_down(self) -> Amount:
        """Return whole GPUs, cores and MiB."""
        return Amount(int(self.gpus // 1), int(self.cores // 1), int(self.memory // MIB))

    def round_up(self) -> Amount:
        return Amount(-int(-self.gpus // 1), -int(-self.cores // 1), -int(-self.memory // MIB))


def sum_exact(amounts: Iterable[ExactAmount]) -> ExactAmount:
    return sum(amounts, ExactAmount())


def amount_of(resources: Mapping[str, Any] | None, gpu_resource: str) -> ExactAmount:
    """Return the amount in a mapping of resource → quantity, such as a container's requests."""
    quantities = resources or {}
    return ExactAmount(
        *(parse_quantity(quantities.get(name) or 0) for name in (gpu_resource, "cpu", "memory"))
    )
