"""The GPUs of this container, as the discovery script described them in its directory."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ContainerGpu:
    """A GPU that the discovery script gave out.

    Attributes:
        address: the UUID.
        state: "healthy", "watch" or "bad".
        parent: address of the GPU of which it is a MIG device; "" for a whole GPU.
    """

    address: str
    name: str
    driver: str
    state: str
    reason: str
    parent: str = ""

    @property
    def is_simulated(self) -> bool:
        """Whether the GPU is a simulated one of the development cluster."""
        return self.name.startswith("Simulated")


@dataclass(frozen=True)
class ContainerGpus:
    """The GPUs that the discovery script gave out, in the order of the addresses that Spark has."""

    gpus: tuple[ContainerGpu, ...] = ()
    is_isolated: bool = False

    @property
    def simulated_addresses(self) -> frozenset[str]:
        """The addresses of the simulated GPUs, which no driver knows."""
        return frozenset(gpu.address for gpu in self.gpus if gpu.is_simulated)


def read_container_gpus(container: Path = Path()) -> ContainerGpus:
    """Return the GPUs of a container; none if the discovery script did not run."""
    try:
        fields = json.loads((container / CONTAINER_GPUS).read_text())
    except FileNotFoundError:
        return ContainerGpus()
    gpus = (
        ContainerGpu(
            gpu["address"], gpu["name"], gpu["driver"], gpu["state"], gpu["reason"], gpu["parent"]
        )
        for gpu in fields["gpus"]
    )
    return ContainerGpus(tuple(gpus), fields["isolated"])


def log_container_gpus(container: ContainerGpus) -> None:
    for gpu in container.gpus:
        reason = f": {gpu.reason}" if gpu.reason else ""
        log.info(
            "discovery gave out %s%s (%s, driver %s), %s%s",
            gpu.address,
            f" of {gpu.parent}" if gpu.parent else "",
            gpu.name or "unknown product",
            gpu.driver or "unknown",
            gpu.state,
            reason,
        )
    if container.gpus:
        log.debug("the container is %sisolated", "" if container.is_isolated else "not ")
