"""Where the parts of a cluster are: the files of its directory, its hosts, its daemons."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError

# Added to a node's number for its address, 127.0.0.11 and up: the lowest addresses stay free for
# other uses of loopback.
_FIRST_NODE = 10
MAX_NODES = 32
MASTER = "127.0.0.1"
NAMENODE, DATANODE, RESOURCEMANAGER = "namenode", "datanode", "resourcemanager"
# Of Kerberized clusters alone.
KDC = "kdc"
# Of clusters with high availability alone, except the first of each pair.
ZOOKEEPER = "zookeeper"
NAMENODES = (NAMENODE, "namenode2")
FAILOVER_CONTROLLERS = ("zkfc", "zkfc2")
RESOURCEMANAGERS = (RESOURCEMANAGER, "resourcemanager2")
# All daemons that are no NodeManagers.
MASTERS = (KDC, ZOOKEEPER, *NAMENODES, *FAILOVER_CONTROLLERS, DATANODE, *RESOURCEMANAGERS)
# HDFS's name where it has two NameNodes.
NAME_SERVICE = "lake"
BORNE = re.compile(r"[A-Za-z0-9/._+@-]+")


def node_names(nodes: int) -> tuple[str, ...]:
    """Return the host names of the NodeManagers: node1, node2, …"""
    return tuple(f"node{i}" for i in range(1, nodes + 1))


def address_of(daemon: str) -> str:
    """Return the loopback address that a daemon listens on."""
    if daemon in MASTERS:
        return MASTER
    return f"127.0.0.{_FIRST_NODE + int(daemon.removeprefix('node'))}"


@dataclass(frozen=True)
class Layout:
    """The paths in a cluster's directory."""

    root: Path

    @classmethod
    def at(cls, directory: str | Path | None) -> Layout:
        """Return the layout of a cluster's directory, by default `~/.hopsgpu/cluster`."""
        root = Path(directory) if directory is not None else Path.home() / ".hopsgpu" / "cluster"
        return cls(root.expanduser().resolve())

    def check(self) -> None:
        """Refuse a path that YARN's own scripts and lists of directories cannot handle."""
        if not BORNE.fullmatch(str(self.root)):
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
        """Return the SPARK_CONF_DIR of clients that use one PySpark, by its directory."""
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
    def formatted(self) -> Path:
        """A file that exists once the file system has been created; it has Hadoop's version."""
        return self.root / "hdfs" / "formatted"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def yarn(self) -> Path:
        """What the ResourceManager stores about its nodes."""
        return self.root / "yarn"

    @property
    def scratch(self) -> Path:
        """Files that daemons need while they run; removed at `down`."""
        return self.root / "tmp"

    def temporary(self, daemon: str) -> Path:
        """Return a daemon's own directory for temporary files."""
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
        """The directory of the certificates of a cluster with HTTPS."""
        return self.root / "certificates"

    @property
    def zookeeper_conf(self) -> Path:
        return self.root / "conf" / "zoo.cfg"

    @property
    def fence(self) -> Path:
        """The program that ends a NameNode before another one becomes active."""
        return self.root / "conf" / "fence.sh"

    def log(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.log"

    def node(self, name: str) -> Path:
        """Return the directory of one NodeManager, with `bin`, `local` and `logs`."""
        return self.root / "nodes" / name
