"""The view of the gang for the user's function: `hopsgpu.context()`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from hopsgpu.artifacts import checkpoint_restore
from hopsgpu.artifacts.checkpoint_retention import MAX_STEP, check_options, check_step
from hopsgpu.artifacts.checkpoint_upload import PendingCheckpoints
from hopsgpu.artifacts.checkpoints import Checkpoints, files_of
from hopsgpu.artifacts.log_dir_upload import DIRECTORY as LOGS
from hopsgpu.core import metrics as measures
from hopsgpu.core.boundary import public
from hopsgpu.core.rank_requirements import DATA as NEEDED
from hopsgpu.core.rank_requirements import missing_modules
from hopsgpu.core.rank_warnings import CONTEXT_VARIABLE
from hopsgpu.errors import ConfigError
from hopsgpu.rank.blocked_time import RankBlockedTime
from hopsgpu.rank.checkpoint_agreement import RankAgreement
from hopsgpu.rank.trial import Trial, is_to_end
from hopsgpu.serving import model_signature
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.names import local_path

if TYPE_CHECKING:
    from hopsgpu.data.rank_data import RankData
    from hopsgpu.data.rank_shards import RankDatasets

log = logging.getLogger(__name__)

VARIABLE = CONTEXT_VARIABLE
# Files in the directory of the context's file: the rank's shards, and rows that are kept on disk.
DATA = "data.shards"
KEPT = "data"


@dataclass(frozen=True)
class Context:
    """A rank's view of its gang.

    Attributes:
        rank: in [0, world_size); a parameter server's rank is world_size or more.
        local_rank: rank within the container.
        world_size: number of ranks in the gang.
        host: name of the node.
        gpus: UUIDs of the rank's own GPUs.
        role: "worker" or "ps".
        run_id: name of the run and of its directory on the lake.
        attempt: counts from 0.
        model_dir: local directory of the rank. When the gang succeeds and `model=` was given, the
            files of all ranks' directories are published as one model.
        checkpoint_dir: URL of the run's checkpoints on the lake.
        log_dir_url: URL of the run's TensorBoard directory on the lake.
        resume_dir: URL of the checkpoints of the run that this run resumes, or None.
        disk_sharers: number of ranks of the gang on this node, including this one.
        trial: the trial of a search that this gang runs, or None.
        script: the driver's script, which `sys.argv[0]` names at the driver and in the rank; "" in
            a notebook.
        independent_ranks: whether each rank trains by itself, as the launch said.
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
    independent_ranks: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], model_dir: Path) -> Context:
        trial = fields.get("trial")
        values = {
            "gpus": tuple(fields["gpus"]),
            "model_dir": model_dir,
            "trial": None if trial is None else Trial.from_fields(trial),
        }
        return cls(**{**fields, **values})

    @property
    def generation(self) -> int:
        """The number of the gang's world, from 0: how often its ranks were started before.

        A world is the ranks of one attempt, so this equals `attempt`. In an elastic gang, each
        change of the number of ranks starts a new world, which continues from the latest
        checkpoint.
        """
        return self.attempt

    @property
    @public
    def data(self) -> RankData | dict[str, RankData] | None:
        """This rank's rows of the launch's data: a RankData, or a dict of them by name.

        Each access returns the same object. Its files on the node's disk are deleted after the
        rank's exit. The value is None if the launch has no data, in a parameter server, and outside
        a gang.

        Raises:
            ConfigError: this Python has no pyarrow.
            StoreError: the driver has another version of hopsgpu.
        """
        file = os.environ.get(VARIABLE)
        datasets = None if file is None else _open_data(file, self.disk_sharers)
        return None if datasets is None else datasets.view

    @public
    def report(self, step: int, /, **metrics: SupportsFloat) -> None:
        """Report metrics at a step to the driver, and keep them in the run's directory.

        The call takes some microseconds, never blocks and may be made in any thread. Outside a gang
        the metrics are discarded.

        Args:
            step: an integer ≥ 0; it may repeat and decrease. It is passed by position.
            metrics: numbers by name: ints, floats, bools, and scalars of NumPy and torch, including
                NaN and the infinities. For a tensor on a GPU, the call waits for the GPU. Every
                name of 1 to 200 characters is accepted, "step" too; `result.metrics` has the step
                under that name.

        Raises:
            ConfigError: the step or a metric is invalid; nothing of the call is kept.
            OSError: the node's disk is full.
        """
        line = measures.report_line(step, metrics, time.time())
        file = os.environ.get(VARIABLE)
        if file is not None:
            measures.append(_reports_file(file), line)

    @public
    def signature(self, inputs: Any, outputs: Any) -> dict[str, Any]:
        """Infer the model's signature from samples, and write it to `model_dir` for the manifest.

        The file `signature.json` has the names, types and shapes of inputs and outputs, in the
        words of the Open Inference Protocol. The first dimension of all samples is the batch; it
        varies, and the other dimensions do not. A single array is named "input" or "output", and
        the arrays of a list "input_0", "input_1", ... One rank may call this, or several with
        samples of the same types and shapes.

        Args:
            inputs: a batch of inputs: an array (NumPy, torch, TensorFlow, JAX), a mapping of names
                to arrays, a list of arrays, or a pandas DataFrame.
            outputs: the model's result for the batch, in the same forms.

        Returns:
            The signature, as JSON values.

        Raises:
            ConfigError: a value is no sample, has a type that the protocol lacks, or the samples
                have batches of different sizes; nothing is written.
        """
        inferred = model_signature.infer(inputs, outputs)
        model_signature.dump(inferred, self.model_dir)
        return inferred

    def should_prune(self) -> bool:
        """Return whether this trial should end early, as the search's pruner decided.

        The call takes some microseconds and never blocks. A rank that received True and then
        returns, or raises optuna.TrialPruned, ends its trial as pruned. Outside a trial the result
        is False.

        The ranks of a trial with several workers may see True at different steps, and the others
        would wait for a rank that ends alone. Call this in rank 0, and broadcast the result.
        """
        file = os.environ.get(VARIABLE)
        return file is not None and self.trial is not None and is_to_end(_directory(file))

    @public
    def should_checkpoint(self, /, step: int) -> bool:
        """Return whether to save a checkpoint at this step because the number of ranks will change.

        Use it in code that saves rarely, so that little work is lost:
        `if step % 1000 == 0 or context.should_checkpoint(step): save(step)`. The result is True in
        all ranks at the same step, once per request. All ranks must call this with the same
        increasing steps, which may have gaps, in one thread. The result is False for a step that is
        not larger than all before, and outside a gang.

        The call takes one or two microseconds. A rank that reaches a proposed step before the
        others have accepted it waits: usually milliseconds, at most about ten seconds.

        Args:
            step: an integer, 0 ≤ step < 2**63.

        Raises:
            ConfigError: the step is invalid.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = check_step(step)
        file = os.environ.get(VARIABLE)
        return file is not None and _agreement(file).is_agreed(step)

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
        """Save a file or directory to the lake, as this rank's shard of the checkpoint at a step.

        The checkpoint includes the position in `context().data`. A gang that continues from it gets
        the rest of the epoch, whatever its number of ranks, if the ranks read in step. All batches
        that this rank has received before the call count as trained.

        The call returns once the data is copied on the node's own disk. The container's agent
        uploads the copy to the lake, completely or not at all, even if the rank is killed. Two
        copies of a rank may be in transit; the next save waits for the first of them. A rank that
        returns exits when all its copies are uploaded. The checkpoint is complete once the shards
        of all ranks that save are on the lake. Outside a gang, the checkpoint is in a local
        directory when the call returns.

        Args:
            path: path of the file or directory, which may be overwritten after the call. Links in
                a directory are saved as their targets.
            step: an integer, 0 ≤ step < 2**63.
            keep: number of latest steps to keep on the lake.
            metric: metric of the checkpoint. The best checkpoint also stays on the lake, for
                `best_checkpoint`. If ranks give different values, the lowest rank's value counts.
                NaN and the infinities are never the best.
            best: "min" if the smallest metric is the best, "max" if the largest is.

        Raises:
            ConfigError: the path does not exist, it contains something other than files and
                directories, or an argument is invalid; nothing is saved.
            StoreError: an earlier checkpoint of this rank did not reach the lake. The present
                checkpoint is not saved; the call may be repeated.
            OSError: the node's disk is full; nothing is saved.
        """
        saving = check_options(step, keep, metric, best)
        source = local_path(path, "path")
        file = os.environ.get(VARIABLE)
        if file is None:
            self._places[0].save(files_of(source), saving)
        else:
            agreed = _agreement(file).last_due
            saving = replace(saving, position=_position(file, self.disk_sharers), agreed=agreed)
            with _in_checkpoint_call():
                PendingCheckpoints(Path(file).parent).hand_over(source, saving)
            if self.rank == 0:
                _check_restored(file, self.disk_sharers)
            log.debug("handed over step %d to the agent, which uploads it", saving.step)

    @public
    def latest_checkpoint(self, *, all_ranks: bool = False) -> Path | None:
        """Return a local copy of this run's latest checkpoint, else of the run that it resumes.

        The latest checkpoint is the latest step for which all saving ranks of its attempt have
        saved their shards; earlier attempts count. A rank counts steps of its own attempt only
        after its first save, so that all ranks start from the same step, however late a rank is.
        The attempt that saved the step may have had another number of ranks.

        Args:
            all_ranks: whether to return the shards of all ranks of the attempt in one directory:
                the saved files, and the contents of the saved directories. Needed to load a sharded
                state into another number of ranks.

        Returns:
            The shard of this rank, or of the lowest saving rank if this rank does not save; with
            `all_ranks` the directory. None if no step is complete.

        Raises:
            ConfigError: with `all_ranks`, two ranks saved different files of the same name.
            StoreError: the lake failed, or a file there is damaged.
        """
        file = os.environ.get(VARIABLE)
        with _in_checkpoint_call():
            return checkpoint_restore.download_latest(
                self._places,
                _copies_directory(),
                all_ranks=all_ranks,
                world_size=self.world_size,
                has_saved=file is None or PendingCheckpoints(Path(file).parent).has_saved,
            )

    @public
    def best_checkpoint(self, *, all_ranks: bool = False) -> Path | None:
        """Return a local copy of the checkpoint with the best metric.

        The checkpoints of this run and of the run that it resumes count. If metrics are equal, the
        newest checkpoint is the best.

        Args:
            all_ranks: as for `latest_checkpoint`.

        Returns:
            As `latest_checkpoint`; None if no checkpoint was saved with a metric.

        Raises:
            ConfigError, StoreError: as `latest_checkpoint`.
        """
        with _in_checkpoint_call():
            return checkpoint_restore.download_best(
                self._places, _copies_directory(), all_ranks=all_ranks
            )

    @property
    @public
    def log_dir(self) -> Path:
        """A local directory for TensorBoard's summary writers, created on first access.

        Its files are uploaded to `tensorboard/rank-<rank>` in the run's directory every few seconds
        and when the rank exits. Outside a gang they stay local.
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
        return [
            Checkpoints(LakePath(url), self.rank, self.attempt, self.world_size) for url in urls
        ]

    def dump(self, file: Path) -> None:
        """Write the description that `context()` reads in the rank."""
        file.write_text(json.dumps({**asdict(self), "model_dir": str(self.model_dir)}))


