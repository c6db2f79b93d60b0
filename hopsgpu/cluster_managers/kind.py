"""The interface of kinds of cluster managers: their masters, and the Spark properties gangs need.

`hopsgpu.cluster_managers.manager_table` has the table of all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from hopsgpu.cluster_managers.manager import ClusterManager


class ManagerKind(ABC):
    """A kind of cluster manager."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Return what it is in sentences, such as "YARN" or "a standalone master"."""

    @property
    @abstractmethod
    def masters(self) -> str:
        """Return what `spark.master` looks like, for error messages."""

    @property
    @abstractmethod
    def session_settings(self) -> Mapping[str, str]:
        """Return the Spark properties that sessions need only here, unless the user sets them."""

    @property
    def fallback_settings(self) -> Mapping[str, str]:
        """Return the Spark properties that sessions get where spark-defaults.conf has none."""
        return {}

    @property
    @abstractmethod
    def has_shell(self) -> bool:
        """Return whether a shell starts the executors, so that it interprets some properties."""

    @property
    @abstractmethod
    def has_queues(self) -> bool:
        """Return whether applications are submitted to queues."""

    @property
    def queue_replacement(self) -> str:
        """Return what limits applications without queues, for error messages; "" for nothing."""
        return ""

    @property
    @abstractmethod
    def has_images(self) -> bool:
        """Return whether executors can run in a container image."""

    def image_settings(self, image: str) -> Mapping[str, str]:
        """Return the Spark properties that name the image besides `spark.hopsgpu.image`."""
        return {}

    @abstractmethod
    def has_master(self, master: str) -> bool:
        """Return whether a value of `spark.master` names such a cluster manager."""

    @abstractmethod
    def find_problems(self, setting: Callable[[str], str | None]) -> list[str]:
        """Return the settings that prevent gangs here: name, value, and what to set."""

    def find_refusals(self, setting: Callable[[str], str | None]) -> list[str]:
        """Return the settings that prevent gangs here, and that a session does not replace."""
        return []

    def submission_settings(
        self, tag: str, setting: Callable[[str], str | None]
    ) -> Mapping[str, str]:
        """Return the Spark properties of a submission in cluster mode, so that it can be found.

        With them, spark-submit does not wait for the application's end.

        Args:
            tag: identifies the submission; "" for none.
        """
        return {}

    @abstractmethod
    def settle_seconds(self, setting: Callable[[str], str | None]) -> float:
        """Return the seconds within which Spark's requests have reached the cluster manager."""

    @abstractmethod
    def connect(
        self,
        properties: Mapping[str, str],
        environ: Mapping[str, str],
        hadoop: Callable[[str], str | None] | None = None,
        seconds: tuple[float, float] | None = None,
    ) -> ClusterManager:
        """Return a client of the cluster manager that Spark's properties name.

        Args:
            properties: Spark's properties, among them `spark.master`.
            hadoop: returns a property of Hadoop's configuration, or None; by default that of the
                environment.
            seconds: limits to connect to an address, and to be answered; None for defaults.

        Raises:
            ConfigError: a property is invalid, or one that names an address is missing.
        """
