"""The table of cluster managers, and the choice of one by `spark.master`."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.kubernetes.kind import Kubernetes
from hopsgpu.cluster_managers.local_masters import is_local
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.standalone.kind import Standalone
from hopsgpu.cluster_managers.yarn.kind import Yarn
from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_conf import is_configured
from hopsgpu.storage.spark_defaults import spark_defaults

KINDS: tuple[ManagerKind, ...] = (Yarn(), Standalone(), Kubernetes())
MASTER = "spark.master"
LOCAL_MASTER = "local[*]"
YARN_MASTER = "yarn"


def kind_of(master: str | None) -> ManagerKind | None:
    """Return the kind of cluster manager of a master; None for a local or unknown one."""
    return next((kind for kind in KINDS if master is not None and kind.has_master(master)), None)


def required_kind(master: str | None) -> ManagerKind:
    """Return the kind of cluster manager of a master.

    Raises:
        ConfigError: hopsgpu knows no such cluster manager.
    """
    kind = kind_of(master)
    if kind is None:
        raise ConfigError(f"{MASTER}={master}: {master_forms()}")
    return kind


def master_forms() -> str:
    """Return which masters are accepted, for error messages."""
    masters = ", ".join(kind.masters for kind in KINDS)
    return f"it must be {masters}, or local[*] or local[N] for this machine only"


def default_master(requested: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return the master of a new application; None if spark-submit has set it.

    A cluster manager that spark-defaults.conf names counts. HADOOP_CONF_DIR alone stands for YARN.
    """
    if MASTER in requested:
        return requested[MASTER]
    if "PYSPARK_GATEWAY_PORT" in environ:
        return None
    named = spark_defaults(environ).get(MASTER)
    if kind_of(named) is not None:
        return named
    return YARN_MASTER if is_configured(environ) else named or LOCAL_MASTER


def cluster_master(requested: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the master of a new application on a cluster.

    YARN's takes the place of a local one: without a configuration, YARN says which one is missing.
    """
    master = default_master(requested, environ) or YARN_MASTER
    return YARN_MASTER if is_local(master) else master


def configured_manager(
    environ: Mapping[str, str],
    master: str | None = None,
    seconds: tuple[float, float] | None = None,
) -> ClusterManager:
    """Return a client of the cluster manager of a command without a session.

    Args:
        master: value of `spark.master`; by default that of a new session.
        seconds: limits to connect to an address, and to be answered; None for defaults.

    Raises:
        ConfigError: the master is local or unknown, or a configuration is incomplete.
    """
    properties = dict(spark_defaults(environ))
    properties[MASTER] = cluster_master({MASTER: master} if master else {}, environ)
    return required_kind(properties[MASTER]).connect(properties, environ, seconds=seconds)


def has_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether a new session would run on a cluster, and not on this machine."""
    return kind_of(default_master({}, environ)) is not None
