"""The doctor's session on a standalone master."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hopsgpu.core.container_ids import describe_log
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.probe_cluster import ProbeCluster
from hopsgpu.doctor.standalone_checks import NODE_REMEDIES
from hopsgpu.storage.bounded_calls import BoundedCall


@dataclass(frozen=True)
class StandaloneProbe(ProbeCluster):
    """A standalone master, whose applications end with their driver, which is this process.

    Attributes:
        master: the value of `spark.master`.
    """

    master: str

    @property
    def remedies(self) -> NodeRemedies:
        return NODE_REMEDIES

    def give_up(self, name: str, waited: str, starting: BoundedCall[Any]) -> tuple[str, str]:
        return f"{waited}, and it ends with this command", (
            f"check that this machine reaches the ports of {self.master}, and that the master and"
            " the workers reach this machine (spark.driver.host, spark.driver.port)"
        )

    def end_reason(self, container: str, host: str) -> str:
        return f"{container} ended there. {describe_log(container, host)}"
