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
_SHOWN = 8


def has_type(model: str, gpu_type: str) -> bool:
    """Return whether a product name has the words of a type, in their order and in any case.

    "NVIDIA A100-SXM4-40GB" is an "A100", an "a100-sxm4" and an "A100 40GB", and a "GeForce RTX
    3090" is an "RTX3090"; "NVIDIA RTX A1000" is not an "A100".
    """
    words, of = _words(model), _words(gpu_type)
    if not of or ("mig" in words and "mig" not in of):
        return False  # a MIG slice is less than the GPU whose name it has
    left = iter(words)
    return all(word in left for word in of) or "".join(of) in _runs(words)


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
        gpu_type: words of a product name, as for `has_type`.
        models: product names of the GPUs of each node.
        silent: nodes that do not report theirs.

    Raises:
        ConfigError: no node has the type; the message lists the types that exist.
    """
    found = frozenset(h for h, names in models.items() if any(has_type(n, gpu_type) for n in names))
    if found:
        return found
    where: dict[str, list[str]] = {}
    for host, names in sorted(models.items()):
        for name in names:
            where.setdefault(name or "(a GPU without a name)", []).append(host)
    known = "; ".join(f"{name!r} on {_shown(hosts)}" for name, hosts in sorted(where.items()))
    unknown = f"; not reported by {_shown(sorted(silent))}" if silent else ""
    raise ConfigError(
        f"gpu_type={gpu_type!r}: no node that this application can use has such a GPU. Available:"
        f" {known or 'none'}{unknown}"
    )


def _shown(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return ", ".join(hosts[:_SHOWN]) + more


def parse_markers(setting: str | None) -> dict[str, str]:
    """Return the YARN resource that marks the nodes of each GPU type.

    Args:
        setting: for example "A100=gpu-a100, T4=gpu-t4"; None or "" for none.

    Raises:
        ConfigError: the text has another form.
    """
    markers = {}
    for entry in filter(None, map(str.strip, (setting or "").split(","))):
        gpu_type, _, resource = map(str.strip, entry.partition("="))
        taken = resource in _BUILT_IN or resource.startswith("yarn.io/")
        if not _words(gpu_type) or not _RESOURCE.fullmatch(resource) or taken:
            raise ConfigError(
                f"spark.hopsgpu.markers={setting!r}: {entry!r} must be TYPE=RESOURCE, where"
                " RESOURCE is one of your own in yarn.resource-types, such as A100=gpu-a100,"
                " T4=gpu-t4"
            )
        markers[gpu_type] = resource
    return markers


def marker_of(gpu_type: str, markers: Mapping[str, str]) -> str | None:
    """Return the resource that marks the nodes of a type or of a wider one, or None.

    "A100" is wider than "A100-SXM4". Of several types that fit, the one with the most words counts.
    """
    fitting = [marked for marked in markers if has_type(gpu_type, marked)]
    return markers[max(fitting, key=lambda marked: len(_words(marked)))] if fitting else None
