"""The interface between a launch and what runs its gang: YARN, or this machine."""

from __future__ import annotations

import functools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pyspark import SparkContext, SparkFiles

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import GangAllocator
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.control.heartbeat import HEARTBEAT_SECONDS
from hopsgpu.core.gang import Exclusions
from hopsgpu.core.gpu_idle import WARNING_SECONDS
from hopsgpu.core.gpu_types import parse_markers
from hopsgpu.core.output_limits import LOG_LIMIT
from hopsgpu.core.own_log import level_of
from hopsgpu.core.spec import GangSpec, LaunchPlan
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.load_check import LoadChecks
from hopsgpu.packaging.modules import Packer
from hopsgpu.packaging.working_dir import MAX_BYTES
from hopsgpu.storage.root import choose_root
from hopsgpu.units import parse_duration, parse_duration_or_off, parse_memory

_INTERVAL_SECONDS = 300.0


@dataclass
class GangApplication(ABC):
    """A Spark application with its options, and the resources that its gangs run on.

    A property that reads an option raises ConfigError if the option is invalid.

    Attributes:
        context: the SparkContext, in which data is written.
    """

    context: SparkContext
    jvm: Jvm

    @abstractmethod
    def fit(self, spec: GangSpec) -> LaunchPlan:
        """Return the plan of a gang's containers, yet without environment and paths.

        Raises:
            ConfigError, CapacityError: the gang can never be granted.
        """

    @abstractmethod
    def check_with_exclusions(self, plan: LaunchPlan, exclusions: Exclusions) -> None:
        """Check that the gang of a plan can be granted without the excluded nodes and GPUs.

        Raises:
            CapacityError: it can never be granted without them.
            HopsGpuError: it cannot be determined whether it can be granted.
        """

    @abstractmethod
    def missing_modules(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the top-level modules that the executors' Python is known to lack."""

    @abstractmethod
    def allocate(self, request: Request) -> AbstractContextManager[GangAllocator]:
        """Provide what acquires a gang's executors; release all of them on exit.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    @abstractmethod
    def allocate_elastic(self, request: Request) -> AbstractContextManager[ElasticAllocator]:
        """Provide what acquires executors one by one; release all executors on exit.

        Raises:
            ConfigError: the driver cannot listen for the executors.
        """

    @abstractmethod
    def is_running(self, application_id: str) -> bool:
        """Return whether another application is still running.

        Raises:
            HopsGpuError: it cannot be determined whether the application is running.
        """

    @property
    @abstractmethod
    def image(self) -> str | None:
        """Return the container image in which the executors run; None if they run in none."""

    @abstractmethod
    def check_image(self, requested: str) -> None:
        """Check that the executors run in this image.

        Raises:
            ConfigError: they run in another one, or in none.
        """

    @functools.cached_property
    def id(self) -> str:
        """Return Spark's ID of the application; on YARN it is YARN's.

        The ID is cached for records of runs whose JVM has ended.
        """
        return str(self.context.applicationId)

    @functools.cached_property
    def user(self) -> str:
        """Return the owner of the application, by the user name that the lake knows."""
        return self.jvm.user()

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """Return the versions of Spark and Hadoop that this driver uses."""
        return {"spark": str(self.context.version), "hadoop": self.jvm.hadoop_version()}

    @functools.cached_property
    def packer(self) -> Packer:
        """Return the packer of the user's modules, shared because launches mostly have the same."""
        return Packer()

    @functools.cached_property
    def load_checks(self) -> LoadChecks:
        """Return the checks whether ranks can load calls; types are checked once."""
        return LoadChecks()

    @functools.cached_property
    def py_files_dir(self) -> Path:
        """Return the directory of files that `addPyFile` and `--py-files` brought to the driver."""
        return Path(SparkFiles.getRootDirectory())

    @property
    def default_fs(self) -> str | None:
        """Return the default file system, `fs.defaultFS`; None for this machine's file system."""
        return self.jvm.hadoop("fs.defaultFS")

    @property
    def root(self) -> str:
        """Return the root of runs and models: spark.hopsgpu.root, HOPSGPU_ROOT, or the user's."""
        return choose_root(self.option("root"), self.default_fs, self.user)

    @property
    def ports(self) -> range | None:
        """Return the ports for the control channel, from "40000-40100"; None for any."""
        value = self.option("ports")
        if value is None:
            return None
        match = re.fullmatch(r"(\d+)-(\d+)", value.strip())
        if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
            raise ConfigError(
                f"spark.hopsgpu.ports={value!r}: must be a range of ports such as 40000-40100"
            )
        return range(int(match[1]), int(match[2]) + 1)

    @property
    def interface(self) -> str | None:
        """Return the network interface for gloo, NCCL and the ranks' addresses; None for any."""
        return self.option("interface")

    @property
    def markers(self) -> dict[str, str]:
        """Return the YARN resources that mark nodes, by the type of the nodes' GPUs."""
        return parse_markers(self.option("markers"))

    @property
    def heartbeat(self) -> float:
        """Return the seconds of silence after which a driver or an executor counts as lost."""
        value = self.option("heartbeat")
        return parse_duration(value or HEARTBEAT_SECONDS, "spark.hopsgpu.heartbeat") or 0.0

    @property
    def should_retry_user_errors(self) -> bool:
        """Return whether `retries` also apply to errors that all ranks raise at once."""
        value = self.option("retry") or "failures"
        if value not in ("failures", "all"):
            raise ConfigError(
                f"spark.hopsgpu.retry={value!r}: must be 'failures', or 'all' to also retry"
                " errors that all ranks raise at once"
            )
        return value == "all"

    @property
    def should_keep_data(self) -> bool:
        """Return whether the data that launches write for `data=` stays on the lake afterwards."""
        return self._is_on("keep_data", default=False)

    @property
    def elastic_interval(self) -> float:
        """Return the smallest number of seconds between two growths of an elastic gang."""
        value = self.option("elastic.interval")
        return parse_duration(value or _INTERVAL_SECONDS, "spark.hopsgpu.elastic.interval") or 0.0

    @property
    def should_give_way(self) -> bool:
        """Return whether elastic gangs shrink while other gangs wait for their GPUs."""
        return self._is_on("elastic.give_way", default=True)

    @property
    def should_request_without_room(self) -> bool:
        """Return whether gangs that do not fit request executors anyway, from time to time."""
        return self._is_on("request_without_room", default=False)

    @property
    def gpu_idle_warning(self) -> float | None:
        """Return after how many idle seconds of GPUs a warning follows; None for no warning."""
        value = self.option("idle_warning") or WARNING_SECONDS
        return parse_duration_or_off(value, "spark.hopsgpu.idle_warning")

    @property
    def gpu_idle_timeout(self) -> float | None:
        """Return after how many idle seconds of GPUs a run ends by default; None for no limit."""
        return parse_duration_or_off(
            self.option("idle_timeout") or None, "spark.hopsgpu.idle_timeout"
        )

    @property
    def log_limit(self) -> int:
        """Return how many bytes of each rank's log are kept: its beginning and its end."""
        value = self.option("log.limit")
        return parse_memory(value, "spark.hopsgpu.log.limit") if value else LOG_LIMIT

    @property
    def working_dir_limit(self) -> int:
        """Return how many bytes the working directory of a script may have."""
        value = self.option("working_dir.limit")
        return parse_memory(value, "spark.hopsgpu.working_dir.limit") if value else MAX_BYTES

    @property
    def log_level(self) -> str | None:
        """Return how much hopsgpu logs, "info" or "debug"; None if nobody has set it."""
        return level_of(self.option("log"))

    def check_options(self) -> None:
        """Check all options now rather than during a run.

        Raises:
            ConfigError: an option is invalid; the message has its name, its value and what is
                accepted.
        """
        _ = self.ports, self.heartbeat, self.should_retry_user_errors, self.markers
        _ = self.should_keep_data, self.log_level, self.elastic_interval, self.should_give_way
        _ = self.gpu_idle_warning, self.gpu_idle_timeout, self.should_request_without_room
        _ = self.log_limit, self.working_dir_limit

    def error_text(self, error: BaseException) -> str:
        """Return the text that a record shows for the error that ended a run; never raise."""
        return self.jvm.error_text(error)

    def setting(self, name: str) -> str | None:
        return self.jvm.setting(name)

    def option(self, name: str) -> str | None:
        """Return the Spark property `spark.hopsgpu.<name>`; None if it is not set.

        If the property is not set, the environment variable `HOPSGPU_<NAME>` counts.
        """
        twin = f"HOPSGPU_{name.upper().replace('.', '_')}"
        return self.setting(f"spark.hopsgpu.{name}") or os.environ.get(twin)

    def _is_on(self, name: str, *, default: bool) -> bool:
        value = (self.option(name) or str(default)).strip().lower()
        if value not in ("true", "false"):
            raise ConfigError(f"spark.hopsgpu.{name}={value!r}: must be 'true' or 'false'")
        return value == "true"
