"""What every rank of a run is to do in one attempt."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hopsgpu.core.rank_requirements import DATA
from hopsgpu.packaging.modules import PackedModules
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.rank.trial import Trial
from hopsgpu.storage.lake import Lake


@dataclass(frozen=True)
class Call:
    """What every rank runs.

    Attributes:
        function: the pickled function with its arguments.
        modules: the user's own modules.
        environment: the user's variables and what all ranks share.
        run_id: of the run.
        directory: of the run, on the lake.
        attempt: counts from 0.
        retries: how many attempts may come after the first.
        memory: bytes that a rank may use with its descendants, None for no bound.
        timeout: seconds that the ranks may take, None for no bound.
        visible: which GPUs a rank sees, as `frameworks.environment` takes it.
        frameworks: what the function imports of the packages that are slow to import.
        own_master: whether the function has ranks meet at an address of its own; then no agent
            serves torch's store, of which torch would make use at any address.
        interface: of the network, that an administrator wants, or None.
        resumed: the run whose checkpoints are resumed from, on the lake, or None.
        data: the shards of each worker, as `data.dealt.Dealt` dumps them; none without data.
        python_env: that the ranks run with, or None.
        slots: of its containers' agents, in which it runs, by the container's key; 0 where none
            is given. A run in one slot leaves those in others alone.
        trial: of the search to which it belongs, or None.
        memory_share: of its GPU that a rank may use, in (0, 1), or None for all of it.
        imports: top-level modules that the ranks' Python must have to unpickle the function.
        script: what ranks have in `sys.argv`, see `script_name`.
    """

    function: bytes
    modules: PackedModules
    environment: Mapping[str, str]
    run_id: str
    directory: Lake
    attempt: int
    retries: int = 0
    memory: int | None = None
    timeout: float | None = None
    visible: str | None = None
    frameworks: tuple[str, ...] = ()
    own_master: bool = False
    interface: str | None = None
    resumed: Lake | None = None
    data: Sequence[bytes] = ()
    python_env: PythonEnv | None = None
    slots: Mapping[int, int] = field(default_factory=dict)
    trial: Trial | None = None
    memory_share: float | None = None
    imports: tuple[str, ...] = ()
    script: str = ""

    def slot(self, key: int) -> int:
        """The slot of a container's agent, by its key."""
        return self.slots.get(key, 0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Modules that the executors' Python must have for it; `python_env` may bring its own."""
        return DATA if self.data and self.python_env is None else ()

    @property
    def logs(self) -> Lake:
        """The directory of the ranks' logs; each attempt after the first has one of its own."""
        logs = self.directory / "logs"
        return logs / f"attempt-{self.attempt}" if self.attempt else logs

    def log_url(self, rank: int) -> str:
        """Where a rank's log is to be."""
        return (self.logs / f"rank-{rank}.log").url


def script_name() -> str:
    """The name by which this process's script was started, "" where it has none, as in a notebook.

    The arguments behind it are the driver's, and not those of a function in a rank.
    """
    is_script = hasattr(sys.modules.get("__main__"), "__file__")
    return sys.argv[0] if is_script and sys.argv else ""
