"""Proxy variables with which ranks connect to each other directly, without a configured proxy.

TensorFlow and JAX use gRPC, which uses `http_proxy` for addresses that are not in `no_proxy`. gRPC
prefers `no_grpc_proxy`, and does not support `*`. For other programs, a single `*` means all
addresses. Some programs read the lower-case names first, some only the upper-case names.

Source: gRPC's core, http_proxy_mapper.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hopsgpu.core.gang import World

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_GRPC_VARIABLE = "no_grpc_proxy"
_ALL = "*"


def direct_hosts(world: World) -> list[str]:
    """Return addresses and names that processes of a gang must reach without a proxy."""
    containers = [place.container for place in world.processes]
    addresses = (name for container in containers for name in (container.address, container.host))
    return [*dict.fromkeys((*_LOOPBACK, *addresses))]


def direct_environment(variables: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return the variables that exclude hosts from the proxy, besides those of a process."""
    hosts = list(hosts)
    direct = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        users = _split(variables.get(name) or variables.get(other))
        direct[name] = _ALL if users == [_ALL] else _join(users, hosts)
    users = _split(variables.get(_GRPC_VARIABLE))
    if users or direct["no_proxy"] == _ALL:
        direct[_GRPC_VARIABLE] = _join(users, hosts)
    return direct


def _split(value: str | None) -> list[str]:
    return [entry for entry in map(str.strip, (value or "").split(",")) if entry]


def _join(users: Iterable[str], hosts: Iterable[str]) -> str:
    return ",".join(dict.fromkeys((*users, *hosts)))
