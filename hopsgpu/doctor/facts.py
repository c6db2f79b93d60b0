"""Facts that need no Spark application: this machine, YARN over REST, the lake."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from hopsgpu.backends.gang_queue import GangQueueReader
from hopsgpu.backends.gang_queue_root import find_hosted_queues, gang_queue_root
from hopsgpu.backends.inventory import Observer
from hopsgpu.backends.queue_directory import GangQueueRoot
from hopsgpu.backends.spark.container_image import IMAGE, PYTHON, requested_image
from hopsgpu.backends.spark.spark_location import cluster_spark
from hopsgpu.backends.spark.spark_versions import jar_version
from hopsgpu.cluster_managers.http_client import NoAnswer, is_kerberos_required
from hopsgpu.cluster_managers.kubernetes.kind import PYTHON_OF_IMAGE, Kubernetes, image_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.manager_table import MASTER, kind_of
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.yarn.container_runtime import (
    RuntimeProblem,
    runtime_problem,
    settings_of_runtime,
)
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.cluster_managers.yarn.rest_client import RESOURCE_MANAGER
from hopsgpu.devcluster.admin import site_properties
from hopsgpu.devcluster.java import java_of_spark
from hopsgpu.doctor.kerberos_checks import Credentials
from hopsgpu.doctor.lake_checks import LakeFacts
from hopsgpu.doctor.machine_checks import DriverMachine, HadoopClient
from hopsgpu.doctor.queue_checks import QueueDirectory, QueueFacts
from hopsgpu.doctor.yarn_checks import YarnFacts
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.identity import current_ticket, ensure_credentials, hadoop_user
from hopsgpu.storage.kerberos import keytab_of
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import choose_root

Setting = Callable[[str], str | None]
_WEB_SECONDS = (3.0, 5.0)


def machine_facts(environ: Mapping[str, str], settings: Mapping[str, str]) -> DriverMachine:
    """Return the Java, Python and Spark of a driver on this machine."""
    choice = java_of_spark(environ)
    if choice is None:
        version, at = None, "JAVA_HOME is not set and there is no java on the PATH"
    else:
        origin, binary, java = choice
        version, at = (java.version if java else None), f"{binary}, by {origin}"
    home = _spark_home(environ)
    return DriverMachine(
        java=version,
        java_at=at,
        python=platform.python_version(),
        executors_python=_executors_python(environ, settings),
        pyspark=_pyspark(),
        spark=jar_version(Path(home, "jars")) if home else None,
        spark_home=home,
    )


def _executors_python(environ: Mapping[str, str], settings: Mapping[str, str]) -> str:
    if isinstance(kind_of(settings.get(MASTER)), Kubernetes):
        path = settings.get(PYTHON) or environ.get("PYSPARK_PYTHON") or PYTHON_OF_IMAGE
        return f"{path} in {settings.get(IMAGE) or image_of(settings.get) or 'the image'}"
    version = ".".join(platform.python_version_tuple()[:2])
    if image := requested_image(settings.get, environ):
        return f"{settings.get(PYTHON) or f'python{version}'} in {image}"
    if named := settings.get("spark.pyspark.python"):
        return f"{named} (spark.pyspark.python)"
    if named := environ.get("PYSPARK_PYTHON"):
        return f"{named} (PYSPARK_PYTHON)"
    return f"{sys.executable} (this Python)"


def _spark_home(environ: Mapping[str, str]) -> str:
    if named := environ.get("SPARK_HOME"):
        return named
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent)
    # A session searches like this: a spark-submit on the PATH may be a distribution's wrapper.
    try:
        return cluster_spark()
    except ConfigError:
        return ""


def _pyspark() -> str | None:
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return None


def client_facts(environ: Mapping[str, str]) -> tuple[HadoopClient, Setting]:
    """Return the Hadoop configuration here, and a function that returns its properties."""
    places = conf_places(environ)
    try:
        setting = HadoopConf.load(environ).get
        types = _types(places, setting)
    except ConfigError as error:
        return HadoopClient(places, str(error), None, (), None), lambda name: None
    return HadoopClient(places, "", setting("fs.defaultFS"), web_addresses(setting), types), setting


def hdfs_client(environ: Mapping[str, str]) -> tuple[HadoopClient, Setting]:
    """Return the configuration of HDFS here, and a function that returns its properties."""
    places = conf_places(environ)
    try:
        setting = HadoopConf.load_hdfs(environ).get
        filesystem = setting("fs.defaultFS")
    except ConfigError as error:
        return HadoopClient(places, str(error), None, (), None), lambda name: None
    return HadoopClient(places, "", filesystem, (), None), setting


def conf_places(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories of the Hadoop configuration that the environment names."""
    values = (environ.get(name, "") for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"))
    return tuple(dict.fromkeys(place for v in values for place in v.split(os.pathsep) if place))


def _types(places: tuple[str, ...], setting: Setting) -> tuple[str, ...] | None:
    """Return `yarn.resource-types` from resource-types.xml or, as YARN does, from other files."""
    file = next((f for place in places if (f := Path(place, "resource-types.xml")).is_file()), None)
    in_file = None if file is None else site_properties(file).get("yarn.resource-types")
    types = in_file or setting("yarn.resource-types")
    return (
        None if types is None else tuple(part.strip() for part in types.split(",") if part.strip())
    )


def yarn_facts(setting: Setting, gpu_resource: str) -> YarnFacts:
    """Ask the ResourceManager; raise HopsGpuError if it does not answer, or refuses."""
    manager = ResourceManager(web_addresses(setting), gpu_resource=gpu_resource)
    with manager.check_form():
        return _yarn(manager, setting)


def _yarn(manager: ResourceManager, setting: Setting) -> YarnFacts:
    scheduler = manager.ask("/ws/v1/cluster/scheduler")["scheduler"]["schedulerInfo"]
    info = manager.ask("/ws/v1/cluster/info")["clusterInfo"]
    metrics = manager.ask("/ws/v1/cluster/metrics")["clusterMetrics"]
    totals = metrics.get("totalClusterResourcesAcrossPartition") or {}
    kinds = (totals.get("resourceInformations") or {}).get("resourceInformation") or []
    nodes = manager.nodes()
    return YarnFacts(
        address=", ".join(manager.addresses),
        version=str(info.get("resourceManagerVersion", "")),
        scheduler=scheduler["type"],
        policy=str((scheduler.get("rootQueue") or {}).get("schedulingPolicy", "")),
        # Only a CapacityScheduler reports the sum over all nodes (Hadoop's ClusterMetricsInfo).
        has_gpu_type=any(kind["name"] == manager.gpu_resource for kind in kinds)
        or any(n.total.gpus for n in nodes),
        gpus=Observer(YarnManager(setting, gpu_resource=manager.gpu_resource)).observe(),
        nodes=nodes,
        queues=manager.queues(),
    )


def runtime_problems(
    setting: Setting, nodes: Sequence[Node], runtime: str, network: str | None
) -> tuple[dict[str, RuntimeProblem], int]:
    """Return why nodes with GPUs start no containers in images, and how many told their settings.

    Args:
        network: the network that the session requests; None for the default.
    """
    with_gpus = [node for node in nodes if node.total.gpus and node.state == "RUNNING"]
    settings = NodeManagers(setting).settings(with_gpus, settings_of_runtime(runtime))
    problems = {
        host: runtime_problem(runtime, values, network) for host, values in settings.items()
    }
    return (
        {host: problem for host, problem in problems.items() if problem is not None},
        sum(bool(values) for values in settings.values()),
    )


def lake_root(settings: Mapping[str, str], environ: Mapping[str, str], setting: Setting) -> str:
    """Return the root of runs and models that a session would use."""
    named = settings.get("spark.hopsgpu.root") or environ.get("HOPSGPU_ROOT")
    user = "" if named else hadoop_user(setting, environ)
    return choose_root(named, setting("fs.defaultFS"), user)


def credentials(
    setting: Setting, spark: Setting, managers: Sequence[str], environ: MutableMapping[str, str]
) -> Credentials:
    """Return the Kerberos credentials of this user, and which daemons require them.

    Args:
        setting: returns a property of Hadoop's configuration, or None.
        spark: returns a property of the session, or None.
        managers: web addresses of the ResourceManagers.
        environ: this process's environment. If there is a keytab, `environ` is changed to name the
            tickets.
    """
    problem, user, ticket, keytab = "", "", None, ""
    try:
        ensure_credentials(setting, spark, environ)
        ticket = current_ticket(environ)
        user = hadoop_user(setting, environ)
        keytab = (keytab_of(spark) or ("", ""))[1]
    except ConfigError as error:
        problem = str(error)
    spnego: dict[str, bool | None] = {}
    for address in managers:
        try:
            spnego[address] = is_kerberos_required(address + RESOURCE_MANAGER.info, _WEB_SECONDS)
        except NoAnswer:
            spnego[address] = None
    has_client = importlib.util.find_spec("requests_gssapi") is not None
    return Credentials(problem, user, ticket, keytab, spnego, has_client)


def lake_facts(root: str) -> LakeFacts:
    """Write, rename, read back and remove a small file."""
    began = time.monotonic()
    content = secrets.token_bytes(1024)
    try:
        home = LakePath(root, should_fail_fast=True)
        home.make()
        first, second = (home / f".doctor-{secrets.token_hex(6)}-{n}" for n in ("a", "b"))
        try:
            first.write(content)
            is_intact = first.rename(second) and second.read(len(content)) == content
        finally:
            first.remove()
            second.remove()
    except HopsGpuError as error:
        return LakeFacts(root, str(error), time.monotonic() - began)
    problem = "a file that was written and renamed there has a different content"
    return LakeFacts(root, "" if is_intact else problem, time.monotonic() - began)


def queue_facts(
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    setting: Setting,
    manager: ClusterManager,
) -> QueueFacts:
    """Read the queues of gangs of the cluster's partitions, and who owns their directories."""
    locks = settings.get("spark.hopsgpu.locks") or environ.get("HOPSGPU_LOCKS")
    try:
        default_fs = settings.get("spark.hadoop.fs.defaultFS") or setting("fs.defaultFS")
        hosted = find_hosted_queues(manager, locks, default_fs)
        if hosted is not None:
            return _hosted_queue_facts(hosted, manager)
        base, names = gang_queue_root(locks, default_fs, manager.cluster)
        chain = [base]
        for name in names:
            chain.append(chain[-1] / name)
        # The default is in /tmp, which is everybody's.
        return _queue_facts(base, chain if locks else chain[1:], manager)
    except HopsGpuError as error:
        return QueueFacts("", problem=str(error))


def _hosted_queue_facts(root: GangQueueRoot, manager: ClusterManager) -> QueueFacts:
    """Read the queue of gangs in the cluster manager, which has no directories with owners."""
    queues, _ = GangQueueReader(root).read()
    snapshots = [snapshot for snapshot, _ in queues.values()]
    return QueueFacts(
        url=root.url,
        is_hosted=True,
        waiting=sum(len(snapshot.tickets) for snapshot in snapshots),
        ignored=Counter(file.owner for snapshot in snapshots for file in snapshot.ignored),
    )


def _queue_facts(base: LakePath, chain: Sequence[LakePath], manager: ClusterManager) -> QueueFacts:
    parents = map(_queue_directory, chain)
    reader = GangQueueReader(
        chain[-1], find_partitions=lambda: {node.partition for node in manager.nodes()}
    )
    queues, _ = reader.read()
    partitions = (_queue_directory(chain[-1] / name) for name in sorted(queues))
    snapshots = [snapshot for snapshot, _ in queues.values()]
    top = LakePath(f"{base.url.removesuffix(base.path)}/", should_fail_fast=True)
    return QueueFacts(
        url=chain[-1].url,
        is_local=base.is_local,
        administrator=top.stat().owner,
        parents=tuple(filter(None, parents)),
        partitions=tuple(filter(None, partitions)),
        waiting=sum(len(snapshot.tickets) for snapshot in snapshots),
        ignored=Counter(file.owner for snapshot in snapshots for file in snapshot.ignored),
    )


def _queue_directory(place: LakePath) -> QueueDirectory | None:
    """Return the owner and mode of a directory; None if it does not exist."""
    try:
        status = place.stat()
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    return QueueDirectory(place.path, status.owner, status.mode)
