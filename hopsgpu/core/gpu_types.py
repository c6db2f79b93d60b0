"""GPU types: product names, and the YARN resources that mark their nodes. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hopsgpu.core.gpu_names import has_type, is_slice, may_have_type, words_of
from hopsgpu.errors import ConfigError

# The names of resources that Hadoop's ResourceUtils accepts.
RESOURCE_NAME = re.compile(r"([a-z0-9.-]+/)?[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_BUILT_IN = ("memory-mb", "vcores")
_MAX_HOSTS = 8


def nodes_with(
    gpu_type: str, models: Mapping[str, Sequence[str]], silent: Sequence[str]
) -> frozenset[str]:
    """Return the nodes that have GPUs of a type, or MIG devices whose names lack the profile.

    Args:
        models: product names of the GPUs of each node.
        silent: nodes that do not report their product names.

    Raises:
        ConfigError: no node has the type; the message lists the types that exist.
    """
    nodes = frozenset(
        host for host, names in models.items() if any(may_have_type(n, gpu_type) for n in names)
    )
    if nodes:
        return nodes
    hosts_by_name: dict[str, list[str]] = {}
    for host, names in sorted(models.items()):
        for name in names:
            hosts_by_name.setdefault(name or "(a GPU without a name)", []).append(host)
    available = "; ".join(
        f"{name!r} on {_host_list(hosts)}" for name, hosts in sorted(hosts_by_name.items())
    )
    unknown = f"; not reported by {_host_list(sorted(silent))}" if silent else ""
    raise ConfigError(
        f"gpu_type={gpu_type!r}: no node that this application can use has such a GPU. Available:"
        f" {available or 'none'}{unknown}"
    )


def hosts_of_whole_gpus(
    models: Mapping[str, Sequence[str]], silent: Sequence[str], gpus_per_rank: float
) -> frozenset[str] | None:
    """Return the nodes on which a rank may have several GPUs; None if these are all nodes.

    Args:
        models: product names of the GPUs of each node.
        silent: nodes that do not report their product names, which count.

    Raises:
        ConfigError: all nodes have only MIG devices.
    """
    sliced = {host for host, names in models.items() if names and all(map(is_slice, names))}
    suitable = frozenset(models).union(silent) - sliced
    if sliced and not suitable:
        raise ConfigError(
            f"gpus_per_worker={gpus_per_rank:g}: the GPUs that this application can use are MIG"
            f" devices (on {_host_list(sorted(sliced))}), and a CUDA process uses only one of them:"
            " set gpus_per_worker=1 and use more workers"
        )
    return suitable if sliced else None


def _host_list(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _MAX_HOSTS} more" if len(hosts) > _MAX_HOSTS else ""
    return ", ".join(hosts[:_MAX_HOSTS]) + more


def parse_markers(setting: str | None) -> dict[str, str]:
    """Return the YARN resource that marks the nodes of each GPU type.

    Raise ConfigError unless the setting is such as "A100=gpu-a100, T4=gpu-t4", "" or None.
    """
    markers = {}
    for entry in filter(None, map(str.strip, (setting or "").split(","))):
        gpu_type, _, resource = map(str.strip, entry.partition("="))
        is_reserved = resource in _BUILT_IN or resource.startswith("yarn.io/")
        if not words_of(gpu_type) or not RESOURCE_NAME.fullmatch(resource) or is_reserved:
            raise ConfigError(
                f"spark.hopsgpu.markers={setting!r}: {entry!r} must be TYPE=RESOURCE, where"
                " RESOURCE is one of your own in yarn.resource-types, such as A100=gpu-a100,"
                " T4=gpu-t4"
            )
        markers[gpu_type] = resource
    return markers


def marker_of(gpu_type: str, markers: Mapping[str, str]) -> str | None:
    """Return the resource that marks the nodes of a type or of a wider one, or None.

    "A100" is wider than "A100-SXM4". If several types fit, the type with the most words counts.
    """
    fitting = [wider for wider in markers if has_type(gpu_type, wider)]
    return markers[max(fitting, key=lambda wider: len(words_of(wider)))] if fitting else None
