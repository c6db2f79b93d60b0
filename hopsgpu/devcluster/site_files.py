"""The configuration files of a cluster as values: which properties are in which file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from hopsgpu.devcluster import admin
from hopsgpu.devcluster.class_archive import ClassArchive
from hopsgpu.devcluster.config import ClusterSpec, Properties
from hopsgpu.devcluster.host_check import DATANODE_HANDLER, INITIALIZER
from hopsgpu.devcluster.java import QUICK
from hopsgpu.devcluster.layout import MASTER, ClusterLayout, address_of, node_names
from hopsgpu.devcluster.node_gpus import GpuPlan
from hopsgpu.devcluster.realm import Realm

Ports = Mapping[str, int]
GPU_PLUGIN = "yarn.nodemanager.resource-plugins"
_PREEMPTION_MONITOR: Mapping[str, str] = {
    "yarn.resourcemanager.scheduler.monitor.enable": "true",
    "yarn.resourcemanager.scheduler.monitor.policies": "org.apache.hadoop.yarn.server"
    ".resourcemanager.monitor.capacity.ProportionalCapacityPreemptionPolicy",
}
_MONITOR = "yarn.resourcemanager.monitor.capacity.preemption"
# YARN's defaults are for many small containers that end soon: YARN checks every 3 s, gives a
# container 15 s, preempts a fifth of the excess in a round, and ignores a tenth.
_PREEMPTION: Mapping[str, str] = {
    f"{_MONITOR}.monitoring_interval": "1000",
    f"{_MONITOR}.max_wait_before_kill": "3000",
    f"{_MONITOR}.total_preemption_per_round": "1.0",
    f"{_MONITOR}.natural_termination_factor": "1.0",
    f"{_MONITOR}.max_ignored_over_capacity": "0.0",
    # Containers are not preempted for applications of the same queue.
    f"{_MONITOR}.intra-queue-preemption.enabled": "false",
}
# Hadoop's defaults.
_STATIC_USER = "org.apache.hadoop.http.lib.StaticUserWebFilter"
_CSRF_HANDLER = "org.apache.hadoop.hdfs.server.datanode.web.RestCsrfPreventionFilterHandler"
_GIB_PER_GPU, _GIB_BESIDE, _CORES_BESIDE = 6, 4, 5
# Threads that answer the calls to one port. An idle thread wakes up every second: with the default
# of 50, these wake-ups are most of an idle ResourceManager's load.
_HANDLERS = "8"


def node_size(gpus_per_node: int) -> tuple[int, int]:
    """Return the memory in MiB and the cores that a node with so many GPUs advertises.

    Both suffice for the node's share of a gang of default ranks (one core, 4 GiB and the overhead
    each), an application master and CPU executors.
    """
    memory = 1024 * (gpus_per_node * _GIB_PER_GPU + _GIB_BESIDE)
    return memory, gpus_per_node + _CORES_BESIDE


def _size_factor(spec: ClusterSpec) -> int:
    """Return the factor of the memory and the cores of a node.

    YARN does not preempt a queue that has exactly its share of the memory or the cores, even if it
    has too many GPUs (DominantResourceCalculator.isAnyMajorResourceZero). With a large factor, no
    gang reaches its queue's share of memory or cores.
    """
    return 4 if spec.preemption else 1


def core_site(layout: ClusterLayout, spec: ClusterSpec, ports: Ports, user: str) -> Properties:
    return {
        "fs.defaultFS": f"hdfs://{spec.namenode_host}:{ports['namenode.rpc']}",
        "hadoop.tmp.dir": str(layout.scratch),
        "hadoop.security.authentication": "simple",
        "hadoop.http.staticuser.user": user,
        # hopsgpu and the check of the Host header read the nodes' names there; otherwise only the
        # cluster's JVMs know the names.
        "hopsgpu.hosts": str(layout.hosts),
        "hadoop.http.filter.initializers": f"{INITIALIZER},{_STATIC_USER}",
    }


def hdfs_site(layout: ClusterLayout, spec: ClusterSpec, ports: Ports) -> Properties:
    web = "https" if spec.https else "http"
    # `standby` has the properties of two NameNodes.
    single = {
        "dfs.namenode.name.dir": str(layout.name()),
        "dfs.namenode.rpc-address": f"{spec.namenode_host}:{ports['namenode.rpc']}",
        f"dfs.namenode.{web}-address": f"{spec.address}:{ports['namenode.web']}",
    }
    return {
        **({} if spec.namenode_ha else single),
        "dfs.replication": "1",
        "dfs.permissions.enabled": "true",
        "dfs.webhdfs.enabled": "true",
        "dfs.namenode.secondary.http-address": f"{spec.address}:0",
        "dfs.namenode.safemode.extension": "0",
        "dfs.namenode.safemode.min.datanodes": "1",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.handler.count": _HANDLERS,
        "dfs.datanode.handler.count": _HANDLERS,
        # With the default of 10 ms, the thread that frees deleted blocks causes most of an idle
        # NameNode's CPU load.
        "dfs.namenode.block.deletion.unlock.interval.ms": "100",
        "dfs.datanode.data.dir": str(layout.data),
        # An address: clients other than JVMs do not know the private host names.
        "dfs.datanode.hostname": spec.address,
        "dfs.datanode.httpserver.filter.handlers": f"{DATANODE_HANDLER},{_CSRF_HANDLER}",
        "dfs.datanode.address": f"{spec.address}:{ports['datanode.data']}",
        "dfs.datanode.ipc.address": f"{spec.address}:{ports['datanode.ipc']}",
        f"dfs.datanode.{web}.address": f"{spec.address}:{ports['datanode.web']}",
    }


def yarn_site(layout: ClusterLayout, spec: ClusterSpec, ports: Ports) -> Properties:
    memory, cores = (size * _size_factor(spec) for size in node_size(spec.counted_gpus))
    rm = "yarn.resourcemanager"
    web = "webapp.https.address" if spec.https else "webapp.address"
    # `standby` has the addresses of two ResourceManagers.
    single = {
        f"{rm}.hostname": MASTER,
        f"{rm}.address": f"{MASTER}:{ports['resourcemanager.rpc']}",
        f"{rm}.scheduler.address": f"{MASTER}:{ports['resourcemanager.scheduler']}",
        f"{rm}.resource-tracker.address": f"{MASTER}:{ports['resourcemanager.tracker']}",
        f"{rm}.admin.address": f"{MASTER}:{ports['resourcemanager.admin']}",
        f"{rm}.{web}": f"{MASTER}:{ports['resourcemanager.web']}",
    }
    return {
        **({} if spec.resourcemanager_ha else single),
        f"{rm}.scheduler.class": "org.apache.hadoop.yarn.server.resourcemanager.scheduler"
        ".capacity.CapacityScheduler",
        f"{rm}.nodemanagers.heartbeat-interval-ms": "250",
        f"{rm}.client.thread-count": _HANDLERS,
        f"{rm}.scheduler.client.thread-count": _HANDLERS,
        f"{rm}.resource-tracker.client.thread-count": _HANDLERS,
        "yarn.nodemanager.container-manager.thread-count": _HANDLERS,
        # By default, a NodeManager that starts before the ResourceManager retries after 30 s.
        f"{rm}.connect.retry-interval.ms": "1000",
        # By default both are in /tmp, which the clusters of a machine would share.
        "yarn.node-attribute.fs-store.root-dir": f"file://{layout.yarn}/node-attributes",
        "yarn.node-labels.fs-store.root-dir": f"file://{layout.yarn}/node-labels",
        "yarn.scheduler.minimum-allocation-mb": "256",
        "yarn.scheduler.minimum-allocation-vcores": "1",
        "yarn.scheduler.maximum-allocation-mb": str(memory),
        "yarn.scheduler.maximum-allocation-vcores": str(cores),
        "yarn.nodemanager.resource.memory-mb": str(memory),
        "yarn.nodemanager.resource.cpu-vcores": str(cores),
        "yarn.nodemanager.pmem-check-enabled": "true",
        # By default the check is left to cgroups, even if there are none.
        "yarn.nodemanager.resource.memory.enforced": "false",
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "99.0",
        "yarn.nodemanager.log.retain-seconds": str(7 * 24 * 3600),
        "yarn.log-aggregation-enable": "false",
        "yarn.timeline-service.enabled": "false",
        **(_PREEMPTION_MONITOR if spec.preemption else {}),
    }


def node_site(
    layout: ClusterLayout,
    spec: ClusterSpec,
    node: str,
    ports: Ports,
    gpus: GpuPlan,
    environ: Mapping[str, str],
) -> Properties:
    """Return the additional properties of a NodeManager's yarn-site.

    The containers get only the variables of `environ`, not the NodeManager's.
    """
    nm, home = "yarn.nodemanager", layout.node(node)
    web = "webapp.https.address" if spec.https else "webapp.address"
    properties = {
        f"{nm}.hostname": node,
        f"{nm}.address": f"{node}:{ports[f'{node}.rpc']}",
        f"{nm}.localizer.address": f"{node}:{ports[f'{node}.localizer']}",
        f"{nm}.{web}": f"{node}:{ports[f'{node}.web']}",
        f"{nm}.local-dirs": str(home / "local"),
        f"{nm}.log-dirs": str(home / "logs"),
        **{f"{nm}.admin-env.{name}": value for name, value in environ.items()},
    }
    if gpus.nodes[node]:
        programs = layout.yarn_smi(node).parent if spec.mig else home / "bin"
        properties |= {
            **admin.yarn_file("yarn-site-gpus"),
            f"{GPU_PLUGIN}.gpu.path-to-discovery-executables": str(programs),
            **admin.yarn_file("yarn-site-health"),
            f"{nm}.health-checker.script.path": str(admin.HEALTH_CHECK),
        }
    return properties


def capacity_scheduler(spec: ClusterSpec) -> Properties:
    cs = "yarn.scheduler.capacity"
    return {
        **admin.yarn_file("capacity-scheduler"),
        f"{cs}.maximum-am-resource-percent": "0.6",
        f"{cs}.maximum-applications": "10000",
        # The default of 5 ms causes a third of the idle daemons' CPU load.
        f"{cs}.schedule-asynchronously.scheduling-interval-ms": "50",
        # Number of heartbeats that a request waits for its preferred node: about half a second.
        f"{cs}.node-locality-delay": str(4 * spec.nodes),
        **(_PREEMPTION if spec.preemption else {}),
    }


def resource_types() -> Properties:
    return admin.yarn_file("resource-types")


def hosts_option(layout: ClusterLayout) -> str:
    """Return the option with which a JVM resolves the cluster's names, and no others."""
    return f"-Djdk.net.hosts.file={layout.hosts}"


