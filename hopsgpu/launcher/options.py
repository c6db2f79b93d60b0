"""The options of launches and held gangs, as users give them; each is written once, here.

`core.signatures` derives the signatures of `launch`, `submit`, `plan`, `hold` and `Gang.launch`,
and the parts of their docstrings about arguments, from these classes.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hopsgpu.core.signatures import placed_field
from hopsgpu.core.spec import GangSpec, GpuRequest
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.function_shipping import check_callable, default_name
from hopsgpu.launcher.scripts import ReadyScript, ScriptRequest, default_script_name
from hopsgpu.packaging.python_env.builder import RequestedEnv
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.script import KeptDirectories
from hopsgpu.storage.names import file_name, model_name
from hopsgpu.units import OFF, parse_duration, parse_duration_or_off, parse_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Duration = str | float | datetime.timedelta | None


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The options of everything that has a name and a display.

    Attributes:
        name: name of the run; by default the function's name.
        progress: "rich" for a live display, in a notebook's cell or in the terminal; "lines" for
            plain lines; None to choose between these; "off" for nothing; or a callable that
            receives a RunStatus at each change.
    """

    name: str | None = None
    progress: Any = None


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions(CommonOptions):
    """The options of everything that acquires executors.

    Attributes:
        cores_per_worker: cores of each rank; None for the nodes' share of cores per GPU, less one.
        memory_per_worker: memory that a rank may use together with its child processes, as "4g" or
            in bytes; a rank that uses more is killed, which counts as its failure.
        gpu_type: words of the GPUs' product name, in any case, as "A100"; None for any GPU. Only
            nodes that have this type are requested, and a GPU of another type gets no rank.
        visible: "container" lets a rank see the GPUs of its container, in the order of LOCAL_RANK;
            "rank" only its own; None is "container" if a rank has one whole GPU, else "rank".
        acquire_timeout: how long the gang may wait for its executors; None for no bound.
        python_env: packages that the ranks import before those of the executors' Python, or a whole
            environment that they run in: a list of packages, in pip's syntax; the path of a
            requirements file, of a directory (modules, or a virtual or conda environment) or of
            a packed archive; or the name of a conda environment. It is built before GPUs are
            requested, kept on the lake for the next launch, and unpacked once on each node.
        image: container image of the executors, which must be that of the session: see `session`.
        spark: the session; the active one by default.
    """

    cores_per_worker: int | None = None
    memory_per_worker: str | int = "4g"
    gpu_type: str | None = None
    visible: str | None = None
    acquire_timeout: Duration = placed_field("10m", "name")
    python_env: Any = None
    image: str | None = None
    spark: SparkSession | None = placed_field(None, "progress")

    def recipe(self) -> RequestedEnv | None:
        """Return the Python environment that `python_env` means, or None.

        Raises:
            ConfigError: it means none.
        """
        return None if self.python_env is None else recipe_for(self.python_env)

    def gang_of(self, **fields: Any) -> GangSpec:
        """Return the gang that the options request.

        Raises:
            ConfigError: an option or another field is invalid.
        """
        return GangSpec(
            cores_per_worker=self.cores_per_worker,
            memory_per_worker=parse_memory(self.memory_per_worker, "memory_per_worker"),
            gpu_type=self.gpu_type,
            visible=self.visible,
            image=self.image,
            acquire_timeout=parse_duration(self.acquire_timeout, "acquire_timeout"),
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class GangOptions(ExecutorOptions):
    """The options of a gang.

    Attributes:
        workers: the world size; or, for `launch`, `submit` and `plan`, the smallest and the largest
            of an elastic gang, as (2, 8). It starts once the smallest number of ranks can. It grows
            at a checkpoint as more executors arrive. If executors are lost, it continues from the
            latest checkpoint with the remaining ones.
        gpus_per_worker: number of whole GPUs of each rank; 0 for a gang on CPUs; 1/k (0.5, say) for
            k ranks of one container on one GPU, which NCCL does not connect (gloo does).
        parameter_servers: number of processes without GPU, besides the workers, that also run
            `train_fn`, with the role "ps"; rank 0 is then TensorFlow's chief, and when it has
            returned the others are stopped as successful.
        placement: "pack" for as many ranks as fit into one container (the largest number that
            divides `workers`), on the fullest node with room; "spread" for one rank on each
            node; None to leave it to YARN.
    """

    workers: int | tuple[int, int]
    gpus_per_worker: float = 1
    parameter_servers: int = placed_field(0, "memory_per_worker")
    placement: str | None = None

    @property
    def world_sizes(self) -> tuple[int | None, int]:
        """Return the smallest world size of an elastic gang, or None; and the largest.

        Raises:
            ConfigError: `workers` is neither one size nor two.
        """
        sizes: Any = self.workers
        if not isinstance(sizes, tuple | list):
            return None, sizes
        if len(sizes) != 2 or sizes[0] is None:
            raise ConfigError(
                f"workers={self.workers!r}: must be an integer ≥ 1, or the smallest and the largest"
                " of an elastic gang, as in (2, 8)"
            )
        least, most = sizes
        return least, most

    def gang_of(self, **fields: Any) -> GangSpec:
        least, most = self.world_sizes
        return super().gang_of(
            workers=most,
            least_workers=least,
            gpus=GpuRequest(self.gpus_per_worker),
            parameter_servers=self.parameter_servers,
            placement=self.placement,
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class HoldOptions(GangOptions):
    """The options of `hold`.

    Attributes:
        name: name of the gang.
        acquire_timeout: how long the gang may wait for its executors, on entry and again after
            some were lost; None for no bound.
        idle_timeout: after this time without a launch the gang releases its executors, and the
            next launch acquires them again; None to keep them until the end.
    """

    workers: int
    idle_timeout: Duration = placed_field("10m", "acquire_timeout")

    def gang_of(self, **fields: Any) -> GangSpec:
        if isinstance(self.workers, tuple | list):
            raise ConfigError(
                f"hold(workers={self.workers!r}): a held gang has one size; launch(workers=(…, …))"
                " is elastic without hold()"
            )
        return super().gang_of(**fields)


def check_gpu_idle_timeout(value: Duration, gpus: float, without: str, bounded: str) -> None:
    """Check that there are GPUs whose idling a `gpu_idle_timeout` could bound.

    Args:
        without: what says that there are none, in words.
        bounded: what has another time limit, "run" or "trial".

    Raises:
        ConfigError: there are none.
    """
    if value not in (None, OFF) and not gpus:
        raise ConfigError(
            f"gpu_idle_timeout={value!r} with {without}: there is no GPU that could idle; leave it"
            f" out, or use {bounded}_timeout="
        )


@dataclass(frozen=True, kw_only=True)
class FunctionOptions(CommonOptions):
    """The options of everything that runs a function in ranks.

    Attributes:
        train_fn: any callable that cloudpickle can pickle; every rank runs it.
        env_vars: environment variables of every rank. They may include `OMP_NUM_THREADS` and
            `LOKY_MAX_CPU_COUNT`, which are the number of the rank's cores by default.
        independent_ranks: whether each rank trains by itself. Frameworks then find a world of one
            rank in each rank, and are not checked. By default, a rank fails if its framework would
            not train with all ranks of the gang. The check covers Lightning, accelerate,
            Transformers, Keras, torch.distributed and jax.distributed.
    """

    train_fn: Callable[..., Any] = field(kw_only=False)
    env_vars: Mapping[str, str] | None = placed_field(None, "python_env", "name")
    independent_ranks: bool = False

    @property
    def run_name(self) -> str:
        """The given name, else the name of the function."""
        return self.name if self.name is not None else default_name(self.train_fn)


@dataclass(frozen=True, kw_only=True)
class RunOptions(FunctionOptions):
    """The options of one run on a gang.

    Attributes:
        train_fn: any callable that cloudpickle can pickle; every rank runs it. Or a script, which
            every rank runs as `__main__`: the path of a Python file, as "train.py", or the name of
            a module, as "mypkg.train" for `python -m mypkg.train`.
        args: its positional arguments; of a script, the arguments of its command line.
        kwargs: its keyword arguments.
        data: a Spark DataFrame, or the URL or absolute path of Parquet on the lake, or a dict from
            names to these; wrap one in `hopsgpu.Data` to say what happens to rows that cannot be
            divided evenly. The executors that run ETL write DataFrames to the run's directory,
            before any GPU is requested; these files are removed when the run ends, unless
            `spark.hopsgpu.keep_data` is true. Parquet is read in place. Each rank reads its own
            rows: `context().data`.
        model: name under which the files that the ranks leave in `context().model_dir` are
            published, once all ranks have returned. The files of all ranks form one version, of
            which every rank may write a part. If no rank leaves a file there is no version, but a
            warning. Executors whose ranks left nothing are released before the others upload.
        run_timeout: how long the ranks may take in one attempt; None for no bound.
        gpu_idle_timeout: how long all GPUs of the gang may idle in a row while the function runs;
            then the run ends as GpusIdle. A GPU idles if NVML reports a utilisation under 5 %. GPUs
            whose utilisation is unknown never end a run. "off" for no bound; None for the value of
            `spark.hopsgpu.idle_timeout`, by default no bound.
        retries: how often the gang may start again after a failure of a rank or of the
            infrastructure; `context().attempt` counts the starts. Executors that still work are
            kept. The same exception in all ranks at once is an error of the code, and is not
            retried unless `spark.hopsgpu.retry` is "all".
        resume: id of an earlier run, whose checkpoints `context().latest_checkpoint()` finds as
            long as this run has none of its own, and whose `checkpoint_dir` is put back; "latest"
            for the latest run of the same name that has checkpoints, if there is one.
        working_dir: directory that travels to the ranks of a script, which start in a copy of it;
            None for the script alone, with its modules. `.git`, caches, virtual environments, and
            what `.gitignore` and `.hopsgpuignore` name stay. At most 100 MiB are accepted.
        model_dir: directory in which a script leaves the model that `model=` publishes. This and
            the following directories are relative to the script's working directory.
        checkpoint_dir: directory of a script that is mirrored to the lake while it runs, and put
            back before it starts again: after a failure, with another number of ranks, and with
            `resume=`.
        tensorboard_dir: directory of a script's TensorBoard files, uploaded as
            `context().log_dir` is.
        output_dirs: other directories of a script that are mirrored to the run's directory on the
            lake (`hopsgpu runs files`).
    """

    # A frozen field may have a wider type than that of the base class, whose code does not use it.
    train_fn: Callable[..., Any] | str | os.PathLike[str] = field(  # type: ignore[assignment]
        kw_only=False
    )
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    data: Any = placed_field(None, "visible", "kwargs")
    model: str | None = None
    run_timeout: Duration = placed_field(None, "acquire_timeout", "name")
    gpu_idle_timeout: Duration = None
    retries: int = 0
    resume: str | None = None
    working_dir: str | os.PathLike[str] | None = placed_field(None, "independent_ranks")
    model_dir: str | None = placed_field(None, "working_dir")
    checkpoint_dir: str | None = placed_field(None, "model_dir")
    tensorboard_dir: str | None = placed_field(None, "checkpoint_dir")
    output_dirs: Sequence[str] = placed_field((), "tensorboard_dir")

    @property
    def is_script(self) -> bool:
        return isinstance(self.train_fn, (str, os.PathLike, ScriptRequest, ReadyScript))

    @property
    def run_name(self) -> str:
        if self.name is None and self.is_script:
            return default_script_name(self.train_fn)
        return super().run_name

    @property
    def kept_directories(self) -> KeptDirectories:
        """The directories of a script that are kept.

        Raises:
            ConfigError: a path is wrong, or there is no script whose directories these are.
        """
        named = {
            "model_dir": self.model_dir,
            "checkpoint_dir": self.checkpoint_dir,
            "tensorboard_dir": self.tensorboard_dir,
            "output_dirs": self.output_dirs or None,
            "working_dir": self.working_dir,
        }
        texts = [f"{name}={value!r}" for name, value in named.items() if value is not None]
        if texts and not self.is_script:
            raise ConfigError(
                f"{', '.join(texts)} with a function: these are for scripts; a function has"
                " context().model_dir, context().save_checkpoint() and context().log_dir"
            )
        if isinstance(self.output_dirs, (str, bytes)):
            raise ConfigError(f"output_dirs={self.output_dirs!r}: must be a list of directories")
        if self.model_dir is not None and self.model is None:
            raise ConfigError(
                f"model_dir={self.model_dir!r} without model=: name the model that is published"
            )
        return KeptDirectories(
            self.model_dir, self.checkpoint_dir, self.tensorboard_dir, tuple(self.output_dirs)
        )

    def of_run(self) -> dict[str, Any]:
        """Return the fields of a GangSpec that concern the run, by name.

        Raises:
            ConfigError: an option is invalid.
        """
        if not self.is_script:
            check_callable(self.train_fn)
        return {
            "name": self.run_name,
            "model": None if self.model is None else model_name(self.model),
            "resume": None if self.resume is None else file_name(self.resume, "resume"),
            "run_timeout": parse_duration(self.run_timeout, "run_timeout"),
            "gpu_idle_timeout": parse_duration_or_off(self.gpu_idle_timeout, "gpu_idle_timeout"),
            "retries": self.retries,
            "env_vars": {} if self.env_vars is None else self.env_vars,
            "independent_ranks": self.independent_ranks,
        }


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(RunOptions, GangOptions):
    """The options of `launch`, `submit` and `plan`: those of a gang and of a run on it."""

    workers: int | tuple[int, int] = 1

    def gang_of(self, **fields: Any) -> GangSpec:
        check_gpu_idle_timeout(
            self.gpu_idle_timeout, self.gpus_per_worker, "gpus_per_worker=0", "run"
        )
        return super().gang_of(**fields)


@dataclass(frozen=True, kw_only=True)
class HeldRunOptions(RunOptions):
    """The options of `Gang.launch`, which also takes the function's arguments by position."""

    args: Sequence[Any] = field(default=(), kw_only=False)
    kwargs: Mapping[str, Any] | None = field(default=None, kw_only=False)
