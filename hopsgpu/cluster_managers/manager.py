"""The interface of cluster managers: what YARN or a standalone master reports.

All numbers come from the cluster manager itself and never from Spark's driver, because an executor
that Spark has forgotten may still hold a GPU. The pure modules of this package decide on the values
that the methods return.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.cluster_managers.node_gpu_list import NodeAnswers
from hopsgpu.cluster_managers.snapshot import Node, Overview, Snapshot
from hopsgpu.cluster_managers.submitted_drivers import SubmittedDrivers
from hopsgpu.core.run_record import ApplicationReport


@dataclass(frozen=True)
class HeldExecutors:
    """The executors that an application has and requests for one resource profile.

    Attributes:
        containers: host of each granted executor that has not ended, by its container's ID.
        pending: number of further requested executors.
    """

    containers: Mapping[str, str]
    pending: int


@dataclass(frozen=True)
class StartProblem:
    """The reason why requested executors do not start, in the words of the cluster manager.

    Attributes:
        sentence: the problem in one sentence, without a full stop.
        details: what the cluster manager says; "" for no more.
        remedy: what to do; "" if that is unknown.
        is_final: whether nothing but another setting helps.
    """

    sentence: str
    details: str
    remedy: str
    is_final: bool = False

    @property
    def text(self) -> str:
        return "; ".join(filter(None, (self.sentence, self.details, self.remedy)))


class ClusterManager(ABC):
    """A client of one cluster manager; threads may share it.

    All methods raise HopsGpuError if the cluster manager does not answer, refuses the caller, or
    answers in an unknown form.
    """

    @property
    @abstractmethod
    def title(self) -> str:
        """Return its name in sentences, such as "YARN" or "the Spark master"."""

    @property
    @abstractmethod
    def cluster(self) -> str:
        """Return a name of the cluster, unique among those that share a file system."""

    @property
    @abstractmethod
    def gpu_resource(self) -> str:
        """Return the name of the resource that counts GPUs."""

    @property
    @abstractmethod
    def pages(self) -> str:
        """Return the URL of its web pages; "" if it has none."""

    @abstractmethod
    def application_page(self, application_id: str) -> str:
        """Return the URL of the page of an application; "" without pages."""

    @property
    def queues_page(self) -> str:
        """Return the URL of the page of its queues; "" if it has none."""
        return ""

    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes, whatever their state."""

    def gpus(self) -> tuple[int, int]:
        """Return the numbers of used and of all GPUs of the running nodes."""
        running = [node for node in self.nodes() if node.state == "RUNNING"]
        return sum(n.used.gpus for n in running), sum(n.total.gpus for n in running)

    @abstractmethod
    def devices(self, nodes: Sequence[Node]) -> NodeAnswers:
        """Return what the GPUs of nodes are, as far as the nodes report it."""

    @abstractmethod
    def snapshot(self, application_id: str, user: str) -> Snapshot:
        """Return a snapshot of what determines the resources of a running application."""

    @abstractmethod
    def overview(self, user: str) -> Overview:
        """Return nodes, queues and applications, with a snapshot for the user in each queue."""

    @abstractmethod
    def caller(self) -> str:
        """Return the user that the cluster manager takes the caller for."""

    @abstractmethod
    def check_submission(self) -> None:
        """Check that the cluster manager answers, and accepts an application of the caller.

        Raises:
            CapacityError: it accepts none, such as in a queue that is stopped.
        """

    def submitted_drivers(self) -> SubmittedDrivers | None:
        """Return the drivers that run in the cluster; None if it runs none."""
        return None

    @abstractmethod
    def held_executors(self, application_id: str, profile_id: int) -> HeldExecutors:
        """Return what a running application has and requests for a resource profile."""

    def find_start_problem(self, application_id: str, profile_id: int) -> StartProblem | None:
        """Return what keeps the requested executors of a resource profile from starting.

        Returns:
            None if they start as they should, or the cluster manager reports no reason.
        """
        return None

    @abstractmethod
    def are_gpus_ending(self) -> bool:
        """Return whether nodes still end executors whose GPUs are already released."""

    @abstractmethod
    def why_lost(self, application_id: str, reason: str, host: str, container_id: str = "") -> str:
        """Return why an executor on a host was lost; never raise.

        Args:
            reason: Spark's reason, or "" if Spark knows none.
            container_id: ID of the executor's container; "" for any one of the host.

        Returns:
            Only Spark's reason if the cluster manager knows no other.
        """

    @abstractmethod
    def end_of(self, application_id: str) -> str:
        """Return the final state and the reason of the end of an application; "" while it runs."""

    @abstractmethod
    def report(self, application_id: str) -> ApplicationReport | None:
        """Return the state of an application; None if the ID is not one of this cluster manager."""

    @abstractmethod
    def ended_since(self, time: float) -> Mapping[str, ApplicationReport]:
        """Return the applications, by ID, that have ended since a time in seconds since 1970."""
