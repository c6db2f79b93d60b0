"""The interface between a launch and what runs its gang: YARN, or this machine."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from pyspark import SparkContext

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import GangAllocator
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.packaging.load_check import LoadChecks
from hopsgpu.packaging.modules import Packer


class GangApplication(Protocol):
    """A Spark application and the resources that its gangs run on."""

    @property
    def context(self) -> SparkContext:
        """Return the SparkContext in which data is written."""

    @property
    def jvm(self) -> Jvm:
        """Return the JVM of the application."""

    @property
    def id(self) -> str:
        """Return Spark's ID of the application."""

    @property
    def user(self) -> str:
        """Return the owner of the application, by the user name that the lake knows."""

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of Spark and Hadoop that this driver uses."""

    @property
    def root(self) -> str:
        """Return the root of runs and models."""

    @property
    def default_fs(self) -> str | None:
        """Return the default file system, `fs.defaultFS`; None for this machine's file system."""

    @property
    def py_files_dir(self) -> Path:
        """Return the directory of files that `addPyFile` and `--py-files` brought to the driver."""

    @property
    def packer(self) -> Packer:
        """Return the packer of the user's modules, which packs only changed modules again."""

    @property
    def load_checks(self) -> LoadChecks:
        """Return the checks whether ranks can load calls; types are checked once."""

    def missing_modules(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the top-level modules that the executors' Python is known to lack."""

    @property
    def interface(self) -> str | None:
        """Return the network interface for gloo, NCCL and the ranks' addresses; None for any."""

    @property
    def should_retry_user_errors(self) -> bool:
        """Return whether `retries` also apply to errors that all ranks raise at once."""

    @property
    def should_keep_data(self) -> bool:
        """Return whether the data that launches write for `data=` stays on the lake afterwards."""

    @property
    def elastic_interval(self) -> float:
        """Return the smallest number of seconds between two growths of an elastic gang."""

    @property
    def should_give_way(self) -> bool:
        """Return whether elastic gangs shrink while other gangs wait for their GPUs."""

    @property
    def gpu_idle_warning(self) -> float | None:
        """Return after how many idle seconds of GPUs a warning follows; None for no warning."""

    @property
    def gpu_idle_timeout(self) -> float | None:
        """Return after how many idle seconds of GPUs a run ends by default; None for no limit."""

    def error_text(self, error: BaseException) -> str:
        """Return the text that a record shows for the error that ended a run; never raise."""

    def option(self, name: str) -> str | None:
        """Return the Spark property `spark.hopsgpu.<name>`; None if it is not set.

        If the property is not set, the environment variable of the same meaning counts.
        """

    def fit(self, spec: GangSpec) -> LaunchPlan:
        """Return the plan of a gang's containers, yet without environment and paths.

        Raises:
            ConfigError, CapacityError: the gang can never be granted.
        """

    def check_with_exclusions(self, plan: LaunchPlan, exclusions: Exclusions) -> None:
        """Check that the gang of a plan can be granted without the excluded nodes and GPUs.

        Raises:
            CapacityError: it can never be granted without them.
            HopsGpuError: it cannot be determined whether it can be granted.
        """

    def allocate(self, request: Request) -> AbstractContextManager[GangAllocator]:
        """Provide what acquires a gang's executors; release all of them on exit.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    def allocate_elastic(self, request: Request) -> AbstractContextManager[ElasticAllocator]:
        """Provide what acquires executors one by one; release all executors on exit.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    def is_running(self, application_id: str) -> bool:
        """Return whether another application is still running.

        Raises:
            HopsGpuError: it cannot be determined whether the application is running.
        """