def context() -> Context:
    """Return the rank's context inside a gang, and a local world of one rank outside.

    Outside a gang, the call sets the environment variables of a world of one rank, so that
    `init_process_group()` works and the same function runs directly. Under torchrun and similar
    launchers, which set `RANK`, it sets nothing.
    """
    file = os.environ.get(VARIABLE)
    if file is not None:
        return _read_context(file)
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
def _read_context(file: str) -> Context:
    # Cached, so that a function that calls context() at each step reads the file only once.
    fields = json.loads(Path(file).read_text())
    return Context.from_fields(fields, Path(fields["model_dir"]))


@functools.cache
def _open_data(context_file: str, sharers: int) -> RankDatasets | None:
    shards = Path(context_file).with_name(DATA)
    if not shards.exists():
        return None
    if lacks := missing_modules(NEEDED):
        raise ConfigError(
            f"context().data needs {' and '.join(lacks)}, which {sys.executable} on"
            f" {socket.gethostname()} does not have: add them to python_env=, or install them for"
            " the executors' Python"
        )
    # Imported here because ranks without data do not need it.
    from hopsgpu.data.rank_shards import RankShards, open_datasets

    rank_shards = RankShards.load(shards.read_bytes())
    return open_datasets(
        rank_shards, shards.with_name(KEPT), sharers, _blocked_time(context_file).data
    )


