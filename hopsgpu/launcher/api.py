"""The entry points `launch`, `submit`, `plan` and `hold`."""

from __future__ import annotations

import functools
import logging
import os
import threading

from hopsgpu.backends.grant import leased
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.launcher.active_run import ActiveRun
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.controller import execute
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.launcher.held_gang import Gang
from hopsgpu.launcher.interrupts import takes, wait_for
from hopsgpu.launcher.options import Arguments, HeldArguments, arguments, held_arguments
from hopsgpu.launcher.planner import new_run_id, plan_of
from hopsgpu.launcher.run import Run
from hopsgpu.launcher.status_board import Board
from hopsgpu.packaging.code_variables import carried
from hopsgpu.packaging.python_env.builder import warnings_of

log = logging.getLogger(__name__)


@takes(arguments)
def plan(given: Arguments, interrupted: threading.Event) -> LaunchPlan:
    """Return what `launch` would do with these arguments; request no executors and run nothing.

    This reads from the ResourceManager the state of the nodes and of the application's queue.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    return _planned(given, "<run_id>")


@takes(arguments)
def submit(given: Arguments, interrupted: threading.Event) -> Run:
    """Start the same as `launch`, and return a Run at once.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    return _started(given)


@takes(arguments)
def launch(given: Arguments, interrupted: threading.Event) -> GangResult:
    """Train on a gang of GPUs, and release them.

    The gang gets all executors or keeps none; each rank runs `train_fn(*args, **kwargs)` in a fresh
    process with PyTorch's environment. The call returns once the ResourceManager no longer lists
    the executors.

    Args:
        train_fn: any callable that cloudpickle can pickle; every rank runs it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        workers: the world size.
        gpus_per_worker: number of whole GPUs of each rank; 0 for a gang on CPUs; 1/k (0.5, say) for
            k ranks of one container on one GPU, which NCCL does not connect (gloo does).
        cores_per_worker: cores of each rank; None for the nodes' share of cores per GPU, less one.
        memory_per_worker: memory that a rank may use together with its child processes, as "4g" or
            in bytes; a rank that uses more is killed, which counts as its failure.
        parameter_servers: number of processes without GPU, besides the workers, that also run
            `train_fn`, with the role "ps"; rank 0 is then TensorFlow's chief, and when it has
            returned the others are stopped as successful.
        visible: "container" lets a rank see the GPUs of its container, in the order of LOCAL_RANK;
            "rank" only its own; None is "container" if `gpus_per_worker` is 1, else "rank".
        placement: "pack" for as many ranks as fit into one container (the largest number that
            divides `workers`), on the fullest node with room; "spread" for one rank on each
            node; None to leave it to YARN.
        gpu_type: words of the GPUs' product name, in any case, as "A100"; None for any GPU. The
            gang requests nodes that have this type, and a GPU of another type gets no rank.
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
        name: name of the run; by default the function's name.
        acquire_timeout: how long the gang may wait for its executors; None for no bound.
        run_timeout: how long the ranks may take in one attempt; None for no bound.
        retries: how often the gang may start again after a failure of a rank or of the
            infrastructure; `context().attempt` counts the starts. Executors that still work are
            kept. The same exception in all ranks at once is an error of the code, and is not
            retried unless `spark.hopsgpu.retry` is "all".
        resume: id of an earlier run, whose checkpoints `context().latest_checkpoint()` finds as
            long as this run has none of its own.
        python_env: packages that the ranks import before those of the executors' Python, or a whole
            environment that they run in: a list of packages, in pip's syntax; the path of a
            requirements file, of a directory (modules, or a virtual or conda environment) or of
            a packed archive; or the name of a conda environment. It is built before GPUs are
            requested, kept on the lake for the next launch, and unpacked once on each node.
        env_vars: environment variables of every rank. They may include `OMP_NUM_THREADS` and
            `LOKY_MAX_CPU_COUNT`, which are the number of the rank's cores by default.
        progress: "rich" for a live display, in a notebook's cell or in the terminal; "lines" for
            plain lines; None to choose between these; "off" for nothing; or a callable that
            receives a RunStatus at each change.
        spark: the session; the active one by default.

    Returns:
        GangResult with the value of every rank, at most 100 MiB pickled each; larger results
        belong into `context().model_dir`.

    Raises:
        ConfigError: an argument or setting cannot work, or the data has fewer rows than ranks, no
            Parquet files, or a layout that cannot be read; no GPU was requested.
        CapacityError: YARN can never grant the gang, on its nodes, in the queue or to the user;
            nothing was requested.
        GangTimeout: not all executors arrived in time; the message says who holds the rest.
        RankFailed: a rank failed (the error is the first failure by time), or ranks took longer
            than `run_timeout`; the others were stopped.
        DiscoveryError: two containers were given the same GPU.
        StoreError: the data cannot be read, or the lake refused writes to the logs' or the models'
            directory, before any GPU was requested; or the lake refused the model, or two ranks
            left different files of one name: then `error.result.values` has what the ranks
            returned.
        KeyboardInterrupt: Ctrl-C was pressed; the run was cancelled and its GPUs are released.
    """
    return wait_for(_started(given), interrupted)


@takes(held_arguments)
def hold(given: HeldArguments, interrupted: threading.Event) -> Gang:
    """Hold a gang for several launches: `with hopsgpu.hold(workers=4) as gang: gang.launch(...)`.

    Args:
        workers: the world size.
        gpus_per_worker, cores_per_worker, memory_per_worker, parameter_servers: as for `launch`.
        visible, placement, gpu_type, python_env, progress, spark: as for `launch`.
        name: name of the gang.
        acquire_timeout: how long the gang may wait for its executors, on entry and again after
            some were lost.
        idle_timeout: after this time without a launch the gang releases its executors, and the
            next launch acquires them again; None to keep them until the end.

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
    active = ActiveRun(planned, given.application, board, cancelled, background)
    work = functools.partial(execute, given, active, leasing)
    return Run(board, cancelled, work, functools.partial(start_daemon, f"hopsgpu-{run_id}"))
