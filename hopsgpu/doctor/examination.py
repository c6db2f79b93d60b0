"""Runs all checks, the quick ones first, and yields each result as soon as it is known."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from hopsgpu.backends.spark.container_image import (
    IMAGE,
    RUNTIME,
    image_properties,
    network_of,
    requested_image,
)
from hopsgpu.backends.spark.spark_location import find_spark
from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE
from hopsgpu.cluster_managers.yarn.gpu_resource import SETTING, choose_gpu_resource
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.doctor import (
    facts as gather,
)
from hopsgpu.doctor import (
    image_checks,
    kerberos_checks,
    lake_checks,
    machine_checks,
    node_checks,
    queue_checks,
    settings_checks,
    yarn_checks,
)
from hopsgpu.doctor.report import Check, unknown, wrong
from hopsgpu.doctor.yarn_checks import YarnFacts
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.kerberos import is_kerberized
from hopsgpu.storage.spark_defaults import spark_defaults

_YARN = ("calculator", "gpus", "node managers", "queue")
_LAKE_SECONDS = 20.0
_NO_CREDENTIALS = "not asked without Kerberos credentials"


@dataclass(frozen=True)
class Examination:
    """The order of the checks, and the facts that they need.

    Attributes:
        conf: Spark properties of the session, as for hopsgpu.session().
        seconds: longest wait for containers on the nodes.
    """

    conf: Mapping[str, str]
    should_start_session: bool
    seconds: float

    def checks(self) -> Iterator[Check]:
        """Yield every check; causes precede their effects."""
        try:
            defaults, unread = spark_defaults(os.environ), None
        except ConfigError as error:
            defaults, unread = {}, str(error)
        settings = {**defaults, **self.conf}
        machine = gather.machine_facts(os.environ, settings)
        yield machine_checks.check_java(machine)
        yield machine_checks.check_spark(machine)
        yield machine_checks.check_python(machine)
        gpu_resource = yield from _gpu_resource(settings)
        client, setting = gather.client_facts(os.environ)
        yield machine_checks.check_hadoop_conf(client)
        yarn, no_credentials = None, ""
        if not client.problem:
            yield machine_checks.check_resource_types(client, gpu_resource)
            if is_kerberized(setting):
                no_credentials = yield from _kerberos(setting, settings, client)
            if no_credentials:
                yield from (unknown(name, _NO_CREDENTIALS) for name in ("yarn", *_YARN))
            else:
                yarn = yield from self._yarn(setting, settings, gpu_resource)
        if unread is not None:
            yield wrong("settings", unread, "make it readable, or set SPARK_CONF_DIR")
        else:
            gpu_nodes = 0 if yarn is None else len(yarn.gpus.nodes)
            yield settings_checks.check_settings(defaults, self.conf, gpu_nodes)
        if no_credentials:
            yield unknown("hdfs", _NO_CREDENTIALS)
            yield unknown(queue_checks.NAME, _NO_CREDENTIALS)
            return
        root = gather.lake_root(settings, os.environ, setting)
        if not client.problem or not root.startswith("file:"):
            yield self._lake(root, client)
        if not client.problem and client.managers:
            yield self._gang_queue(settings, setting)
        if self.should_start_session and not client.problem:
            label = settings.get("spark.yarn.executor.nodeLabelExpression", "")
            has_image = bool(requested_image(settings.get, os.environ))
            yield from self._session(yarn, setting, machine, label, has_image=has_image)

    def _yarn(
        self, setting: gather.Setting, settings: Mapping[str, str], gpu_resource: str
    ) -> Generator[Check, None, YarnFacts | None]:
        try:
            yarn = gather.yarn_facts(setting, gpu_resource)
        except HopsGpuError as error:
            yield wrong("yarn", str(error), "start YARN, or fix HADOOP_CONF_DIR")
            yield from (unknown(name, "the ResourceManager does not answer") for name in _YARN)
            return None
        yield yarn_checks.check_manager(yarn)
        yield yarn_checks.check_calculator(yarn)
        yield yarn_checks.check_gpus(yarn)
        yield yarn_checks.check_node_managers(yarn)
        yield yarn_checks.check_submission(yarn, settings.get("spark.yarn.queue", "default"))
        yield from self._image(settings, setting, yarn)
        return yarn

    def _image(
        self, settings: Mapping[str, str], setting: gather.Setting, yarn: YarnFacts
    ) -> Iterator[Check]:
        try:
            properties = image_properties(settings.get, os.environ, "")
        except ConfigError as error:
            yield wrong(image_checks.IMAGE, str(error), "change these properties")
            return
        if not properties:
            return
        runtime = properties[RUNTIME]
        network = network_of({**settings, **properties}.get, runtime)
        problems, asked = gather.runtime_problems(setting, yarn.nodes, runtime, network)
        yield image_checks.check_image(properties[IMAGE], runtime, asked, problems)

    def _lake(self, root: str, client: machine_checks.HadoopClient) -> Check:
        if client.filesystem is None and root.startswith("file:"):
            return unknown("hdfs", "the Hadoop configuration names no HDFS")
        try:
            facts = BoundedCall("hopsgpu-lake", lambda: gather.lake_facts(root)).result(
                _LAKE_SECONDS
            )
        except TimeoutError:
            facts = lake_checks.LakeFacts(root, f"no answer after {_LAKE_SECONDS:.0f} s", None)
        return lake_checks.check_lake(facts)

    def _gang_queue(self, settings: Mapping[str, str], setting: gather.Setting) -> Check:
        def read() -> queue_checks.QueueFacts:
            return gather.queue_facts(settings, os.environ, setting)

        try:
            facts = BoundedCall("hopsgpu-queue", read).result(_LAKE_SECONDS)
        except TimeoutError:
            problem = f"the lake did not answer: no answer after {_LAKE_SECONDS:.0f} s"
            facts = queue_checks.QueueFacts("", problem=problem)
        return queue_checks.check_gang_queue(facts)

    def _session(
        self,
        yarn: YarnFacts | None,
        setting: gather.Setting,
        machine: machine_checks.DriverMachine,
        label: str,
        *,
        has_image: bool,
    ) -> Iterator[Check]:
        why = "the ResourceManager does not answer" if yarn is None else "no node has GPUs"
        if yarn is not None and yarn.gpus.nodes:
            why = _no_spark()
        if yarn is None or why:
            names = ("session", "gang", *node_checks.NAMES)
            yield from (unknown(name, f"not tried: {why}") for name in names)
            return
        # A late import, because this module imports Spark.
        from hopsgpu.doctor.session_checks import Sessions

        manager = ResourceManager(web_addresses(setting), gpu_resource=yarn.gpus.resource)
        sessions = Sessions(
            yarn, setting, manager, machine, self.conf, label, self.seconds, has_image=has_image
        )
        yield from sessions.checks()


def _gpu_resource(settings: Mapping[str, str]) -> Generator[Check, None, str]:
    """Yield a check if two settings contradict each other; return the resource to examine."""
    try:
        return choose_gpu_resource(settings, os.environ)
    except ConfigError as error:
        yield wrong("gpu resource", str(error), f"set {SETTING} alone")
        return DEFAULT_GPU_RESOURCE


def _kerberos(
    setting: gather.Setting, settings: Mapping[str, str], client: machine_checks.HadoopClient
) -> Generator[Check, None, str]:
    """Yield the checks of Kerberos; return why there are no credentials, or ""."""
    credentials = gather.credentials(setting, settings.get, client.managers, os.environ)
    yield kerberos_checks.check_identity(credentials, time.time())
    yield kerberos_checks.check_web(credentials)
    yield kerberos_checks.check_protection(HadoopConf.load_hdfs(os.environ).get)
    return credentials.problem


def _no_spark() -> str:
    """Make Spark importable; return why it cannot be imported, or ""."""
    try:
        find_spark()
    except ConfigError as error:
        return str(error)
    return ""
