"""What the user's function knows of its gang: `hopsgpu.context()`."""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from hopsgpu.errors import ConfigError
from hopsgpu.stores.checkpoints import Checkpoints
from hopsgpu.stores.lake import Lake
from hopsgpu.worker import measures

# Names the file that describes the rank; set by its agent.
VARIABLE = "HOPSGPU_CONTEXT"

_LATER = frozenset(
    {
        "data",
        "log_dir",
        "should_prune",
        "trial",
    }
)


class _NotYet(ConfigError, AttributeError):
    """An AttributeError too, so that hasattr() says no."""


@dataclass(frozen=True)
class Context:
    """A rank's view of its gang.

    Attributes:
        rank: in [0, world_size); of a parameter server its number, from world_size on.
        local_rank: within the container.
        world_size: ranks of the gang.
        host: the node's name.
        gpus: UUIDs of the rank's own GPUs.
        role: "worker" or "ps".
        run_id: names the run's directory on the lake.
        attempt: counts from 0.
        model_dir: a directory of the rank; what rank 0 leaves there is published when the gang
            succeeds and `model=` was given.
        checkpoint_dir: URL of the run's checkpoints on the lake.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    gpus: tuple[str, ...]
    role: str
    run_id: str
    attempt: int
    model_dir: Path
    checkpoint_dir: str

    def __getattr__(self, name: str) -> Any:
        if name in _LATER:
            raise _NotYet(f"context().{name} is not available yet")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def report(self, /, step: int, **metrics: SupportsFloat) -> None:
        """Has the driver know of metrics at a step, and keeps them in the run's directory.

        It takes some microseconds, waits for nobody and may be called in any thread. Outside a
        gang nothing is kept.

        Args:
            step: 0 and above; it may repeat and go back.
            metrics: numbers by name: ints, floats, bools, NumPy's and torch's scalars. NaN and
                the infinities too. Of a tensor on a GPU, the call waits for the GPU.

        Raises:
            ConfigError: a step or a metric that is none; nothing of the call is kept.
            OSError: the node's disk is full.
        """
        line = measures.report_line(step, metrics, time.time())
        file = os.environ.get(VARIABLE)
        if file is not None:
            measures.append(_reports_file(file), line)

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Brings a file or directory to the lake, as this rank's part of the checkpoint at a step.

        The next attempt finds it by `latest_checkpoint`. Returns once it is there.

        Args:
            path: of the file or directory; it stays as it is.
            step: 0 and above.

        Raises:
            ConfigError: no such file, or no step.
            StoreError: the lake refused; nothing is left behind.
        """
        self._checkpoints.save(Path(path), step)

    def latest_checkpoint(self) -> Path | None:
        """A local copy of what was saved last by this run, in an earlier attempt too.

        Returns:
            What this rank saved at the latest step of which all ranks that save have saved their
            parts, or what the lowest of them saved, where this one saves none; None where there is
            no such step.

        Raises:
            StoreError: the lake refused.
        """
        return self._checkpoints.latest(Path(tempfile.gettempdir(), "hopsgpu-checkpoints"))

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(Lake(self.checkpoint_dir), self.rank, self.attempt)

    def dump(self, file: Path) -> None:
        """Writes the description that `context()` reads in the rank."""
        file.write_text(json.dumps({**asdict(self), "model_dir": str(self.model_dir)}))


def context() -> Context:
    """The rank's context inside a gang; outside, a local world of one.

    Outside a gang (and not under torchrun or its like, where `RANK` is set) the variables of
    a world of one are put into the environment, so that `init_process_group()` works and the
    same function runs directly.
    """
    file = os.environ.get(VARIABLE)
    if file is not None:
        return _described(file)
    if "RANK" not in os.environ:
        os.environ.update(_world_of_one())
    return Context(
        rank=0,
        local_rank=0,
        world_size=1,
        host=socket.gethostname(),
        gpus=tuple(g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g),
        role="worker",
        run_id="local",
        attempt=0,
        model_dir=_local_directory("model"),
        checkpoint_dir=_local_directory("checkpoints").as_uri(),
    )


@functools.cache
def _described(file: str) -> Context:
    # A training that asks for it at each step does not read it each time.
    given = json.loads(Path(file).read_text())
    given |= {"gpus": tuple(given["gpus"]), "model_dir": Path(given["model_dir"])}
    return Context(**given)


@functools.cache
def _reports_file(described: str) -> str:
    # A Path takes longer to make than a report to write.
    return str(Path(described).with_name(measures.FILE))


def _world_of_one() -> dict[str, str]:
    # Port 0 has the only rank's store take a free one itself.
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


@functools.cache
def _local_directory(purpose: str) -> Path:
    # Asked for again, it must be the same directory.
    return Path(tempfile.mkdtemp(prefix=f"hopsgpu-{purpose}-"))
