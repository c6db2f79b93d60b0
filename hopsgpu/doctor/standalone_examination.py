"""The examination of a standalone master and its workers."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass

from hopsgpu.cluster_managers.manager_table import MASTER
from hopsgpu.cluster_managers.standalone.kind import Standalone
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager, configured_manager
from hopsgpu.doctor import standalone_checks
from hopsgpu.doctor.cluster_examination import (
    NEEDS_KERBEROS,
    ClusterExamination,
    ExaminedCluster,
)
from hopsgpu.doctor.free_nodes import nodes_to_inspect
from hopsgpu.doctor.report import Check, unknown
from hopsgpu.doctor.standalone_checks import MasterFacts
from hopsgpu.doctor.standalone_facts import master_facts
from hopsgpu.doctor.standalone_probe import StandaloneProbe
from hopsgpu.errors import ConfigError, HopsGpuError

_SILENT = "the master does not answer"


@dataclass(frozen=True)
class StandaloneExamination(ClusterExamination):
    """The checks of a standalone master; the Hadoop configuration is optional."""

    @property
    def lake_name(self) -> str:
        return "lake"

    def checks(self) -> Generator[Check, None, ExaminedCluster]:
        hadoop, root = yield from self.optional_hadoop_conf(
            Standalone.title, standalone_checks.SHARED_LAKE
        )
        manager, master = yield from self._master()
        gpu_nodes = 0 if master is None else len(master.gpus.nodes)
        if root is None:
            return ExaminedCluster(hadoop, gpu_nodes, refusal=NEEDS_KERBEROS)
        probe, no_probe = None, _SILENT
        if master is not None:
            free, skipped = nodes_to_inspect(master.nodes, master.gpus)
            probe = StandaloneProbe(master.gpus, free, skipped, self.settings[MASTER])
        return ExaminedCluster(
            hadoop, gpu_nodes, lake=root, manager=manager, probe=probe, no_probe=no_probe
        )

    def _master(
        self,
    ) -> Generator[Check, None, tuple[StandaloneManager | None, MasterFacts | None]]:
        manager = None
        try:
            manager = configured_manager(self.settings[MASTER], self.settings, os.environ)
            master = master_facts(manager)
        except (ConfigError, HopsGpuError) as error:
            yield standalone_checks.check_no_answer(str(error))
            yield unknown(standalone_checks.GPUS, _SILENT)
            return manager, None
        yield standalone_checks.check_master(master)
        version = standalone_checks.check_version(master.spark, self.machine.spark)
        if version is not None:
            yield version
        yield standalone_checks.check_gpus(master)
        return manager, master