def _position(context_file: str, sharers: int) -> Mapping[str, Any] | None:
    """Return the position in the launch's data; None without data or without pyarrow."""
    if not Path(context_file).with_name(DATA).exists() or missing_modules(NEEDED):
        return None
    datasets = _open_data(context_file, sharers)
    return None if datasets is None else datasets.position().as_fields()


@functools.cache
def _check_restored(context_file: str, sharers: int) -> None:
    """Warn, once, if the data continues at a checkpoint that the rank has not loaded."""
    has_data = Path(context_file).with_name(DATA).exists()
    datasets = _open_data(context_file, sharers) if has_data else None
    epochs = None if datasets is None else datasets.continued_epochs
    if epochs and not _copies_directory().exists():
        log.warning(
            "context().data continues at the latest checkpoint (%s), but rank 0 has not called"
            " latest_checkpoint(): a model that starts from scratch is not trained with the rows"
            " before it. Load the latest checkpoint, if there is one, before the first batch",
            ", ".join(f"{name!r} at epoch {epoch}" for name, epoch in epochs.items()),
        )


def _copies_directory() -> Path:
    # A private directory, because its files count as copies that were downloaded before.
    file = os.environ.get(VARIABLE)
    return _local_directory("copies") if file is None else Path(file).with_name("copies")


@functools.cache
def _directory(context_file: str) -> str:
    return str(Path(context_file).parent)


@functools.cache
def _agreement(context_file: str) -> RankAgreement:
    # Cached, because the object remembers the answers of this process.
    return RankAgreement(Path(context_file).parent)


@functools.cache
def _blocked_time(context_file: str) -> RankBlockedTime:
    return RankBlockedTime(Path(context_file).parent)


def _in_checkpoint_call() -> AbstractContextManager[None]:
    file = os.environ.get(VARIABLE)
    return contextlib.nullcontext() if file is None else _blocked_time(file).checkpoints


@functools.cache
def _reports_file(context_file: str) -> str:
    # Cached, because creating a Path takes longer than writing a report.
    return str(Path(context_file).with_name(measures.FILE))


def _world_of_one() -> dict[str, str]:
    # With port 0, the store of the only rank chooses a free port.
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
    # Cached, because later calls must return the same directory.
    return Path(tempfile.mkdtemp(prefix=f"hopsgpu-{purpose}-"))
