"""Ranks that ask each other directly, whatever proxy is meant for the outside.

gRPC, by which processes of TensorFlow and JAX find each other, goes through `http_proxy` to every
address that `no_proxy` does not list. It takes `no_grpc_proxy` in place of `no_proxy` where there
is one, and knows no `*`, which others take for all addresses where it stands alone. Some programs
read the names in lower case first, some those in upper case alone.

Source: gRPC's core, http_proxy_mapper.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hopsgpu.core.gang import World

_HERE = ("localhost", "127.0.0.1", "::1")
_OF_GRPC = "no_grpc_proxy"
_ALL = "*"


def direct_hosts(world: World) -> list[str]:
    """Addresses and names that no process of a gang is to ask a proxy for."""
    containers = [place.container for place in world.processes]
    found = (name for container in containers for name in (container.address, container.host))
    return [*dict.fromkeys((*_HERE, *found))]


def direct_environment(variables: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """The variables by which a process asks these hosts directly, and those that its user named.

    Args:
        variables: of the process, with its user's.
        hosts: as `direct_hosts` gives them.
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
