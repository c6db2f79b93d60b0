"""What the user's function knows of its gang: `hopsgpu.context()`."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from hopsgpu.artifacts import checkpoint_restore
from hopsgpu.artifacts.checkpoint_retention import wanted
from hopsgpu.artifacts.checkpoint_upload import Saves
from hopsgpu.artifacts.checkpoints import Checkpoints, files_of
from hopsgpu.artifacts.log_dir_upload import DIRECTORY as LOGS
from hopsgpu.core import metrics as measures
from hopsgpu.core.boundary import public
from hopsgpu.core.rank_requirements import DATA as NEEDED
from hopsgpu.core.rank_requirements import lacking
from hopsgpu.errors import ConfigError
from hopsgpu.rank.trial import Trial, is_to_end
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.names import local_path

if TYPE_CHECKING:
    from hopsgpu.data.rank_data import RankData

# Names the file that describes the rank; set by its agent.
VARIABLE = "HOPSGPU_CONTEXT"
# Beside it: the rank's shards, and a directory for what is kept of their rows.
DATA = "data.shards"
KEPT = "data"


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
        model_dir: a directory of the rank; what all ranks leave in theirs is published as one
            model when the gang succeeds and `model=` was given.
        checkpoint_dir: URL of the run's checkpoints on the lake.
        log_dir_url: URL of the run's directory for TensorBoard on the lake.
        resume_dir: URL of the checkpoints of the run that this one goes on from, or None.
        disk_sharers: ranks of the gang on this node, this one among them.
        trial: of a search, to which this gang belongs; None elsewhere.
        script: the driver's, as `sys.argv[0]` names it there and in the rank; "" in a notebook.
    """

    __module__ = "hopsgpu"

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
    log_dir_url: str
    resume_dir: str | None = None
    disk_sharers: int = 1
    trial: Trial | None = None
    script: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], model_dir: Path) -> Context:
        """Of what the driver says of a rank, or of what `dump` wrote."""
        trial = fields.get("trial")
        given = {
            "model_dir": model_dir,
            "trial": None if trial is None else Trial.from_fields(trial),
        }
        return cls(**{**fields, "gpus": tuple(fields["gpus"]), **given})

    @property
    @public
    def data(self) -> RankData | dict[str, RankData] | None:
        """This rank's rows of the launch's data: a RankData, or one by name of a dict.

        The same one each time. What it keeps on the node's disk goes with the rank's process.
        None where the launch has no data, in a parameter server, and outside a gang.

        Raises:
            ConfigError: this Python has no pyarrow.
            StoreError: the driver has another version of hopsgpu.
        """
        file = os.environ.get(VARIABLE)
        return None if file is None else _opened(file, self.disk_sharers)

    @public
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

    def should_prune(self) -> bool:
        """Return whether this trial is to end early, as the search's pruner wants it.

        It takes some microseconds and waits for nobody. A rank that was told so and returns, or
        raises optuna.TrialPruned, has ended its trial as pruned. Outside a trial it is False.

        The ranks of a trial with several workers may be told at different steps, and one that
        ended alone would leave the others waiting: have rank 0 ask, and broadcast the answer.
        """
        file = os.environ.get(VARIABLE)
        return file is not None and self.trial is not None and is_to_end(_directory(file))

    @public
    def save_checkpoint(
        self,
        path: str | Path,
        step: int,
        *,
        keep: int = 3,
        metric: SupportsFloat | None = None,
        best: Literal["min", "max"] = "min",
    ) -> None:
        """Bring a file or directory to the lake, as this rank's part of the checkpoint at a step.

        Returns once it is copied on the node's own disk: the container's agent brings the copy to
        the lake, whole or not at all, even if the rank is killed meanwhile. Two copies of a rank
        may be on their way; the next save waits for the first of them. A rank that returns has
        ended once all is there. The checkpoint counts once the parts of all ranks that save are
        there. Outside a gang it is in a local directory on return.

        Args:
            path: of the file or directory; it stays as it is, and may be written anew. Links in it
                are saved as what they lead to.
            step: 0 and above, below 2**63.
            keep: how many of the last steps stay on the lake.
            metric: of the checkpoint; the best one stays on the lake too, for `best_checkpoint`.
                Where ranks give different ones, that of the lowest rank counts. NaN and the
                infinities are never the best.
            best: whether the least ("min") or the greatest ("max") metric is the best.

        Raises:
            ConfigError: no such file, what is neither file nor directory in it, no step, or
                something else that is not accepted; nothing is saved.
            StoreError: an earlier checkpoint of this rank did not come to the lake. This one is
                not saved; it may be tried again.
            OSError: the node's disk is full; nothing is saved.
        """
        saving = wanted(step, keep, metric, best)
        given = local_path(path, "path")
        file = os.environ.get(VARIABLE)
        if file is None:
            self._places[0].save(files_of(given), saving)
        else:
            Saves(Path(file).parent).hand_over(given, saving)

    @public
    def latest_checkpoint(self, *, all_ranks: bool = False) -> Path | None:
        """Return a local copy of what was saved last: by this run, in an earlier attempt too, else
        by the
        run that it goes on from.

        That is the latest step of which all ranks that save have saved their parts. What this
        attempt has saved counts for a rank once it has saved in it itself: so all ranks begin with
        the same, however late one of them is.

        Args:
            all_ranks: whether to have what all ranks saved, in one directory: the files that they
                saved, and what was in the directories that they saved.

        Returns:
            What this rank saved, or what the lowest rank that saves did, where this one saves
            none; with `all_ranks` the directory. None where there is no such step.

        Raises:
            ConfigError: with `all_ranks`, two ranks saved different files of the same name.
            StoreError: the lake refused, or a file there is damaged.
        """
        file = os.environ.get(VARIABLE)
        return checkpoint_restore.latest(
            self._places,
            _copies(),
            all_ranks=all_ranks,
            world_size=self.world_size,
            begun=file is None or Saves(Path(file).parent).begun,
        )

    @public
    def best_checkpoint(self, *, all_ranks: bool = False) -> Path | None:
        """Return a local copy of the checkpoint with the best metric, of this run and the one that
        it goes
        on from; of equals the newest.

        Args:
            all_ranks: as `latest_checkpoint`.

        Returns:
            As `latest_checkpoint`; None where no checkpoint was saved with a metric.

        Raises:
            ConfigError, StoreError: as `latest_checkpoint`.
        """
        return checkpoint_restore.best(self._places, _copies(), all_ranks=all_ranks)

    @property
    @public
    def log_dir(self) -> Path:
        """A local directory for TensorBoard's summary writers, made when it is first asked for.

        What is written there is carried to `tensorboard/rank-<rank>` in the run's directory every
        few seconds and at the rank's end. Outside a gang it stays where it is.
        """
        file = os.environ.get(VARIABLE)
        if file is None:
            return _local_directory("logs")
        directory = Path(file).with_name(LOGS)
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    @property
    def _places(self) -> list[Checkpoints]:
        urls = [self.checkpoint_dir, *([self.resume_dir] if self.resume_dir else [])]
        return [Checkpoints(Lake(url), self.rank, self.attempt) for url in urls]

    def dump(self, file: Path) -> None:
        """Write the description that `context()` reads in the rank."""
        file.write_text(json.dumps({**asdict(self), "model_dir": str(self.model_dir)}))


