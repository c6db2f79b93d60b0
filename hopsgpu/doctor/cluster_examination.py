"""The interface of what a kind of cluster manager adds to the examination."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.doctor import facts as gather
from hopsgpu.doctor import lake_checks
from hopsgpu.doctor.facts import Setting
from hopsgpu.doctor.machine_checks import DriverMachine
from hopsgpu.doctor.probe_cluster import ProbeCluster
from hopsgpu.doctor.report import Check
from hopsgpu.storage.kerberos import is_kerberized

# The refusal where a Hadoop configuration requires Kerberos, and executors receive no tokens.
NEEDS_KERBEROS = "not tried: the Hadoop configuration requires Kerberos"


@dataclass(frozen=True)
class ExaminedCluster:
    """The facts of an examined cluster that the checks of all cluster managers need.

    Attributes:
        hadoop: returns a property of Hadoop's configuration, or None.
        gpu_nodes: number of nodes with GPUs.
        lake: root of runs and models; "" if it cannot be checked.
        no_lake: why there is no lake; "" if nothing is to be said.
        manager: a client of the cluster manager, for the queue of gangs; None if no configuration
            names it.
        probe: the cluster for the doctor's own session, or None.
        no_probe: why there is no probe; "" if nothing is to be said.
        refusal: why neither the lake nor a session is tried; "" if they are.
    """

    hadoop: Setting
    gpu_nodes: int = 0
    lake: str = ""
    no_lake: str = ""
    manager: ClusterManager | None = None
    probe: ProbeCluster | None = None
    no_probe: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class ClusterExamination(ABC):
    """The checks of one kind of cluster manager.

    Attributes:
        settings: Spark's properties, also those of spark-defaults.conf.
        machine: the driver's machine.
    """

    settings: Mapping[str, str]
    machine: DriverMachine

    @property
    @abstractmethod
    def lake_name(self) -> str:
        """Return the name of the check of the lake."""

    def optional_hadoop_conf(
        self, manager: str, shared: tuple[str, str]
    ) -> Generator[Check, None, tuple[Setting, str | None]]:
        """Yield the check of a Hadoop configuration that only the lake needs.

        Args:
            manager: what the cluster manager is, such as "a standalone master".
            shared: who must share a local directory in place of a lake, and the remedy.

        Returns:
            A function that returns a property of Hadoop's configuration, and the root of runs and
            models; None in its place if Kerberos prevents runs.
        """
        client, hadoop = gather.hdfs_client(os.environ)
        needs_tokens = is_kerberized(hadoop)
        root = "" if needs_tokens else gather.lake_root(self.settings, os.environ, hadoop)
        yield lake_checks.check_hadoop_conf(
            client, root, is_kerberized=needs_tokens, manager=manager, shared=shared
        )
        return hadoop, None if needs_tokens else root

    @abstractmethod
    def checks(self) -> Generator[Check, None, ExaminedCluster]:
        """Yield the checks of the cluster, causes before their effects."""
