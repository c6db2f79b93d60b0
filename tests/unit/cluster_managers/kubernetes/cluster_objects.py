"""Objects of an API server, with the fields that a test needs."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hopsgpu.cluster_managers.kubernetes.amounts import ExactAmount
from hopsgpu.cluster_managers.kubernetes.pods import Pod
from hopsgpu.units import MIB

GPU = "nvidia.com/gpu"


def exact(gpus: object = 0, cores: object = 0, mib: object = 0) -> ExactAmount:
    """Return an exact amount; cores may be a decimal text."""
    return ExactAmount(Fraction(str(gpus)), Fraction(str(cores)), Fraction(str(mib)) * MIB)


def container(
    requests: dict[str, str] | None = None, limits: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    resources = {"requests": requests or {}, "limits": limits or {}}
    return {"name": "c", "resources": resources, **fields}


def pod_answer(
    spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **metadata: Any
) -> dict[str, Any]:
    """Return a pod as the API server would list it, by default a running one on node1."""
    return {
        "metadata": {"namespace": "team", "name": "a", **metadata},
        "spec": {"nodeName": "node1", **(spec or {})},
        "status": {"phase": "Running", **(status or {})},
    }


def node_answer(
    spec: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return a ready node with two GPUs, four cores and 8 GiB."""
    return {
        "metadata": {"name": "node1", "labels": labels or {}},
        "spec": spec or {},
        "status": {
            "allocatable": {GPU: "2", "cpu": "4", "memory": "8Gi"},
            "conditions": [{"type": "Ready", "status": "True"}],
            **(status or {}),
        },
    }


def pod_value(name: str = "a", **fields: Any) -> Pod:
    """Return a pod as a value, by default a running one on node1."""
    return Pod(
        **{
            "namespace": "team",
            "name": name,
            "node": "node1",
            "phase": "Running",
            "requests": exact(1, 1, 512),
            "created": 0.0,
            **fields,
        }
    )