def context() -> Context:
    """Return the rank's context inside a gang; outside, a local world of one.

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
        checkpoint_dir=f"file://{_local_directory('checkpoints')}",
        log_dir_url=f"file://{_local_directory('logs')}",
    )


@functools.cache
def _described(file: str) -> Context:
    # A training that asks for it at each step does not read it each time.
    given = json.loads(Path(file).read_text())
    return Context.from_fields(given, Path(given["model_dir"]))


@functools.cache
def _opened(described: str, sharers: int) -> RankData | dict[str, RankData] | None:
    shards = Path(described).with_name(DATA)
    if not shards.exists():
        return None
    if lacks := lacking(NEEDED):
        raise ConfigError(
            f"context().data needs {' and '.join(lacks)}, which {sys.executable} on"
            f" {socket.gethostname()} does not have: add them to python_env=, or install them for"
            " the executors' Python"
        )
    # Not needed by ranks without data.
    from hopsgpu.data.rank_shards import Dealt, opened

    return opened(Dealt.load(shards.read_bytes()), shards.with_name(KEPT), sharers)


def _copies() -> Path:
    # Nobody else's: what lies there is taken for what was downloaded.
    file = os.environ.get(VARIABLE)
    return _local_directory("copies") if file is None else Path(file).with_name("copies")


@functools.cache
def _directory(described: str) -> str:
    return str(Path(described).parent)


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
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


@functools.cache
def _local_directory(purpose: str) -> Path:
    # Asked for again, it must be the same directory.
    return Path(tempfile.mkdtemp(prefix=f"hopsgpu-{purpose}-"))
