"""Where gangs run, as far as a launch knows: on YARN, or on this machine."""

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
    """The containers of a gang, which can be had.

    Attributes:
        spec: the gang, as it will run there.
        executors: how many containers.
        ranks_per_executor: ranks in each.
        shape: what each container asks for.
        queue: YARN's; "" where there is none.
        hosts: nodes that have GPUs of the wanted type; None where any will do.
        warnings: what a person should know before.
    """

    spec: GangSpec
    executors: int
    ranks_per_executor: int
    shape: ExecutorShape
    queue: str = ""
    hosts: frozenset[str] | None = None
    warnings: tuple[str, ...] = ()


class Site(Protocol):
    """A Spark application and what its gangs run on."""

    @property
    def context(self) -> SparkContext:
        """Spark's, in which data is written."""

    @property
    def jvm(self) -> Jvm:
        """Its JVM."""

    @property
    def id(self) -> str:
        """Spark's id of the application."""

    @property
    def user(self) -> str:
        """Whose it is, as the lake knows it."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Spark and Hadoop, as this driver has them."""

    @property
    def root(self) -> str:
        """Where runs and models go."""

    @property
    def files(self) -> str | None:
        """The default file system, `fs.defaultFS`; None for this machine's."""

    @property
    def added(self) -> Path:
        """The directory of what `addPyFile` and `--py-files` have brought to the driver."""

    def lacking(self, modules: Collection[str]) -> tuple[str, ...]:
        """Of top-level modules those that the executors' Python is known to lack already."""

    @property
    def interface(self) -> str | None:
        """The network interface that gloo, NCCL and addresses go by; None for any."""

    @property
    def retries_code_too(self) -> bool:
        """Whether `retries` also serve errors that all ranks raise at once."""

    @property
    def keeps_data(self) -> bool:
        """Whether what launches write of `data=` stays on the lake when they have ended."""

    def words_of(self, error: BaseException) -> str:
        """Return what a record tells of an error that ended a run; it raises nothing."""

    def option(self, name: str) -> str | None:
        """Return the Spark property `spark.hopsgpu.<name>`, else its twin in the environment, or
        None.
        """

    def fit(self, spec: GangSpec) -> Fit:
        """Return the containers of a gang; asks for nothing.

        Raises:
            ConfigError, CapacityError: it can never be had.
        """

    def check_again(self, plan: LaunchPlan, avoid: Avoid) -> None:
        """Check whether the gang of a plan can be had without what is to be avoided.

        Raises:
            CapacityError: it can never be had so.
            HopsGpuError: that is not known.
        """

    def lease(self, request: Request) -> AbstractContextManager[Owner]:
        """Return what can acquire executors for a gang; all are released on every way out.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    def elastic(self, request: Request) -> AbstractContextManager[ElasticLease]:
        """Return what can bring a search's executors one by one; all are released on every way out.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    def goes_on(self, application_id: str) -> bool:
        """Return whether another application, which left a record that goes on, is there still.

        Raises:
            HopsGpuError: that is not known.
        """
