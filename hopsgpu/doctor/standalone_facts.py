"""Facts of a standalone master, from its web interface."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.backends.inventory import Observer
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager
from hopsgpu.doctor.facts import Setting, conf_places
from hopsgpu.doctor.machine_checks import HadoopClient
from hopsgpu.doctor.standalone_checks import MasterFacts
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.hadoop_conf import HadoopConf


def hdfs_client(environ: Mapping[str, str]) -> tuple[HadoopClient, Setting]:
    """Return the configuration of HDFS here, and a function that returns its properties."""
    places = conf_places(environ)
    try:
        setting = HadoopConf.load_hdfs(environ).get
        filesystem = setting("fs.defaultFS")
    except ConfigError as error:
        return HadoopClient(places, str(error), None, (), None), lambda name: None
    return HadoopClient(places, "", filesystem, (), None), setting


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
