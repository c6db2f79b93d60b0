"""What a task can prepare for the ranks before they are known."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.agent.daemon_start import Starting, begin, container_process, daemon_directory
from hopsgpu.agent.rank_environment import ServerSpec, server_spec
from hopsgpu.control.peer import DriverEndpoint, lake_environment
from hopsgpu.packaging.python_env.environment import PythonEnv, RankPython

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmUp:
    """What the ranks of the gang will need from a fork server.

    Attributes:
        modules: top-level modules to import meanwhile.
        environment: variables of all ranks, including `env_vars` and OMP_NUM_THREADS; a rank's own
            variables, such as RANK, are ignored.
        python_env: Python environment that they run with, or None.
    """

    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python_env: PythonEnv | None = None

    def spec(self, executor: Mapping[str, str], python: RankPython) -> ServerSpec:
        """Return the spec of the fork server.

        Args:
            executor: variables of a Spark task.
            python: what the ranks run with.
        """
        return server_spec(executor, self.environment, self.modules, python)

    def begin(self, driver: DriverEndpoint) -> Starting | None:
        """Begin to start this container's process daemon, with a fork server if it can start now.

        Args:
            driver: whose ranks they are to be.

        Returns:
            The start; None if there is a daemon, or another task starts one.
        """
        spec = None
        if self.python_env is None:
            spec = self.spec(lake_environment(driver.user, os.environ), RankPython())
        watched = container_process()
        try:
            directory = daemon_directory(Path("hopsgpu"), watched)
            return begin(directory, watched, spec, driver.log)
        except OSError as error:
            # A request that needs the daemon starts it again, and reports if that fails too.
            log.warning("the process daemon cannot be started: %s", error)
            return None
