"""Spark's standalone master as a kind of cluster manager."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hopsgpu.cluster_managers.kind import ManagerKind
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager, configured_manager
from hopsgpu.cluster_managers.standalone.master_client import SECONDS

_MASTER = re.compile(r"spark://[^,\s/]+(,[^,\s/]+)*")
_MODE = "spark.submit.deployMode"
_CORES = "spark.executor.cores"
# The driver sends a request to the master at once, without a heartbeat.
_SETTLE_SECONDS = 0.2


class Standalone(ManagerKind):
    """One standalone master, or several with one that is active; in client mode."""

    title = "a standalone master"
    masters = "spark://HOST:PORT"
    has_shell = False
    has_queues = False
    has_images = False
    session_settings: Mapping[str, str] = {}
    fallback_settings: Mapping[str, str] = {
        # Without a number, the first CPU executor takes all cores of a worker, and gangs get none.
        _CORES: "1",
    }

    def has_master(self, master: str) -> bool:
        return _MASTER.fullmatch(master.strip()) is not None

    def find_problems(self, setting: Callable[[str], str | None]) -> list[str]:
        if setting(_CORES) is not None:
            return []
        return [
            f"{_CORES} is not set: the CPU executors take all cores of the workers, and gangs get"
            " none; set it to 1 or another number"
        ]

    def find_refusals(self, setting: Callable[[str], str | None]) -> list[str]:
        mode = setting(_MODE) or "client"
        if mode == "client":
            return []
        return [
            f"{_MODE}={mode}: a standalone master runs no Python drivers; use client mode on a"
            " machine that the workers reach"
        ]

    def settle_seconds(self, setting: Callable[[str], str | None]) -> float:
        return _SETTLE_SECONDS

    def connect(
        self,
        properties: Mapping[str, str],
        environ: Mapping[str, str],
        hadoop: Callable[[str], str | None] | None = None,
        seconds: tuple[float, float] | None = None,
    ) -> StandaloneManager:
        return configured_manager(
            properties["spark.master"], properties, environ, seconds=seconds or SECONDS
        )
