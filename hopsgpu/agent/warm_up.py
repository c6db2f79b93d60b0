"""Preparation of a container for ranks that are not known yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.agent.daemon_start import (
    DaemonStart,
    container_process,
    daemon_directory,
    start_in_background,
)
from hopsgpu.agent.rank_environment import ServerSpec, server_spec
from hopsgpu.control.peer import DriverEndpoint, lake_environment
from hopsgpu.packaging.python_env.environment import PythonEnv, RankPython

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmUp:
    """The fork server that the ranks of the gang will need.

    Attributes:
        modules: top-level modules to import.
        environment: variables of all ranks, including `env_vars` and OMP_NUM_THREADS.
        python_env: Python environment of the ranks; None for the executors' Python.
    """

    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python_env: PythonEnv | None = None

    def spec(self, executor: Mapping[str, str], python: RankPython) -> ServerSpec:
        return server_spec(executor, self.environment, self.modules, python)

    def start_daemon(self, driver: DriverEndpoint) -> DaemonStart | None:
        """Start the process daemon, and with it a fork server that needs no unpacked environment.

        Return None if there is a daemon, or another task starts one.
        """
        spec = None
        if self.python_env is None:
            spec = self.spec(lake_environment(driver.user, os.environ), RankPython())
        watched_pid = container_process()
        try:
            directory = daemon_directory(Path("hopsgpu"), watched_pid)
            return start_in_background(directory, watched_pid, spec, driver.log)
        except OSError as error:
            # The next request to the daemon starts it again, and reports if that fails too.
            log.warning("the process daemon cannot be started: %s", error)
            return None
