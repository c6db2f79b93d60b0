"""Where gangs run, as a launch sees it: on YARN, or on this machine."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyspark import SparkContext

from hopsgpu.backends.elastic_executors import ElasticLease
from hopsgpu.backends.grant import Owner
from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.core.gang import Avoid
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan


@dataclass(frozen=True)
class Fit:
    """The containers of a gang that can be granted.

    Attributes:
        spec: the gang, as it will run there.
        executors: number of containers.
        ranks_per_executor: number of ranks in each.
        shape: resources of each container.
        queue: YARN's queue, or "".
        hosts: nodes with GPUs of the requested type; None if any node will do.
        warnings: warnings for people.
    """

    spec: GangSpec
    executors: int
    ranks_per_executor: int
    shape: ExecutorShape
    queue: str = ""
    hosts: frozenset[str] | None = None
    warnings: tuple[str, ...] = ()


class Site(Protocol):
    """A Spark application and the resources that its gangs run on."""

    @property
    def context(self) -> SparkContext:
        """The SparkContext in which data is written."""

    @property
    def jvm(self) -> Jvm:
        """The JVM of the application."""

    @property
    def id(self) -> str:
        """Spark's ID of the application."""

    @property
    def user(self) -> str:
        """The owner of the application, as the lake knows the user."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Spark and Hadoop, as this driver has them."""

    @property
    def root(self) -> str:
        """The root of runs and models."""

    @property
    def files(self) -> str | None:
        """The default file system, `fs.defaultFS`; None for this machine's."""

    @property
    def added(self) -> Path:
        """The directory of files that `addPyFile` and `--py-files` brought to the driver."""

    def lacking(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the top-level modules that the executors' Python is already known to lack."""

    @property
    def interface(self) -> str | None:
        """The network interface of gloo, NCCL and addresses; None for any."""

    @property
    def retries_code_too(self) -> bool:
        """Whether `retries` also apply to errors that all ranks raise at once."""

    @property
    def keeps_data(self) -> bool:
        """Whether the data that launches write for `data=` stays on the lake afterwards."""

    def words_of(self, error: BaseException) -> str:
        """Return what a record says about the error that ended a run; never raise."""

    def option(self, name: str) -> str | None:
        """Return the Spark property `spark.hopsgpu.<name>`, else its twin in the environment, or
        None.
        """

    def fit(self, spec: GangSpec) -> Fit:
        """Return the containers of a gang, without requesting them.

        Raises:
            ConfigError, CapacityError: the gang can never be granted.
        """

    def check_again(self, plan: LaunchPlan, avoid: Avoid) -> None:
        """Check that the gang of a plan can be granted without the nodes and GPUs to avoid.

        Raises:
            CapacityError: it can never be granted.
            HopsGpuError: the answer is unknown.
        """

    def lease(self, request: Request) -> AbstractContextManager[Owner]:
        """Provide what acquires executors for a gang, and release all of them on exit.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    def elastic(self, request: Request) -> AbstractContextManager[ElasticLease]:
        """Provide what acquires a search's executors one by one, and release all of them on exit.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    def goes_on(self, application_id: str) -> bool:
        """Return whether another application, whose record is not final, is still running.

        Raises:
            HopsGpuError: the answer is unknown.
        """
