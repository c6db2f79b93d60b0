"""Amounts of resources, and how they are compared and rounded. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hopsgpu.units import count_of


@dataclass(frozen=True)
class Amount:
    """Resources, as a cluster manager counts them."""

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


def exceeds_share(used: Amount, limit: Amount, cluster: Amount) -> bool:
    """Return whether `used` is more than `limit` for YARN's DominantResourceCalculator.

    YARN compares the largest shares of the cluster, then the next ones. So `used` may exceed the
    limit in one resource without being more. If all shares are equal, it is not more.
    """
    return _shares(used, cluster) > _shares(limit, cluster)


def _shares(amount: Amount, cluster: Amount) -> list[float]:
    pairs = zip(amount.parts, cluster.parts, strict=True)
    return sorted((part / size for part, size in pairs if size > 0), reverse=True)
