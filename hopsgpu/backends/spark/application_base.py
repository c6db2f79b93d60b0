"""The properties that all Spark applications with gangs have in common."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pyspark import SparkContext, SparkFiles

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.control.heartbeat import HEARTBEAT_SECONDS
from hopsgpu.core.gpu_idle import WARNING_SECONDS
from hopsgpu.core.gpu_types import parse_markers
from hopsgpu.core.own_log import level_of
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.load_check import LoadChecks
from hopsgpu.packaging.modules import Packer
from hopsgpu.storage.root import choose_root
from hopsgpu.units import parse_duration, parse_duration_or_off

_INTERVAL_SECONDS = 300.0


@dataclass
class SparkApplication:
    """A SparkContext with its options.

    Attributes:
        context: the SparkContext.
        jvm: its JVM.
    """

    context: SparkContext
    jvm: Jvm

    @functools.cached_property
    def id(self) -> str:
        """Return Spark's ID of the application; on YARN it is YARN's.

        The ID is cached for records of runs whose JVM has ended.
        """
        return str(self.context.applicationId)

    @functools.cached_property
    def packer(self) -> Packer:
        """Return the packer of the user's modules, shared because launches mostly have the same."""
        return Packer()

    @functools.cached_property
    def load_checks(self) -> LoadChecks:
        return LoadChecks()

    @property
    def ports(self) -> range | None:
        """Return the ports for the control channel; None for any.

        The property `spark.hopsgpu.ports` names the first and the last, as in "40000-40100".

        Raises:
            ConfigError: the property is not two ports.
        """
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
        return self.option("interface")

    @property
    def markers(self) -> dict[str, str]:
        """Return the YARN resources that mark nodes, by the type of the nodes' GPUs.

        Raises:
            ConfigError: `spark.hopsgpu.markers` does not have the form "A100=gpu-a100".
        """
        return parse_markers(self.option("markers"))

    @property
    def heartbeat(self) -> float:
        """Return the seconds of silence after which a driver or an executor counts as lost.

        Raises:
            ConfigError: `spark.hopsgpu.heartbeat` is not a duration.
        """
        value = self.option("heartbeat")
        return parse_duration(value or HEARTBEAT_SECONDS, "spark.hopsgpu.heartbeat") or 0.0

    @property
    def should_retry_user_errors(self) -> bool:
        """Return whether `retries` also apply to errors that all ranks raise at once.

        Raises:
            ConfigError: `spark.hopsgpu.retry` is neither "failures" nor "all".
        """
        value = self.option("retry") or "failures"
        if value not in ("failures", "all"):
            raise ConfigError(
                f"spark.hopsgpu.retry={value!r}: must be 'failures', or 'all' to also retry"
                " errors that all ranks raise at once"
            )
        return value == "all"

    @property
    def should_keep_data(self) -> bool:
        """Return whether the data that launches write for `data=` stays on the lake afterwards.

        Raises:
            ConfigError: `spark.hopsgpu.keep_data` is neither "true" nor "false".
        """
        return self._bool_option("keep_data", default=False)

    @property
    def elastic_interval(self) -> float:
        """Return the smallest number of seconds between two growths of an elastic gang.

        Raises:
            ConfigError: `spark.hopsgpu.elastic.interval` is not a duration.
        """
        value = self.option("elastic.interval")
        return parse_duration(value or _INTERVAL_SECONDS, "spark.hopsgpu.elastic.interval") or 0.0

    @property
    def should_give_way(self) -> bool:
        """Return whether elastic gangs shrink while other gangs wait for their GPUs.

        Raises:
            ConfigError: `spark.hopsgpu.elastic.give_way` is neither "true" nor "false".
        """
        return self._bool_option("elastic.give_way", default=True)

    @property
    def gpu_idle_warning(self) -> float | None:
        """Return after how many idle seconds of GPUs a warning follows; None for no warning.

        Raises:
            ConfigError: `spark.hopsgpu.idle_warning` is neither a duration nor "off".
        """
        value = self.option("idle_warning") or WARNING_SECONDS
        return parse_duration_or_off(value, "spark.hopsgpu.idle_warning")

    @property
    def gpu_idle_timeout(self) -> float | None:
        """Return after how many idle seconds of GPUs a run ends by default; None for no limit.

        Raises:
            ConfigError: `spark.hopsgpu.idle_timeout` is neither a duration nor "off".
        """
        value = self.option("idle_timeout") or None
        return parse_duration_or_off(value, "spark.hopsgpu.idle_timeout")

    def _bool_option(self, name: str, *, default: bool) -> bool:
        value = (self.option(name) or str(default)).strip().lower()
        if value not in ("true", "false"):
            raise ConfigError(f"spark.hopsgpu.{name}={value!r}: must be 'true' or 'false'")
        return value == "true"

    @property
    def log_level(self) -> str | None:
        """Return how much hopsgpu logs, "info" or "debug"; None if nobody has set it.

        Raises:
            ConfigError: `spark.hopsgpu.log` is neither of the two.
        """
        return level_of(self.option("log"))

    @functools.cached_property
    def user(self) -> str:
        return self.jvm.user()

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        return {"spark": str(self.context.version), "hadoop": self.jvm.hadoop_version()}

    @functools.cached_property
    def py_files_dir(self) -> Path:
        return Path(SparkFiles.getRootDirectory())

    @property
    def default_fs(self) -> str | None:
        return self.jvm.hadoop("fs.defaultFS")

    @property
    def root(self) -> str:
        """Return the root of runs and models: spark.hopsgpu.root, HOPSGPU_ROOT, or the user's."""
        return choose_root(self.option("root"), self.default_fs, self.user)

    def check_options(self) -> None:
        """Check all options now rather than during a run.

        Raises:
            ConfigError: an option is invalid; the message has its name, its value and what is
                accepted.
        """
        _ = (
            self.ports,
            self.heartbeat,
            self.should_retry_user_errors,
            self.markers,
            self.should_keep_data,
        )
        _ = self.log_level, self.elastic_interval, self.should_give_way
        _ = self.gpu_idle_warning, self.gpu_idle_timeout

    def error_text(self, error: BaseException) -> str:
        return self.jvm.error_text(error)

    def setting(self, name: str) -> str | None:
        return self.jvm.setting(name)

    def option(self, name: str) -> str | None:
        """Return the Spark property `spark.hopsgpu.<name>`; None if it is not set.

        If the property is not set, the environment variable `HOPSGPU_<NAME>` counts.
        """
        twin = f"HOPSGPU_{name.upper().replace('.', '_')}"
        return self.setting(f"spark.hopsgpu.{name}") or os.environ.get(twin)
