"""The doctor's session on Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.doctor.kubernetes_checks import NODE_REMEDIES
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.probe_cluster import DriverProbe


@dataclass(frozen=True)
class KubernetesProbe(DriverProbe):
    """Kubernetes, where pods are executors of a driver in this process."""

    @property
    def remedies(self) -> NodeRemedies:
        return NODE_REMEDIES

    @property
    def start_remedy(self) -> str:
        return (
            f"check that this machine reaches {self.master}, and that spark.driver.host is an"
            " address of this machine"
        )
