"""The doctor's session on a standalone master."""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.probe_cluster import DriverProbe
from hopsgpu.doctor.standalone_checks import NODE_REMEDIES


@dataclass(frozen=True)
class StandaloneProbe(DriverProbe):
    """A standalone master, whose workers run executors of a driver in this process."""

    @property
    def remedies(self) -> NodeRemedies:
        return NODE_REMEDIES

    @property
    def start_remedy(self) -> str:
        return (
            f"check that this machine reaches the ports of {self.master}, and that the master and"
            " the workers reach this machine (spark.driver.host, spark.driver.port)"
        )
