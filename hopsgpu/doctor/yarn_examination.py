"""The examination of YARN, with HDFS."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from hopsgpu.backends.spark.container_image import (
    IMAGE,
    RUNTIME,
    image_properties,
    network_of,
    requested_image,
)
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.gpu_resource import SETTING, choose_gpu_resource
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.doctor import facts as gather
from hopsgpu.doctor import image_checks, kerberos_checks, machine_checks, yarn_checks
from hopsgpu.doctor.cluster_examination import ClusterExamination, ExaminedCluster
from hopsgpu.doctor.container_logs import ContainerLogs
from hopsgpu.doctor.free_nodes import nodes_to_inspect
from hopsgpu.doctor.report import Check, unknown, wrong
from hopsgpu.doctor.yarn_checks import YarnFacts
from hopsgpu.doctor.yarn_probe import YarnProbe
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.kerberos import is_kerberized

_YARN = ("calculator", "gpus", "node managers", "queue")
_NO_CREDENTIALS = "not asked without Kerberos credentials"
_SILENT = "the ResourceManager does not answer"


@dataclass(frozen=True)
class YarnExamination(ClusterExamination):
    """The checks of YARN, which needs a Hadoop configuration."""

    @property
    def lake_name(self) -> str:
        return "hdfs"

    def checks(self) -> Generator[Check, None, ExaminedCluster]:
        gpu_resource = yield from self._gpu_resource()
        client, hadoop = gather.client_facts(os.environ)
        yield machine_checks.check_hadoop_conf(client)
        if client.problem:
            root = gather.lake_root(self.settings, os.environ, hadoop)
            return ExaminedCluster(hadoop, lake="" if root.startswith("file:") else root)
        yield machine_checks.check_resource_types(client, gpu_resource)
        if is_kerberized(hadoop) and (yield from self._kerberos(hadoop, client)):
            yield from (unknown(name, _NO_CREDENTIALS) for name in ("yarn", *_YARN))
            return ExaminedCluster(hadoop, refusal=_NO_CREDENTIALS)
        yarn = yield from self._yarn(hadoop, gpu_resource)
        root = gather.lake_root(self.settings, os.environ, hadoop)
        has_lake = client.filesystem is not None or not root.startswith("file:")
        manager = YarnManager(hadoop, gpu_resource=gpu_resource) if client.managers else None
        probe = None
        if yarn is not None and manager is not None:
            label = self.settings.get("spark.yarn.executor.nodeLabelExpression", "")
            free, skipped = nodes_to_inspect(yarn.nodes, yarn.gpus, label)
            probe = YarnProbe(
                yarn.gpus,
                free,
                skipped,
                manager.resource_manager,
                ContainerLogs(yarn.nodes, manager.node_managers),
                is_in_image=bool(requested_image(self.settings.get, os.environ)),
            )
        return ExaminedCluster(
            hadoop,
            gpu_nodes=0 if yarn is None else len(yarn.gpus.nodes),
            lake=root if has_lake else "",
            no_lake="the Hadoop configuration names no HDFS",
            manager=manager,
            probe=probe,
            no_probe=_SILENT,
        )

    def _gpu_resource(self) -> Generator[Check, None, str]:
        """Yield a check if two settings contradict each other; return the resource to examine."""
        try:
            return choose_gpu_resource(self.settings, os.environ)
        except ConfigError as error:
            yield wrong("gpu resource", str(error), f"set {SETTING} alone")
            return DEFAULT_GPU_RESOURCE

    def _kerberos(
        self, hadoop: gather.Setting, client: machine_checks.HadoopClient
    ) -> Generator[Check, None, str]:
        """Yield the checks of Kerberos; return why there are no credentials, or ""."""
        credentials = gather.credentials(hadoop, self.settings.get, client.managers, os.environ)
        yield kerberos_checks.check_identity(credentials, time.time())
        yield kerberos_checks.check_web(credentials)
        yield kerberos_checks.check_protection(HadoopConf.load_hdfs(os.environ).get)
        return credentials.problem

    def _yarn(
        self, hadoop: gather.Setting, gpu_resource: str
    ) -> Generator[Check, None, YarnFacts | None]:
        try:
            yarn = gather.yarn_facts(hadoop, gpu_resource)
        except HopsGpuError as error:
            yield wrong("yarn", str(error), "start YARN, or fix HADOOP_CONF_DIR")
            yield from (unknown(name, _SILENT) for name in _YARN)
            return None
        yield yarn_checks.check_manager(yarn)
        yield yarn_checks.check_calculator(yarn)
        yield yarn_checks.check_gpus(yarn)
        yield yarn_checks.check_node_managers(yarn)
        yield yarn_checks.check_submission(yarn, self.settings.get("spark.yarn.queue", "default"))
        yield from self._image(hadoop, yarn)
        return yarn

    def _image(self, hadoop: gather.Setting, yarn: YarnFacts) -> Iterator[Check]:
        try:
            properties = image_properties(self.settings.get, os.environ, "")
        except ConfigError as error:
            yield wrong(image_checks.IMAGE, str(error), "change these properties")
            return
        if not properties:
            return
        runtime = properties[RUNTIME]
        network = network_of({**self.settings, **properties}.get, runtime)
        problems, asked = gather.runtime_problems(hadoop, yarn.nodes, runtime, network)
        yield image_checks.check_image(properties[IMAGE], runtime, asked, problems)
