"""What the user's function knows of its gang: `hopsgpu.context()`."""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hopsgpu.errors import ConfigError

# Names the file that describes the rank; set by its agent.
VARIABLE = "HOPSGPU_CONTEXT"

_LATER = frozenset(
    {
        "checkpoint_dir",
        "data",
        "latest_checkpoint",
        "log_dir",
        "report",
        "save_checkpoint",
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
        rank: in [0, world_size).
        local_rank: within the container.
        world_size: ranks of the gang.
        host: the node's name.
        gpus: UUIDs of the rank's own GPUs.
        role: "worker".
        run_id: names the run's directory on the lake.
        attempt: counts from 0.
        model_dir: a directory of the rank; what rank 0 leaves there is published when the gang
            succeeds and `model=` was given.
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

    def __getattr__(self, name: str) -> Any:
        if name in _LATER:
            raise _NotYet(f"context().{name} is not available yet")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
        given = json.loads(Path(file).read_text())
        given |= {"gpus": tuple(given["gpus"]), "model_dir": Path(given["model_dir"])}
        return Context(**given)
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
        model_dir=_local_model_dir(),
    )


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
def _local_model_dir() -> Path:
    # Asked for again, it must be the same directory.
    return Path(tempfile.mkdtemp(prefix="hopsgpu-model-"))
