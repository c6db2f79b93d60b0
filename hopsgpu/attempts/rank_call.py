"""The call that every rank of a run executes in one attempt."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hopsgpu.agent.script_files import ScriptFiles
from hopsgpu.core.output_limits import LOG_LIMIT
from hopsgpu.core.rank_requirements import DATA
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.packaging.modules import PackedModules
from hopsgpu.packaging.preload import StaticFindings
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.rank.trial import Trial
from hopsgpu.storage.lake import LakePath


@dataclass(frozen=True)
class PackedFunction:
    """A function as it travels to the ranks.

    Attributes:
        needs: top-level modules that the ranks' Python must have to unpickle the call.
    """

    call: bytes
    modules: PackedModules
    foreseen: StaticFindings = StaticFindings()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """The call of a run's ranks.

    Attributes:
        interface: the network interface that an administrator configured, or None.
        data: the shards of each worker, as `data.rank_shards.RankShards` dumps them; empty without
            data.
        slots: the slot of each container's agent in which the call runs, by the container's key; 0
            for a container that is not listed. A run in one slot does not affect other slots.
        memory_share: share of its GPU's memory that a rank may use, in (0, 1); None for all of it.
        script: the only entry of the ranks' `sys.argv`; see `script_name`.
        log_limit: bytes of each log, of which the beginning and the end are kept.
        script_files: what agents need of a script; None for a function.
    """

    plan: LaunchPlan
    function: PackedFunction
    run_id: str
    directory: LakePath
    attempt: int
    interface: str | None = None
    data: Sequence[bytes] = ()
    python_env: PythonEnv | None = None
    slots: Mapping[int, int] = field(default_factory=dict)
    trial: Trial | None = None
    memory_share: float | None = None
    script: str = ""
    log_limit: int = LOG_LIMIT
    script_files: ScriptFiles | None = None

    def slot(self, key: int) -> int:
        return self.slots.get(key, 0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Modules that the executors' Python needs for data; none if there is a `python_env`."""
        return DATA if self.data and self.python_env is None else ()

    @property
    def logs(self) -> LakePath:
        """The directory of the ranks' logs; each attempt after the first has its own."""
        logs = self.directory / "logs"
        return logs / f"attempt-{self.attempt}" if self.attempt else logs

    def log_url(self, rank: int) -> str:
        return (self.logs / f"rank-{rank}.log").url


def script_name() -> str:
    """Return the name by which this process's script was started; "" in a notebook, for example.

    The script's arguments are for the driver, not for a function in a rank.
    """
    is_script = hasattr(sys.modules.get("__main__"), "__file__")
    return sys.argv[0] if is_script and sys.argv else ""
