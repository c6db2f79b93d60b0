"""Proxy variables with which ranks ask each other directly, whatever proxy is set for the outside.

TensorFlow and JAX connect their processes by gRPC, which uses `http_proxy` for every address that
`no_proxy` does not list. If `no_grpc_proxy` is set, gRPC reads it instead of `no_proxy`. gRPC does
not know `*`, which alone in the list means all addresses to other programs. Some programs read the
lower-case names first, some only the upper-case names.

Source: gRPC's core, http_proxy_mapper.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hopsgpu.core.gang import World

_HERE = ("localhost", "127.0.0.1", "::1")
_OF_GRPC = "no_grpc_proxy"
_ALL = "*"


def direct_hosts(world: World) -> list[str]:
    """Return addresses and names for which no process of a gang may use a proxy."""
    containers = [place.container for place in world.processes]
    found = (name for container in containers for name in (container.address, container.host))
    return [*dict.fromkeys((*_HERE, *found))]


def direct_environment(variables: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return the variables by which a process asks these hosts, and those its user named, directly.

    Args:
        variables: variables of the process, including its user's.
        hosts: hosts that `direct_hosts` returned.
    """
    hosts = list(hosts)
    found = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        users = _listed(variables.get(name) or variables.get(other))
        found[name] = _ALL if users == [_ALL] else _joined(users, hosts)
    users = _listed(variables.get(_OF_GRPC))
    if users or found["no_proxy"] == _ALL:
        found[_OF_GRPC] = _joined(users, hosts)
    return found


def _listed(value: str | None) -> list[str]:
    return [entry for entry in map(str.strip, (value or "").split(",")) if entry]


def _joined(users: Iterable[str], hosts: Iterable[str]) -> str:
    return ",".join(dict.fromkeys((*users, *hosts)))
