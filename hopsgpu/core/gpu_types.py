"""GPU types: product names, and the YARN resources that mark their nodes. Pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from hopsgpu.errors import ConfigError

_WORD = re.compile(r"[^\W_]+")
# The names of resources that Hadoop's ResourceUtils accepts.
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_BUILT_IN = ("memory-mb", "vcores")
_MAX_HOSTS = 8


def has_type(model: str, gpu_type: str) -> bool:
    """Return whether a product name has the words of a type, in their order and in any case.

    "NVIDIA A100-SXM4-40GB" is an "A100", an "a100-sxm4" and an "A100 40GB", and a "GeForce RTX
    3090" is an "RTX3090"; "NVIDIA RTX A1000" is not an "A100".
    """
    words, wanted = _words(model), _words(gpu_type)
    if not wanted or ("mig" in words and "mig" not in wanted):
        return False  # a MIG device is smaller than the GPU whose name it has
    remaining = iter(words)
    return all(word in remaining for word in wanted) or "".join(wanted) in _runs(words)


def _runs(words: Sequence[str]) -> Iterator[str]:
    """Yield every sequence of consecutive words, written as one word."""
    for begin, end in itertools.combinations(range(len(words) + 1), 2):
        yield "".join(words[begin:end])


def _words(name: str) -> list[str]:
    return _WORD.findall(name.casefold())


def nodes_with(
    gpu_type: str, models: Mapping[str, Sequence[str]], silent: Sequence[str]
) -> frozenset[str]:
    """Return the nodes that have GPUs of a type.

    Args:
        models: product names of the GPUs of each node.
        silent: nodes that do not report their product names.

    Raises:
        ConfigError: no node has the type; the message lists the types that exist.
    """
    nodes = frozenset(h for h, names in models.items() if any(has_type(n, gpu_type) for n in names))
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
        if not _words(gpu_type) or not _RESOURCE.fullmatch(resource) or is_reserved:
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
    return markers[max(fitting, key=lambda wider: len(_words(wider)))] if fitting else None
