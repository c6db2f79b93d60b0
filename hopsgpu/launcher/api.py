"""The entry points `launch`, `submit`, `plan` and `hold`."""

from __future__ import annotations

import functools
import logging
import threading

from hopsgpu.core.spec import LaunchPlan
from hopsgpu.launcher.arguments import Arguments, arguments, held_arguments
from hopsgpu.launcher.elastic_board import ElasticBoard
from hopsgpu.launcher.elastic_gang import ElasticGangRun
from hopsgpu.launcher.gang_run import GangRun
from hopsgpu.launcher.held_gang import Gang
from hopsgpu.launcher.interrupts import takes, wait_for
from hopsgpu.launcher.options import HoldOptions, LaunchOptions
from hopsgpu.launcher.planner import new_run_id, plan_of
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.run import Run
from hopsgpu.runs.run_start import start_run
from hopsgpu.runs.status_board import GangBoard

log = logging.getLogger(__name__)


@takes(LaunchOptions, is_documented=False)
def plan(options: LaunchOptions, interrupted: threading.Event) -> LaunchPlan:
    """Return what `launch` would do with these arguments; request no executors and run nothing.

    This reads from the ResourceManager the state of the nodes and of the application's queue.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    checked = arguments(options, interrupted)
    return plan_of(checked, "<run_id>", checked.data)


@takes(LaunchOptions, is_documented=False)
def submit(options: LaunchOptions, interrupted: threading.Event) -> Run:
    """Start the same as `launch`, and return a Run at once.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    return _start(arguments(options, interrupted))


@takes(LaunchOptions)
def launch(options: LaunchOptions, interrupted: threading.Event) -> GangResult:
    """Train on a gang of GPUs, and release them.

    The gang gets all executors or keeps none; each rank runs `train_fn(*args, **kwargs)` in a fresh
    process with PyTorch's environment. Instead of a function, every rank may run a script, whose
    exit code is the rank's value. The call returns once the ResourceManager no longer lists
    the executors.

    Returns:
        GangResult with the value of every rank, at most 100 MiB pickled each; larger results
        belong into `context().model_dir`.

    Raises:
        ConfigError: an argument or setting cannot work, or the data has fewer rows than ranks, no
            Parquet files, or a layout that cannot be read; no GPU was requested.
        CapacityError: YARN can never grant the gang, on its nodes, in the queue or to the user;
            nothing was requested.
        GangTimeout: not all executors arrived in time; the message says who holds the rest.
        RankFailed: a rank failed (the error is the first failure by time); the others were stopped.
        RunTimeout: ranks took longer than `run_timeout`; all were stopped. A RunTimeout is a
            RankFailed.
        GpusIdle: all GPUs idled for `gpu_idle_timeout`; the ranks were stopped. A GpusIdle is a
            RankFailed.
        DiscoveryError: two containers were given the same GPU.
        StoreError: the data cannot be read, or the lake refused writes to the logs' or the models'
            directory, before any GPU was requested; or the lake refused the model, or two ranks
            left different files of one name: then `error.result.values` has what the ranks
            returned.
        KeyboardInterrupt: Ctrl-C was pressed; the run was cancelled and its GPUs are released.
    """
    return wait_for(_start(arguments(options, interrupted)), interrupted)


@takes(HoldOptions)
def hold(options: HoldOptions, interrupted: threading.Event) -> Gang:
    """Hold a gang for several launches: `with hopsgpu.hold(workers=4) as gang: gang.launch(...)`.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    checked = held_arguments(options)
    return Gang(checked, plan_of(checked, "<run_id>"))


def _start(checked: Arguments) -> Run:
    run_id = new_run_id(checked.spec.name)
    planned = plan_of(checked, run_id, checked.data)
    spec, shape = planned.spec, planned.shape
    log.info(
        "%s: launch of %d workers on %d executors, each with %d GPUs, %d cores and %d MiB",
        run_id,
        spec.workers,
        planned.executors,
        shape.gpus,
        shape.cores,
        shape.heap_mib + shape.overhead_mib,
    )
    shown = run_id, planned.executors, shape.gpus, checked.progress
    if spec.is_elastic:
        elastic_board = ElasticBoard(*shown, (spec.least, spec.workers))
        make_elastic = functools.partial(ElasticGangRun, checked)
        return start_run(Run, planned, checked.application, elastic_board, make_elastic)
    make_body = functools.partial(GangRun, checked)
    return start_run(Run, planned, checked.application, GangBoard(*shown), make_body)
