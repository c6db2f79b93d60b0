"""Write a cluster's configuration into its directory."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
from pathlib import Path

from hopsgpu.devcluster import admin, docker, kubernetes, site_files, standalone, standby
from hopsgpu.devcluster import realm as realm_files
from hopsgpu.devcluster.certificates import Certificates, properties_of_https, ssl_client_properties
from hopsgpu.devcluster.class_archive import archive_of
from hopsgpu.devcluster.config import CONTAINER_EXECUTOR, YARN_SITES, ClusterSpec, Properties
from hopsgpu.devcluster.daemons import MARKER, marker
from hopsgpu.devcluster.hadoop_jars import pyspark_home
from hopsgpu.devcluster.layout import ZOOKEEPER, ClusterLayout, node_names
from hopsgpu.devcluster.node_gpus import GpuPlan
from hopsgpu.devcluster.nvidia_smi_standin import standin_script, wrapper_script
from hopsgpu.devcluster.realm import Realm, container_variables, realm_of
from hopsgpu.devcluster.state import ClusterState, write
from hopsgpu.errors import ClusterError


def container_environ(layout: ClusterLayout, node: str, realm: Realm | None) -> dict[str, str]:
    """Return the variables that this cluster sets in a node's containers."""
    programs = layout.node(node) / "bin"
    environ = {
        # The node's nvidia-smi comes first. hopsgpu's discovery uses only this nvidia-smi: NVML
        # would show the GPUs of the whole machine.
        "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
        "HOPSGPU_NVIDIA_SMI": str(programs / "nvidia-smi"),
        MARKER: marker(layout.root, node),
        **(container_variables(realm) if realm else {}),
    }
    # On some machines this variable names the directory of the GPU driver's libraries.
    if libraries := os.environ.get("LD_LIBRARY_PATH"):
        environ["LD_LIBRARY_PATH"] = libraries
    return environ


def _common_files(layout: ClusterLayout, state: ClusterState) -> dict[str, Properties]:
    spec, ports = state.spec, state.ports
    files = {
        "core-site": site_files.core_site(layout, spec, ports, user_name()),
        "hdfs-site": site_files.hdfs_site(layout, spec, ports),
    }
    if spec.is_yarn:
        files |= {
            "yarn-site": site_files.yarn_site(layout, spec, ports),
            "mapred-site": {},
            "capacity-scheduler": site_files.capacity_scheduler(spec),
            "resource-types": site_files.resource_types(),
        }
    if spec.namenode_ha:
        files["core-site"] |= standby.core_site(ports)
        files["hdfs-site"] |= standby.hdfs_site(layout, spec, ports)
    if spec.resourcemanager_ha:
        files["yarn-site"] |= standby.yarn_site(spec, ports)
    return files


def write_conf(layout: ClusterLayout, state: ClusterState, gpus: GpuPlan) -> None:
    """Write every configuration file, the hosts file and the nodes' nvidia-smi."""
    spec, ports = state.spec, state.ports
    realm = realm_of(layout, spec)
    for node in (None, *node_names(spec.nodes)):
        conf = layout.conf(node) if node else layout.client
        for name, properties in _common_files(layout, state).items():
            if node and name == "yarn-site":
                properties |= _node_site(layout, state, gpus, node, realm)
            properties |= _secure_properties(realm, spec, name, node)
            properties |= spec.conf.sites.get(name, {})
            if node and name == "yarn-site":
                properties |= spec.conf.nodes.get(node, {})
            write(conf / f"{name}.xml", site_files.xml_text(properties))
        if spec.https:
            trust = ssl_client_properties(Certificates(layout.certificates))
            write(conf / "ssl-client.xml", site_files.xml_text(trust))
        write(conf / "log4j2-daemon.properties", site_files.log4j())
        write(conf / "log4j-daemon.properties", site_files.reload4j())
    if ZOOKEEPER in spec.daemons:
        text = site_files.assignments_text(standby.zookeeper_conf(layout, ports))
        write(layout.zookeeper_conf, text)
    if spec.namenode_ha:
        write(layout.fence, standby.fence_script(layout), 0o755)
    _write_fair_scheduler(layout, spec)
    if spec.has_docker:
        docker.write_files(
            layout, _mounts(layout, state), spec.conf.sites.get(CONTAINER_EXECUTOR, {})
        )
    _write_without_yarn(layout, state)
    _write_hosts(layout, spec)
    _write_smi(layout, gpus)


def _write_fair_scheduler(layout: ClusterLayout, spec: ClusterSpec) -> None:
    file = layout.client / "fair-scheduler.xml"
    file.unlink(missing_ok=True)
    if spec.conf.fair_scheduler:
        write(file, spec.conf.fair_scheduler)