def spark_defaults(
    layout: ClusterLayout, spark: Path, archive: ClassArchive | None, realm: Realm | None
) -> Properties:
    # A JVM with this hosts file resolves no other names. If a session sets extraJavaOptions, the
    # "default" options of the driver and executors stay; the AM has only one property.
    hosts = hosts_option(layout)
    secure = realm.java_options if realm else ()
    quick = " ".join([hosts, *QUICK, *secure, *([archive.options] if archive else [])])
    # A JVM uses the archive only if the archive's jars come first on its class path. In a
    # container, a directory would come first.
    jars = archive.class_path if archive else None
    first = {f"spark.{who}.extraClassPath": jars for who in ("driver", "executor") if jars}
    return {
        **admin.spark_defaults(),
        "spark.submit.deployMode": "client",
        "spark.driver.host": MASTER,
        "spark.driver.defaultJavaOptions": quick,
        "spark.executor.defaultJavaOptions": quick,
        "spark.yarn.am.extraJavaOptions": quick,
        # The address of an application master, which runs the driver in cluster mode.
        "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": MASTER,
        "spark.yarn.jars": f"local:{spark}/jars/*",
        **first,
    }


def hosts_file(system: str, hostname: str, nodes: int, user_hosts: Mapping[str, str]) -> str:
    """Return the private hosts file: the names of the machine, the nodes, and a user.

    Args:
        system: text of the machine's hosts file; the IPv4 lines are kept.
        hostname: name of the machine; on loopback if the hosts file lacks it.
        user_hosts: additional name → address.
    """
    lines = [line.partition("#")[0].split() for line in system.splitlines()]
    cluster = {n: address_of(n) for n in node_names(nodes)} | dict(user_hosts)
    machine = [(name, f[0]) for f in lines if f and ":" not in f[0] for name in f[1:]]
    if hostname not in dict(machine):
        machine.append((hostname, MASTER))
    kept = [(name, address) for name, address in machine if name not in cluster]
    # No duplicates: a daemon listens on every address of a name, and fails on a duplicate.
    # localhost comes first, because an address resolves to its first name.
    pairs = dict.fromkeys([("localhost", MASTER), *kept, *cluster.items()])
    return "".join(f"{address} {name}\n" for name, address in pairs)


