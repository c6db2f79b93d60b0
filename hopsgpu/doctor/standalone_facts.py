"""Facts of a standalone master, from its web interface."""

from __future__ import annotations

from hopsgpu.backends.inventory import Observer
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager
from hopsgpu.doctor.standalone_checks import MasterFacts
from hopsgpu.errors import HopsGpuError


def master_facts(manager: StandaloneManager) -> MasterFacts:
    """Ask the masters.

    Raises:
        HopsGpuError: none is active, or it refuses the caller.
    """
    observer = Observer(manager)
    overview = observer.overview()
    return MasterFacts(
        address=manager.pages,
        standby=manager.standby_statuses(),
        spark=_spark_version(manager),
        nodes=overview.nodes,
        gpus=observer.gpus(overview, observer.devices(overview)),
    )


def _spark_version(manager: StandaloneManager) -> str:
    try:
        return manager.spark_version()
    except HopsGpuError:  # the JSON was answered, which is what gangs need
        return ""
