"""The names and paths of a cluster: the files of its directory, its hosts, its daemons."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError

# node1 has the address 127.0.0.11: the lowest addresses stay free for other uses of loopback.
_FIRST_NODE = 10
MAX_NODES = 32
MASTER = "127.0.0.1"
NAMENODE, DATANODE, RESOURCEMANAGER = "namenode", "datanode", "resourcemanager"
# Only Kerberized clusters have a KDC.
KDC = "kdc"
# Only clusters whose containers can run in Docker have these.
CONTAINERD, DOCKERD = "containerd", "dockerd"
# Only clusters with high availability have these daemons, except the first of each pair.
ZOOKEEPER = "zookeeper"
NAMENODES = (NAMENODE, "namenode2")
FAILOVER_CONTROLLERS = ("zkfc", "zkfc2")
RESOURCEMANAGERS = (RESOURCEMANAGER, "resourcemanager2")
# Only standalone clusters have these, the second one only with high availability.
SPARK_MASTERS = ("master", "master2")
# Only clusters on Kubernetes have these, in a network of their own.
ETCD, API_SERVER = "etcd", "kube-apiserver"
KUBERNETES_DAEMONS = (ETCD, API_SERVER, "kube-controller-manager", "kube-scheduler")
# All daemons except those of nodes.
MASTERS = (
    *(KDC, CONTAINERD, DOCKERD, ZOOKEEPER, *NAMENODES, *FAILOVER_CONTROLLERS),
    *(DATANODE, *RESOURCEMANAGERS, *SPARK_MASTERS, *KUBERNETES_DAEMONS),
)
# HDFS's name if there are two NameNodes.
NAME_SERVICE = "lake"
ACCEPTED_PATH = re.compile(r"[A-Za-z0-9/._+@-]+")


def node_names(nodes: int) -> tuple[str, ...]:
    """Return the names of the nodes: node1, node2, …"""
    return tuple(f"node{i}" for i in range(1, nodes + 1))


def address_of(daemon: str, master: str = MASTER) -> str:
    """Return the address that a daemon listens on, a loopback address but on Kubernetes."""
    if daemon in MASTERS:
        return master
    return f"127.0.0.{_FIRST_NODE + int(daemon.removeprefix('node'))}"


@dataclass(frozen=True)
class ClusterLayout:
    root: Path

    @classmethod
    def at(cls, directory: str | Path | None) -> ClusterLayout:
        """Return the layout of a cluster's directory; None means `~/.hopsgpu/cluster`."""
        root = Path(directory) if directory is not None else Path.home() / ".hopsgpu" / "cluster"
        return cls(root.expanduser().resolve())

    def check(self) -> None:
        """Refuse a path that YARN's own scripts and lists of directories cannot handle."""
        if not ACCEPTED_PATH.fullmatch(str(self.root)):
            raise ConfigError(
                f"the cluster's directory is {str(self.root)!r}, but YARN accepts only letters, "
                "digits and / . _ + @ - in it: use another --dir"
            )

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def state(self) -> Path:
        return self.root / "cluster.json"

    @property
    def hosts(self) -> Path:
        return self.root / "hosts"

    @property
    def client(self) -> Path:
        """The configuration for clients, which the daemons on MASTER also use."""
        return self.root / "conf" / "client"

    def spark_conf(self, spark: Path) -> Path:
        """Return the SPARK_CONF_DIR of clients that use the PySpark in a directory."""
        return self.root / "conf" / f"spark-{hashlib.sha256(str(spark).encode()).hexdigest()[:12]}"

    def name(self, daemon: str = NAMENODE) -> Path:
        """Return the directory of a NameNode's images of the file system."""
        return self.root / "hdfs" / ("name" if daemon == NAMENODE else f"name-{daemon}")

    @property
    def edits(self) -> Path:
        """The edits that two NameNodes share."""
        return self.root / "hdfs" / "edits"

    @property
    def data(self) -> Path:
        return self.root / "hdfs" / "data"

    @property
    def format_marker(self) -> Path:
        """A file that exists once the file system has been created; it has Hadoop's version."""
        return self.root / "hdfs" / "formatted"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def yarn(self) -> Path:
        """The directory in which the ResourceManager stores facts about its nodes."""
        return self.root / "yarn"

    @property
    def scratch(self) -> Path:
        """Files that daemons need while they run; removed at `down`."""
        return self.root / "tmp"

    def temporary(self, daemon: str) -> Path:
        return self.scratch / daemon

    def conf(self, daemon: str) -> Path:
        """Return the HADOOP_CONF_DIR of a daemon."""
        return self.client if daemon in MASTERS else self.root / "conf" / daemon

    @property
    def realm(self) -> Path:
        """The directory of a Kerberized cluster's realm: its KDC's database, and the keytabs."""
        return self.root / "kerberos"

    @property
    def certificates(self) -> Path:
        return self.root / "certificates"

    @property
    def zookeeper_conf(self) -> Path:
        return self.root / "conf" / "zoo.cfg"

    def spark_daemon_conf(self, daemon: str) -> Path:
        """Return the file of a Master's or Worker's Spark properties."""
        return self.root / "conf" / f"{daemon}.conf"

    def recovery(self, daemon: str) -> Path:
        """Return the directory from which a restarted Master gets its applications and Workers."""
        return self.temporary(daemon) / "recovery"

    @property
    def fence(self) -> Path:
        """The program that kills a NameNode before another one becomes active."""
        return self.root / "conf" / "fence.sh"

    @property
    def docker(self) -> Path:
        """The directory of the cluster's own dockerd: its socket, its images and its state."""
        return self.root / "docker"

    @property
    def container_executor(self) -> Path:
        """The program by which the NodeManagers start containers, if they can run in Docker."""
        return self.root / "conf" / "container-executor"

    def log(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.log"

    def node(self, name: str) -> Path:
        """Return the directory of one node.

        A NodeManager has `bin`, `local` and `logs` there, a Worker `bin`, `local` and `work`, and a
        node of Kubernetes `bin` and the state of its daemons.
        """
        return self.root / "nodes" / name

    def yarn_smi(self, name: str) -> Path:
        """Return the nvidia-smi that shows MIG devices as GPUs, for a NodeManager's GPU plugin."""
        return self.node(name) / "yarn-bin" / "nvidia-smi"
