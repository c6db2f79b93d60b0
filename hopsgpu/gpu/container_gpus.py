"""The GPUs of this container, as the discovery script left them in its directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.gpu.node.discovery_script import GIVEN_OUT


@dataclass(frozen=True)
class Gpu:
    """A GPU that the discovery script gave out.

    Attributes:
        address: its UUID.
        name: of the product.
        driver: NVIDIA's version.
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
        """Whether it is one of the development cluster's."""
        return self.name.startswith("Simulated")


@dataclass(frozen=True)
class Given:
    """What the discovery script gave out.

    Attributes:
        gpus: in the order of the addresses that Spark has.
        isolated: whether it found the container isolated.
    """

    gpus: tuple[Gpu, ...] = ()
    isolated: bool = False

    @property
    def simulated(self) -> frozenset[str]:
        """Addresses of the simulated GPUs, of which no driver knows."""
        return frozenset(gpu.address for gpu in self.gpus if gpu.simulated)


def read_given(container: Path = Path()) -> Given:
    """What was given out to a container; nothing where the script did not run.

    Args:
        container: its directory.
    """
    try:
        told = json.loads((container / GIVEN_OUT).read_text())
    except FileNotFoundError:
        return Given()
    gpus = (
        Gpu(gpu["address"], gpu["name"], gpu["driver"], gpu["state"], gpu["reason"])
        for gpu in told["gpus"]
    )
    return Given(tuple(gpus), told["isolated"])
