"""The table of the functions of Spark's side, by kind of cluster manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.backends.spark.kubernetes_session import (
    attach_to_kubernetes,
    check_kubernetes,
    start_on_kubernetes,
)
from hopsgpu.backends.spark.kubernetes_submission import prepare_driver_pod
from hopsgpu.backends.spark.standalone_session import (
    attach_to_standalone,
    check_standalone,
    start_on_standalone,
)
from hopsgpu.backends.spark.yarn_session import attach_to_yarn, check_yarn, start_on_yarn
from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.kubernetes.kind import Kubernetes
from hopsgpu.cluster_managers.manager_table import kind_of, master_forms
from hopsgpu.cluster_managers.standalone.kind import Standalone
from hopsgpu.cluster_managers.yarn.kind import Yarn
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from hopsgpu.backends.spark.cluster_application import ClusterApplication
    from hopsgpu.backends.spark.jvm import Jvm


@dataclass(frozen=True)
class SparkKind:
    """The functions of Spark's side for a kind of cluster manager.

    Attributes:
        check: checks the requested settings of a session before a JVM is started.
        start: returns a session, given its name, its master and its requested settings.
        attach: returns the application of a running context.
        prepare_driver: provides further properties of a submission in cluster mode. Its arguments
            are those of `prepare_driver_pod`. None if no further properties are needed.
    """

    check: Callable[[Mapping[str, str]], None]
    start: Callable[[str, str, Mapping[str, str]], SparkSession]
    attach: Callable[[SparkContext, Jvm], ClusterApplication]
    prepare_driver: Callable[..., AbstractContextManager[Mapping[str, str]]] | None = None


_SPARK_KINDS: Mapping[type[ManagerKind], SparkKind] = {
    Yarn: SparkKind(check_yarn, start_on_yarn, attach_to_yarn),
    Standalone: SparkKind(check_standalone, start_on_standalone, attach_to_standalone),
    Kubernetes: SparkKind(
        check_kubernetes, start_on_kubernetes, attach_to_kubernetes, prepare_driver_pod
    ),
}


def spark_kind_of(master: str | None) -> SparkKind:
    """Return what Spark's side does for a master.

    Raises:
        ConfigError: the master is local, or of a kind that cannot hold gangs.
    """
    kind = kind_of(master)
    if kind is None:
        raise ConfigError(
            f"this Spark application cannot hold gangs: spark.master={master}: {master_forms()}"
        )
    return _SPARK_KINDS[type(kind)]
