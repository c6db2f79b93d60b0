"""The rendezvous endpoints of a gang's processes, with ports that agents hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.core.gang import World

Address = tuple[str, int]
# MASTER_PORT and the coordinator's port.
_RANK_0_PORTS = 2


@dataclass(frozen=True)
class Endpoints:
    """Addresses and ports of one attempt.

    Attributes:
        master: endpoint of torch's rendezvous, where rank 0 or an agent listens.
        coordinator: endpoint at which rank 0 may listen for JAX.
        servers: endpoint of each process's server, by the process's number (TensorFlow).
        is_hosted: whether an agent serves torch's TCPStore at `master`.
    """

    master: Address
    coordinator: Address
    servers: tuple[Address, ...]
    is_hosted: bool = False


def ports_needed(world: World, key: int) -> int:
    """Return how many ports a container's agent must hold: one for each process, two for rank 0."""
    has_rank_0 = world.places[0].container.key == key
    return len(world.of_container(key)) + (_RANK_0_PORTS if has_rank_0 else 0)


def endpoints_of(
    world: World, ports: Mapping[int, Sequence[int]], store_port: int | None = None
) -> Endpoints:
    """Return the endpoints of a gang, given the ports that each container holds, by its key.

    Args:
        store_port: port at which rank 0's agent serves a TCPStore, or None.

    Raises:
        ValueError: a container holds fewer ports than `ports_needed` returns.
    """
    servers: dict[int, Address] = {}
    spare: dict[int, Sequence[int]] = {}
    for container in {p.container.key: p.container for p in world.processes}.values():
        processes = world.of_container(container.key)
        held = ports[container.key]
        if len(held) < (needed := ports_needed(world, container.key)):
            raise ValueError(f"container {container.key} has {len(held)} ports, needs {needed}")
        for place, port in zip(processes, held, strict=False):
            servers[place.rank] = (container.address, port)
        spare[container.key] = held[len(processes) :]
    first = world.places[0].container
    master, coordinator, *_ = spare[first.key]
    return Endpoints(
        master=(first.address, master if store_port is None else store_port),
        coordinator=(first.address, coordinator),
        servers=tuple(servers[place.rank] for place in world.processes),
        is_hosted=store_port is not None,
    )


def host_port(address: Address) -> str:
    """Return `host:port`, with brackets around an IPv6 address as RFC 3986 requires."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
