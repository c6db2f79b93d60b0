"""The GPUs of this container, as the discovery script described them in its directory."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU that the discovery script gave out.

    Attributes:
        address: its address, the UUID.
        name: name of the product.
        driver: version of NVIDIA's driver.
        state: "healthy", "watch" or "bad".
        reason: why it is not healthy.
    """

    address: str
    name: str
    driver: str
    state: str
    reason: str

    @property
    def simulated(self) -> bool:
        """Return whether it is a simulated GPU of the development cluster."""
        return self.name.startswith("Simulated")


@dataclass(frozen=True)
class ContainerGpus:
    """What the discovery script gave out.

    Attributes:
        gpus: the GPUs, in the order of the addresses that Spark has.
        isolated: whether the script found the container isolated.
    """

    gpus: tuple[Gpu, ...] = ()
    isolated: bool = False

    @property
    def simulated(self) -> frozenset[str]:
        """Return the addresses of the simulated GPUs, which no driver knows."""
        return frozenset(gpu.address for gpu in self.gpus if gpu.simulated)


def read_container_gpus(container: Path = Path()) -> ContainerGpus:
    """Return what was given out to a container; nothing if the script did not run.

    Args:
        container: directory of the container.
    """
    try:
        fields = json.loads((container / CONTAINER_GPUS).read_text())
    except FileNotFoundError:
        return ContainerGpus()
    gpus = (
        Gpu(gpu["address"], gpu["name"], gpu["driver"], gpu["state"], gpu["reason"])
        for gpu in fields["gpus"]
    )
    return ContainerGpus(tuple(gpus), fields["isolated"])


def log_container_gpus(container: ContainerGpus) -> None:
    """Log which GPUs the discovery script chose, and its verdict on the health of each."""
    for gpu in container.gpus:
        reason = f": {gpu.reason}" if gpu.reason else ""
        log.info(
            "discovery gave out %s (%s, driver %s), %s%s",
            gpu.address,
            gpu.name or "unknown product",
            gpu.driver or "unknown",
            gpu.state,
            reason,
        )
    if container.gpus:
        log.debug("the container is %sisolated", "" if container.isolated else "not ")
