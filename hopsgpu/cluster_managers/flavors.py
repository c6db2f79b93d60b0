"""The nodes on which a queue besides hopsgpu's admits executors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Flavors:
    """The nodes of the flavors that a queue, such as Kueue's, assigned to a gang.

    Attributes:
        labels: labels that the nodes have.
        tolerations: tolerations that pods on the nodes need, as in a pod's spec.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


NO_FLAVORS = Flavors()