def log4j() -> str:
    """Return the daemons' log4j2.properties: the log goes to stdout, which is the log file."""
    return """rootLogger.level = info
rootLogger.appenderRef.stdout.ref = stdout
appender.stdout.type = Console
appender.stdout.name = stdout
appender.stdout.layout.type = PatternLayout
appender.stdout.layout.pattern = %d{ISO8601} %p %c{1}: %m%n%ex
"""


def reload4j() -> str:
    """Return the log4j.properties of Hadoop before 3.5, whose daemons use reload4j."""
    return """log4j.rootLogger=INFO,stdout
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n
"""


def xml_text(properties: Mapping[str, str]) -> str:
    rows = "".join(
        f"  <property><name>{escape(k)}</name><value>{escape(v)}</value></property>\n"
        for k, v in properties.items()
    )
    return f'<?xml version="1.0"?>\n<configuration>\n{rows}</configuration>\n'


def assignments_text(properties: Mapping[str, str]) -> str:
    """Return a file of `name=value`, such as ZooKeeper's."""
    return "".join(f"{name}={value}\n" for name, value in properties.items())


def properties_text(properties: Mapping[str, str]) -> str:
    """Return a Java properties file such as spark-defaults.conf."""
    return "".join(f"{k} {v.replace(chr(92), chr(92) * 2)}\n" for k, v in properties.items())
