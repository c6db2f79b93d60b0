"""The interface of clusters on which the doctor starts a session and a gang of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
from hopsgpu.core.container_ids import describe_log
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.storage.bounded_calls import BoundedCall


@dataclass(frozen=True)
class ProbeCluster(ABC):
    """A cluster before the doctor's first session.

    Attributes:
        gpus: the cluster's GPUs.
        free: hosts with GPUs that have room for an executor.
        skipped: by host, why another host with GPUs has no room.
    """

    gpus: ClusterGpus
    free: tuple[str, ...]
    skipped: Mapping[str, str]

    @property
    @abstractmethod
    def remedies(self) -> NodeRemedies:
        """Return the remedies of nodes, which name this cluster manager's settings."""

    @property
    def has_image(self) -> bool:
        """Return whether the executors run in a container image."""
        return False

    def session_properties(self, conf: Mapping[str, str], name: str) -> Mapping[str, str]:
        """Return the properties of a session with a unique name, by which it can be given up."""
        return conf

    def exclude(self, conf: Mapping[str, str], hosts: Sequence[str]) -> Mapping[str, str] | None:
        """Return the properties of a session without executors on hosts; None if there are none."""
        return None

    @abstractmethod
    def give_up(self, name: str, waited: str, starting: BoundedCall[Any]) -> tuple[str, str]:
        """End a session that does not start in time.

        Args:
            name: the name that `session_properties` received.
            waited: how long the session was waited for, as the start of a sentence.
            starting: the call that starts it.

        Returns:
            Why it did not start, and the remedy.
        """

    @abstractmethod
    def end_reason(self, container: str, host: str) -> str:
        """Return why an executor ended.

        Raises:
            HopsGpuError: the reason cannot be read (yet).
        """


@dataclass(frozen=True)
class DriverProbe(ProbeCluster):
    """A cluster whose applications end with their driver, which is this process.

    Attributes:
        master: the value of `spark.master`.
    """

    master: str

    @property
    @abstractmethod
    def start_remedy(self) -> str:
        """Return the remedy for a session that does not start in time."""

    def give_up(self, name: str, waited: str, starting: BoundedCall[Any]) -> tuple[str, str]:
        return f"{waited}, and it ends with this command", self.start_remedy

    def end_reason(self, container: str, host: str) -> str:
        return f"{container} ended there. {describe_log(container, host)}"
