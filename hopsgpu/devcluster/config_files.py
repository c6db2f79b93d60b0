"""Write a cluster's configuration into its directory."""

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

from hopsgpu.devcluster import realm as realm_files
from hopsgpu.devcluster import site_files, standby
from hopsgpu.devcluster.certificates import Certificates, client_file, properties_of_https
from hopsgpu.devcluster.class_archive import archive_of
from hopsgpu.devcluster.config import ClusterSpec, Properties
from hopsgpu.devcluster.daemons import MARKER, marker
from hopsgpu.devcluster.layout import ZOOKEEPER, Layout, node_names
from hopsgpu.devcluster.node_gpus import GpuPlan
from hopsgpu.devcluster.nvidia_smi_standin import standin_script, wrapper_script
from hopsgpu.devcluster.realm import Realm, container_variables, realm_of
from hopsgpu.devcluster.state import State, write
from hopsgpu.errors import ClusterError


def container_environ(layout: Layout, node: str, realm: Realm | None) -> dict[str, str]:
    """Return the variables that this cluster sets in a node's containers."""
    programs = layout.node(node) / "bin"
    environ = {
        # The node's nvidia-smi comes first, and hopsgpu's discovery uses it alone: NVML would show
        # the GPUs of the whole machine.
        "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
        "HOPSGPU_NVIDIA_SMI": str(programs / "nvidia-smi"),
        MARKER: marker(layout.root, node),
        **(container_variables(realm) if realm else {}),
    }
    # On some machines it names the directory of the GPU driver's libraries.
    if libraries := os.environ.get("LD_LIBRARY_PATH"):
        environ["LD_LIBRARY_PATH"] = libraries
    return environ


def write_conf(layout: Layout, state: State, gpus: GpuPlan) -> None:
    """Write every configuration file, the hosts file and the nodes' nvidia-smi."""
    spec, ports = state.spec, state.ports
    realm = realm_of(layout, spec)
    over = spec.conf.sites
    files = {
        "core-site": site_files.core_site(layout, spec, ports, user_name()),
        "hdfs-site": site_files.hdfs_site(layout, spec, ports),
        "yarn-site": site_files.yarn_site(layout, spec, ports),
        "mapred-site": {},
        "capacity-scheduler": site_files.capacity_scheduler(spec),
        "resource-types": site_files.resource_types(),
    }
    for node in (None, *node_names(spec.nodes)):
        conf = layout.conf(node) if node else layout.client
        for name, ours in files.items():
            own, last = {}, {}
            secure = _secure(realm, spec, name, node) if realm else {}
            safe = properties_of_https().get(name, {}) if spec.https else {}
            if node and name == "yarn-site":
                environ = container_environ(layout, node, realm)
                own = site_files.node_site(layout, spec, node, ports, gpus, environ)
                last = spec.conf.nodes.get(node, {})
            highly = _highly_available(layout, state, name)
            merged = {**ours, **highly, **own, **secure, **safe, **over.get(name, {}), **last}
            write(conf / f"{name}.xml", site_files.xml_text(merged))
        if spec.https:
            trust = client_file(Certificates(layout.certificates))
            write(conf / "ssl-client.xml", site_files.xml_text(trust))
        write(conf / "log4j2-daemon.properties", site_files.log4j())
        write(conf / "log4j-daemon.properties", site_files.reload4j())
    if ZOOKEEPER in spec.daemons:
        text = site_files.assignments_text(standby.zookeeper_conf(layout, ports))
        write(layout.zookeeper_conf, text)
    if spec.namenode_ha:
        write(layout.fence, standby.fence_script(layout), 0o755)
    fair = layout.client / "fair-scheduler.xml"
    fair.unlink(missing_ok=True)
    if spec.conf.fair_scheduler:
        write(fair, spec.conf.fair_scheduler)
    _write_hosts(layout, spec)
    _write_smi(layout, gpus)


def _highly_available(layout: Layout, state: State, name: str) -> Properties:
    """Return what a site file of a cluster with high availability has in addition."""
    spec, ports = state.spec, state.ports
    match name:
        case "core-site" if spec.namenode_ha:
            return standby.core_site(ports)
        case "hdfs-site" if spec.namenode_ha:
            return standby.hdfs_site(layout, spec, ports)
        case "yarn-site" if spec.resourcemanager_ha:
            return standby.yarn_site(spec, ports)
    return {}


def _secure(realm: Realm, spec: ClusterSpec, name: str, node: str | None) -> Properties:
    """Return what a site file of a Kerberized cluster has in addition.

    Args:
        node: the node whose file it is; None for the clients' and masters'.
    """
    match name:
        case "core-site":
            return realm_files.core_site(realm, spec)
        case "hdfs-site":
            return realm_files.hdfs_site(realm, spec)
        case "yarn-site":
            return realm_files.yarn_site(realm, spec, node)
    return {}


def write_spark_conf(layout: Layout, state: State, spark: Path) -> Path:
    """Write spark-defaults.conf for clients that use one PySpark; return its directory.

    A client's executors must run the jars of its own PySpark, not those of the one that was
    installed where the cluster was started.
    """
    archive = archive_of(Path(state.java), spark)
    realm = realm_of(layout, state.spec)
    properties = site_files.spark_defaults(layout, spark, archive, realm)
    properties |= state.spec.conf.sites.get("spark-defaults", {})
    directory = layout.spark_conf(spark)
    write(directory / "spark-defaults.conf", site_files.properties_text(properties))
    return directory


def user_name() -> str:
    """Return the user that the daemons see, whatever HADOOP_USER_NAME says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as e:
        raise ClusterError(
            f"the user id {os.getuid()} has no name in /etc/passwd, and Hadoop needs one"
        ) from e


def _write_hosts(layout: Layout, spec: ClusterSpec) -> None:
    try:
        system = Path("/etc/hosts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        system = ""
    hosts = site_files.hosts_file(system, socket.gethostname(), spec.nodes, spec.conf.hosts)
    write(layout.hosts, hosts)


def _write_smi(layout: Layout, gpus: GpuPlan) -> None:
    for node, own in gpus.nodes.items():
        smi = layout.node(node) / "bin" / "nvidia-smi"
        if own:
            text = wrapper_script(gpus.smi, own) if gpus.smi else standin_script(own)
            write(smi, text, 0o755)
        else:
            smi.unlink(missing_ok=True)
