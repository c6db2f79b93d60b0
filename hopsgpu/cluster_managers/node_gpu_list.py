"""The GPUs of nodes: product, memory and driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of a node, or a MIG device that the cluster manager counts as a GPU.

    A value that is not reported is "", or None.

    Attributes:
        minor: minor number of the device file; a MIG device has that of its GPU.
    """

    name: str
    memory_mib: int | None
    uuid: str
    minor: int | None = None


@dataclass(frozen=True)
class Devices:
    """The GPUs that the cluster manager assigns on a node, and NVIDIA's driver; "" if unknown.

    Without GPUs, the cluster manager counts them on the node but does not know what they are.
    """

    gpus: tuple[NodeGpu, ...]
    driver: str


@dataclass(frozen=True)
class NodeAnswers:
    """The GPUs by node ID, and why other nodes did not report theirs."""

    devices: Mapping[str, Devices]
    problems: Mapping[str, str]
