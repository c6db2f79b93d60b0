"""The configuration of a cluster: its size, and the properties that a user overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.cluster_managers.kubernetes.gpu_resource import kubernetes_gpu_resource
from hopsgpu.cluster_managers.yarn.gpu_resource import choose_gpu_resource
from hopsgpu.devcluster.layout import (
    CONTAINERD,
    DATANODE,
    DOCKERD,
    FAILOVER_CONTROLLERS,
    KDC,
    KUBERNETES_DAEMONS,
    MASTER,
    MAX_NODES,
    NAMENODES,
    RESOURCEMANAGERS,
    SPARK_MASTERS,
    ZOOKEEPER,
    node_names,
)
from hopsgpu.devcluster.mig_profiles import parse_mig
from hopsgpu.errors import ConfigError

# Properties of the program that starts containers in Docker; this is no site file.
CONTAINER_EXECUTOR = "container-executor"
HDFS_SITES = ("core-site", "hdfs-site")
YARN_SITES = ("yarn-site", "mapred-site", "capacity-scheduler", "resource-types")
_SPARK_DEFAULTS = "spark-defaults"
SITES = (*HDFS_SITES, *YARN_SITES, _SPARK_DEFAULTS, CONTAINER_EXECUTOR)
_FAIR, _NODES, _HOSTS = "fair-scheduler", "nodes", "hosts"
_MAX_GPUS = 16
MAX_KUBERNETES_NODES = 4
# Clients stop using a token a minute before it expires.
_MIN_TOKEN_SECONDS = 60.0
_HADOOP = re.compile(r"3\.([3-9]|[1-9]\d)\.\d{1,2}")
Properties = dict[str, str]


@dataclass(frozen=True)
class SiteConf:
    """A user's overrides.

    Attributes:
        sites: site file → property → value.
        fair_scheduler: the text of the Fair Scheduler's allocation file, or "".
        nodes: host name of a node → property → value, on top of yarn-site for that node; on a
            standalone cluster, on top of the properties of its Worker.
        hosts: additional host name for the cluster's JVMs → address.
    """

    sites: dict[str, Properties] = field(default_factory=dict)
    fair_scheduler: str = ""
    nodes: dict[str, Properties] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterSpec:
    """The requested size and overrides of a cluster.

    Attributes:
        nodes: number of NodeManagers, Workers, or nodes of Kubernetes.
        hadoop: version of the daemons, such as "3.3.6"; "" for the version that PySpark includes.
        kerberos: whether the cluster has a KDC of its own, and all services require Kerberos.
        privacy: whether HDFS and Hadoop's RPC also encrypt.
        simple_web: whether the web addresses, also YARN's REST, require no Kerberos.
        token_lifetimes: seconds after which an HDFS token must be renewed, and after which it
            expires finally; () for Hadoop's defaults, 1 and 7 days.
        https: whether the web addresses, also YARN's REST, are HTTPS, by a private authority.
        namenode_ha, resourcemanager_ha: whether a second daemon takes over when the active one
            dies.
        mig: the MIG devices of each simulated GPU, such as "3g.20gb:1,1g.5gb:4"; "" for whole GPUs.
            YARN counts each MIG device as a GPU.
        preemption: whether the Capacity Scheduler preempts containers for a queue that has less
            than its share and requests more. `default` and `training` each have half of the
            cluster.
        has_docker: whether containers can run in Docker: the cluster has a dockerd of its own, and
            LinuxContainerExecutor with a stand-in for its setuid program.
        is_standalone: whether a Spark Master and Workers take the place of YARN.
        has_master_ha: whether a second Master takes over when the active one dies.
        is_kubernetes: whether Kubernetes takes the place of YARN.
        address: the address of HDFS's daemons; `up` sets it on Kubernetes, whose pods do not reach
            the machine's loopback addresses.
    """

    nodes: int = 2
    gpus_per_node: int = 2
    conf: SiteConf = field(default_factory=SiteConf)
    hadoop: str = ""
    kerberos: bool = False
    privacy: bool = False
    simple_web: bool = False
    token_lifetimes: tuple[float, ...] = ()
    https: bool = False
    namenode_ha: bool = False
    resourcemanager_ha: bool = False
    preemption: bool = False
    has_docker: bool = False
    mig: str = ""
    is_standalone: bool = False
    has_master_ha: bool = False
    is_kubernetes: bool = False
    address: str = MASTER

    @property
    def is_yarn(self) -> bool:
        return not (self.is_standalone or self.is_kubernetes)

    @property
    def mig_profiles(self) -> tuple[str, ...]:
        """The profile of each MIG device of a GPU; empty for whole GPUs."""
        return parse_mig(self.mig) if self.mig else ()

    @property
    def counted_gpus(self) -> int:
        """The number of GPUs that the cluster manager counts on each node."""
        return self.gpus_per_node * max(len(self.mig_profiles), 1)

    @property
    def gpu_resource(self) -> str:
        """The name of the resource that counts GPUs, for sessions on this cluster."""
        properties = self.conf.sites.get(_SPARK_DEFAULTS, {})
        if self.is_kubernetes:
            return kubernetes_gpu_resource(properties, {})
        return choose_gpu_resource(properties, {})

    @property
    def daemons(self) -> tuple[str, ...]:
        """The daemons, in the order in which `status` lists them."""
        return (
            *((KDC,) if self.kerberos else ()),
            *((CONTAINERD, DOCKERD) if self.has_docker else ()),
            *((ZOOKEEPER,) if self.needs_zookeeper else ()),
            *self.namenodes,
            *(FAILOVER_CONTROLLERS if self.namenode_ha else ()),
            DATANODE,
            *self.resourcemanagers,
            *self.masters,
            *(KUBERNETES_DAEMONS if self.is_kubernetes else ()),
            *node_names(self.nodes),
        )

    @property
    def needs_zookeeper(self) -> bool:
        return self.namenode_ha or self.resourcemanager_ha or self.has_master_ha

    @property
    def namenodes(self) -> tuple[str, ...]:
        return NAMENODES if self.namenode_ha else NAMENODES[:1]

    @property
    def resourcemanagers(self) -> tuple[str, ...]:
        if not self.is_yarn:
            return ()
        return RESOURCEMANAGERS if self.resourcemanager_ha else RESOURCEMANAGERS[:1]

    @property
    def masters(self) -> tuple[str, ...]:
        """The Spark Masters; none without a standalone cluster."""
        if not self.is_standalone:
            return ()
        return SPARK_MASTERS if self.has_master_ha else SPARK_MASTERS[:1]

    @property
    def scheme(self) -> str:
        return "https" if self.https else "http"

    @property
    def namenode_host(self) -> str:
        """The host in HDFS's URL: a name on Kerberized clusters, as on real ones.

        Hadoop writes a token for the address and not for the name; a numeric URL would hide that.
        """
        return "localhost" if self.kerberos else self.address

    def __post_init__(self) -> None:
        _check_integer("nodes", self.nodes, 1, MAX_NODES)
        _check_integer("gpus_per_node", self.gpus_per_node, 0, _MAX_GPUS)
        if self.mig_profiles and not self.gpus_per_node:
            raise ConfigError(f"mig={self.mig!r} with gpus_per_node=0: there is no GPU to divide")
        if self.hadoop and not _HADOOP.fullmatch(self.hadoop):
            raise ConfigError(
                f"hadoop={self.hadoop!r}: must be a release of Hadoop 3 from 3.3.0 on, such as "
                "'3.3.6'"
            )
        _check_kerberos(self)
        if self.has_docker and self.kerberos:
            raise ConfigError(
                "docker with kerberos: the containers of alice would need a Unix user alice; use"
                " one of --docker and --kerberos"
            )
        if self.has_docker and self.mig:
            raise ConfigError(
                "docker with mig: NVIDIA's programs that show a container its MIG devices are not"
                " simulated; use one of --docker and --mig"
            )
        _check_without_yarn(self)
        _ = self.gpu_resource
        unknown = set(self.conf.nodes) - set(node_names(self.nodes))
        if unknown:
            raise ConfigError(
                f"nodes has {', '.join(sorted(unknown))}, but this cluster's nodes are "
                f"{', '.join(node_names(self.nodes))}"
            )


def _check_kerberos(spec: ClusterSpec) -> None:
    options = {
        "privacy": spec.privacy,
        "simple_web": spec.simple_web,
        "token_lifetimes": bool(spec.token_lifetimes),
    }
    if not spec.kerberos and any(options.values()):
        names = ", ".join(name for name, value in options.items() if value)
        raise ConfigError(f"{names}: only for a cluster with kerberos=True (--kerberos)")
    lifetimes, shortest = spec.token_lifetimes, _MIN_TOKEN_SECONDS
    if lifetimes and not (len(lifetimes) == 2 and shortest <= lifetimes[0] <= lifetimes[1]):
        raise ConfigError(
            f"token_lifetimes={lifetimes!r}: must be the seconds after which a token must be"
            f" renewed, at least {shortest:.0f}, and the seconds of its longest life, at"
            " least as many"
        )


def _check_without_yarn(spec: ClusterSpec) -> None:
    if spec.has_master_ha and not spec.is_standalone:
        raise ConfigError(
            "master_ha without standalone: only a standalone cluster has Masters; use"
            " --standalone --master-ha, or on YARN --resourcemanager-ha"
        )
    if spec.is_yarn:
        return
    if spec.is_standalone and spec.is_kubernetes:
        raise ConfigError("standalone with kubernetes: a cluster has one cluster manager")
    flag = "standalone" if spec.is_standalone else "kubernetes"
    options = {
        "kerberos": spec.kerberos,
        "https": spec.https,
        "resourcemanager_ha": spec.resourcemanager_ha,
        "preemption": spec.preemption,
        "docker": spec.has_docker,
        "mig": bool(spec.mig),
    }
    if refused := [name for name, value in options.items() if value]:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ConfigError(
            f"{flag} with {', '.join(refused)}: only a cluster with YARN has that; leave out"
            f" --{flag} or {flags}"
        )
    files = [name for name in (*YARN_SITES, CONTAINER_EXECUTOR) if name in spec.conf.sites]
    files += [_FAIR] if spec.conf.fair_scheduler else []
    files += [_NODES] if spec.conf.nodes and spec.is_kubernetes else []
    if files:
        of_nodes = (_NODES,) if spec.is_standalone else ()
        accepted = ", ".join((*HDFS_SITES, _SPARK_DEFAULTS, *of_nodes, _HOSTS))
        raise ConfigError(
            f"{flag} with {', '.join(files)} in conf: a cluster without YARN does not read"
            f" YARN's files; accepted are {accepted}"
        )
    if spec.is_kubernetes and spec.nodes > MAX_KUBERNETES_NODES:
        raise ConfigError(
            f"kubernetes with nodes={spec.nodes}: it has at most {MAX_KUBERNETES_NODES} nodes"
        )


def read_conf(path: str | Path) -> SiteConf:
    """Return the overrides of a `--conf` file; raise ConfigError as `parse_conf`."""
    import yaml

    try:
        with Path(path).open(encoding="utf-8") as f:
            content = yaml.safe_load(f)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read {path}: {e}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is not YAML: {e}") from e
    return parse_conf({} if content is None else content, str(path))


def parse_conf(content: Any, origin: str = "conf") -> SiteConf:
    """Return overrides from a mapping, the content of a `--conf` file.

    Raises:
        ConfigError: a key is unknown or a value is wrong; the message says what is accepted.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{origin} must map site files to properties, not be {content!r}")
    accepted = (*SITES, _FAIR, _NODES, _HOSTS)
    unknown = [str(key) for key in content if key not in accepted]
    if unknown:
        raise ConfigError(
            f"{origin} has {', '.join(map(repr, unknown))}; accepted are {', '.join(accepted)}"
        )
    fair = content.get(_FAIR) or ""
    if not isinstance(fair, str):
        raise ConfigError(
            f"{origin}: {_FAIR} must be the text of its allocation file, not {fair!r}"
        )
    nodes = content.get(_NODES) or {}
    if not isinstance(nodes, Mapping):
        raise ConfigError(
            f"{origin}: {_NODES} must map node1, node2, … to properties, not be {nodes!r}"
        )
    return SiteConf(
        sites={
            site: _properties(content[site], f"{origin}: {site}")
            for site in SITES
            if site in content
        },
        fair_scheduler=fair,
        nodes={str(n): _properties(v, f"{origin}: {_NODES}: {n}") for n, v in nodes.items()},
        hosts=_properties(content.get(_HOSTS), f"{origin}: {_HOSTS}"),
    )


def _properties(properties: Any, where: str) -> Properties:
    if properties is None:
        return {}
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{where} must map properties to values, not be {properties!r}")
    return {str(name): _text(value, f"{where}: {name}") for name, value in properties.items()}


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{where} must be a string, a number, true or false, not {value!r}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