def _write_without_yarn(layout: ClusterLayout, state: ClusterState) -> None:
    """Write what a cluster without YARN has; remove the files of an earlier one with YARN.

    Clients would ask its ResourceManager.
    """
    spec = state.spec
    if spec.is_yarn:
        return
    for conf in (layout.client, *map(layout.conf, node_names(spec.nodes))):
        for name in YARN_SITES:
            (conf / f"{name}.xml").unlink(missing_ok=True)
    if spec.is_standalone:
        _write_standalone(layout, state)


def _write_standalone(layout: ClusterLayout, state: ClusterState) -> None:
    """Write the properties of Masters and Workers."""
    spec = state.spec
    of_master = standalone.master_properties(layout, spec, state.ports)
    daemons = dict.fromkeys(spec.masters, of_master)
    daemons |= {node: standalone.worker_properties(spec, node) for node in node_names(spec.nodes)}
    for daemon, properties in daemons.items():
        text = site_files.properties_text(properties)
        write(layout.spark_daemon_conf(daemon), text)


def _node_site(
    layout: ClusterLayout, state: ClusterState, gpus: GpuPlan, node: str, realm: Realm | None
) -> Properties:
    """Return the additional properties of a NodeManager's yarn-site."""
    environ = container_environ(layout, node, realm)
    if not state.spec.has_docker:
        return site_files.node_site(layout, state.spec, node, state.ports, gpus, environ)
    # The PATH of a container in Docker is that of its image.
    del environ["PATH"]
    return {
        **site_files.node_site(layout, state.spec, node, state.ports, gpus, environ),
        **docker.node_site(layout, _mounts(layout, state)),
    }


def _mounts(layout: ClusterLayout, state: ClusterState) -> tuple[str, ...]:
    return docker.read_only_mounts(layout, Path(state.java), pyspark_home())


def _secure_properties(
    realm: Realm | None, spec: ClusterSpec, name: str, node: str | None
) -> Properties:
    """Return additional properties of a node's, or else of a client's and master's, site file."""
    https = properties_of_https().get(name, {}) if spec.https else {}
    match name:
        case "core-site" if realm:
            return realm_files.core_site(realm, spec) | https
        case "hdfs-site" if realm:
            return realm_files.hdfs_site(realm, spec) | https
        case "yarn-site" if realm:
            return realm_files.yarn_site(realm, spec, node) | https
    return https


def write_spark_conf(layout: ClusterLayout, state: ClusterState, spark: Path) -> Path:
    """Write spark-defaults.conf for clients that use one PySpark; return its directory.

    A client's executors must run the jars of its own PySpark. The cluster may have been started
    with another PySpark.
    """
    archive = archive_of(Path(state.java), spark)
    realm = realm_of(layout, state.spec)
    properties = site_files.spark_defaults(layout, spark, archive, realm)
    if not state.spec.is_yarn:
        properties = without_yarn(properties)
    if state.spec.is_standalone:
        properties |= standalone.client_properties(state.spec, state.ports)
    if state.spec.is_kubernetes:
        # A pod has a name of its own, which its kubelet gives to it, and an address of its own.
        del properties["spark.driver.host"]
        for name in ("spark.driver.defaultJavaOptions", "spark.executor.defaultJavaOptions"):
            options = site_files.hosts_option(layout)
            properties[name] = properties[name].replace(options, "").strip()
        properties |= kubernetes.client_properties(layout, spark)
    properties |= state.spec.conf.sites.get("spark-defaults", {})
    directory = layout.spark_conf(spark)
    write(directory / "spark-defaults.conf", site_files.properties_text(properties))
    return directory


def without_yarn(properties: Properties) -> Properties:
    return {name: v for name, v in properties.items() if not name.startswith("spark.yarn.")}


def user_name() -> str:
    """Return the user that the daemons see; HADOOP_USER_NAME has no effect on them."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as e:
        raise ClusterError(
            f"the user id {os.getuid()} has no name in /etc/passwd, and Hadoop needs one"
        ) from e


def _write_hosts(layout: ClusterLayout, spec: ClusterSpec) -> None:
    try:
        system = Path("/etc/hosts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        system = ""
    hosts = site_files.hosts_file(system, socket.gethostname(), spec.nodes, spec.conf.hosts)
    write(layout.hosts, hosts)


def _write_smi(layout: ClusterLayout, gpus: GpuPlan) -> None:
    for node, node_gpus in gpus.nodes.items():
        smi = layout.node(node) / "bin" / "nvidia-smi"
        if node_gpus:
            text = wrapper_script(gpus.smi, node_gpus) if gpus.smi else standin_script(node_gpus)
            write(smi, text, 0o755)
            if any(gpu.slices for gpu in node_gpus):
                layout.yarn_smi(node).parent.mkdir(exist_ok=True)
                shutil.copy(admin.MIG_AS_GPUS, layout.yarn_smi(node))
        else:
            smi.unlink(missing_ok=True)
