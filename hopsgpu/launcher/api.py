"""launch, submit, plan and hold: the ways in."""

from __future__ import annotations

import functools
import logging
import os
import threading

from hopsgpu.backends.grant import leased
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.controller import execute
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.launcher.held_gang import Gang
from hopsgpu.launcher.interrupts import takes, wait_for
from hopsgpu.launcher.options import Arguments, HeldArguments, arguments, held_arguments
from hopsgpu.launcher.planner import new_run_id, plan_of
from hopsgpu.launcher.run import Board, Run
from hopsgpu.packaging.code_variables import carried
from hopsgpu.packaging.python_env.builder import warnings_of

log = logging.getLogger(__name__)


@takes(arguments)
def plan(given: Arguments, interrupted: threading.Event) -> LaunchPlan:
    """What `launch` would do with these arguments; asks YARN for nothing and runs nothing.

    Looks at what the ResourceManager shows of its nodes and the application's queue.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    return _planned(given, "<run_id>")


@takes(arguments)
def submit(given: Arguments, interrupted: threading.Event) -> Run:
    """As `launch`, and returns at once with a Run.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    return _started(given)


@takes(arguments)
def launch(given: Arguments, interrupted: threading.Event) -> GangResult:
    """Trains on a gang of GPUs and gives them back.

    All executors come, or none is kept; each rank runs `train_fn(*args, **kwargs)` in a fresh
    process with PyTorch's environment. Returns once the ResourceManager shows the GPUs gone.

    Args:
        train_fn: any callable that cloudpickle takes; it is run on every rank.
        args: positional arguments of it.
        kwargs: keyword arguments of it.
        workers: the world size.
        gpus_per_worker: whole GPUs of each rank; 0 for a gang on CPUs; 1/k (0.5, say) for k ranks
            of one container on one GPU, which NCCL does not connect (gloo does).
        cores_per_worker: cores of each rank; None for the nodes' share of cores per GPU, less one.
        memory_per_worker: what a rank may use with its child processes, as "4g" or bytes; one
            that uses more is ended and is the failure.
        parameter_servers: processes without GPU beside the workers, that run `train_fn` too, with
            the role "ps"; rank 0 is then TensorFlow's chief, and when it has returned the others
            are stopped as successful.
        visible: "container" has a rank see the GPUs of its container, in the order of LOCAL_RANK;
            "rank" its own only; None the first while `gpus_per_worker` is 1, else the second.
        placement: "pack" for as many ranks as fit into one container (the largest number that
            divides `workers`), on the fullest node with room; "spread" for one rank on each
            node; None to leave it to YARN.
        gpu_type: words of the GPUs' product name, in whatever case, as "A100"; None for any. Nodes
            that have it are asked for, and a GPU of another type gets no rank.
        data: a Spark DataFrame, or the URL or absolute path of Parquet on the lake, or a dict of
            names to these; `hopsgpu.Data` around one says what becomes of rows that cannot be
            dealt evenly. DataFrames are written to the run's directory by the executors that ETL
            runs on, before any GPU is asked for, and removed with the run's end unless
            `spark.hopsgpu.keep_data` is true; Parquet is read in place. Each rank reads its own
            rows: `context().data`.
        model: name under which what the ranks leave in `context().model_dir` is published, once
            all of them have returned: the files of all in one version, which every rank may
            write a part of. Where no rank leaves a file there is no version, and a warning.
            Executors whose ranks left nothing are given back before the others upload.
        name: of the run, the function's name by default.
        acquire_timeout: how long the gang may wait for its executors; None for no bound.
        run_timeout: how long the ranks may take in one attempt; None for no bound.
        retries: how often the gang starts again after a failure of a rank or of the
            infrastructure, with `context().attempt` counting. Executors that are still good are
            kept. The same exception in all ranks at once is the code's, and not tried again
            unless `spark.hopsgpu.retry` is "all".
        resume: id of an earlier run, whose checkpoints `context().latest_checkpoint()` finds where
            this one has none of its own.
        python_env: packages that the ranks import before those of the executors' Python, or a whole
            environment that they run in: a list of packages, as pip takes them; the path of a
            requirements file, of a directory (modules, or a virtual or conda environment) or of
            a packed archive; or the name of a conda environment. It is made before GPUs are asked
            for, kept on the lake for the next launch, and unpacked once on each node.
        env_vars: environment variables of every rank; `OMP_NUM_THREADS` and `LOKY_MAX_CPU_COUNT`,
            by default the rank's cores, may be among them.
        progress: "rich" for a live display, in a notebook's cell or in the terminal; "lines" for
            plain lines; None for the one that fits; "off" for nothing; or a callable that is given
            a RunStatus at each change.
        spark: the session; the active one by default.

    Returns:
        GangResult with the value of every rank, at most 100 MiB pickled each; larger results
        belong into `context().model_dir`.

    Raises:
        ConfigError: an argument or setting that cannot work, or data with fewer rows than ranks,
            without Parquet, or of another layout than can be read; no GPU was asked for.
        CapacityError: what YARN can never grant, on its nodes, in the queue or to the user;
            nothing was asked for.
        GangTimeout: not all executors came in time; it says who holds the rest.
        RankFailed: the first failure of a rank, by time, or ranks that took longer than
            `run_timeout`; the others were stopped.
        DiscoveryError: two containers were given the same GPU.
        StoreError: the data cannot be read, or the lake refused the logs' directory, or that models
            are written, before any GPU was asked for; or the model, or two ranks left
            different files of one name: then `error.result.values` is what the ranks returned.
        KeyboardInterrupt: Ctrl-C; the run was cancelled and its GPUs are back.
    """
    return wait_for(_started(given), interrupted)


@takes(held_arguments)
def hold(given: HeldArguments, interrupted: threading.Event) -> Gang:
    """A gang kept for several launches: `with hopsgpu.hold(workers=4) as gang: gang.launch(...)`.

    Args:
        workers: the world size.
        gpus_per_worker, cores_per_worker, memory_per_worker, parameter_servers: as of `launch`.
        visible, placement, gpu_type, python_env, progress, spark: as of `launch`.
        name: of the gang.
        acquire_timeout: how long it may wait for its executors, on entry and again where some
            were lost.
        idle_timeout: without a launch for so long it lets them go, and the next launch acquires
            them again; None to keep them until the end.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    told = warnings_of(given.python_env)
    environment = carried(os.environ)
    plan = plan_of(given.spec, given.application, "<run_id>", told, environment=environment)
    return Gang(given, plan)


def _planned(given: Arguments, run_id: str) -> LaunchPlan:
    return plan_of(
        given.spec,
        given.application,
        run_id,
        given.warnings,
        given.data,
        given.foreseen.environment(os.environ),
    )


def _started(given: Arguments) -> Run:
    run_id = new_run_id(given.spec.name)
    planned = _planned(given, run_id)
    shape = planned.shape
    log.info(
        "launch asked for: %s of %d workers on %d executors, each of %d GPUs, %d cores and %d MiB",
        run_id,
        planned.spec.workers,
        planned.executors,
        shape.gpus,
        shape.cores,
        shape.heap_mib + shape.overhead_mib,
    )
    board = Board(run_id, planned.executors, planned.shape.gpus, given.progress)
    cancelled = threading.Event()
    leasing = functools.partial(leased, given.application.lease)
    background = Background(f"hopsgpu-{run_id}-record")
    work = functools.partial(execute, given, planned, board, cancelled, leasing, background)
    return Run(board, cancelled, work, functools.partial(start_daemon, f"hopsgpu-{run_id}"))
