"""What a task can prepare for the ranks before they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hopsgpu.agent.rank_environment import ServerSpec, server_spec
from hopsgpu.packaging.python_env.environment import PythonEnv, RankPython


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

    def spec_at_once(self, executor: Mapping[str, str]) -> ServerSpec | None:
        """Return the spec of a fork server that can start at once; None if an environment lacks."""
        return None if self.python_env is not None else self.spec(executor, RankPython())
