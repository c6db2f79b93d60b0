"""launch, submit and plan: from arguments to a plan, and from the plan to a run."""

from __future__ import annotations

import datetime
import functools
import os
import secrets
import threading
from collections.abc import Callable

from pyspark import InheritableThread

from hopsgpu.arguments import Arguments, arguments, takes
from hopsgpu.execution import execute
from hopsgpu.interrupts import wait_for
from hopsgpu.results import GangResult
from hopsgpu.run import Board, Run
from hopsgpu.spark.application import Application
from hopsgpu.spec import LaunchPlan, shape_of
from hopsgpu.stores.lake import Lake
from hopsgpu.yarn.resource_manager import Amount, check_container, cores_per_gpu


@takes(arguments)
def plan(given: Arguments, interrupted: threading.Event) -> LaunchPlan:
    """What `launch` would do with these arguments; asks YARN for nothing and runs nothing.

    Asks the ResourceManager for its nodes and its largest container.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    return _plan(given, run_id="<run_id>")


@takes(arguments)
def submit(given: Arguments, interrupted: threading.Event) -> Run:
    """As `launch`, and returns at once with a Run.

    Raises:
        ConfigError, CapacityError: as `launch`.
    """
    run = _started(given)
    if interrupted.is_set():
        run.cancel()
    return run


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
        gpus_per_worker: GPUs of each rank, a whole number of at least 1.
        cores_per_worker: cores of each rank; None for the nodes' share of cores per GPU.
        memory_per_worker: what a rank may use, as "4g" or bytes.
        model: name under which what rank 0 leaves in `context().model_dir` is published.
        name: of the run, the function's name by default.
        acquire_timeout: how long the gang may wait for its executors; None for no bound.
        env_vars: environment variables of every rank; `OMP_NUM_THREADS`, by default the rank's
            cores, may be among them.
        progress: None or "lines" for plain lines, "off" for nothing.
        spark: the session; the active one by default.

    Returns:
        GangResult with the value of every rank, at most 100 MiB pickled each; larger results
        belong into `context().model_dir`.

    Raises:
        ConfigError: an argument or setting that cannot work; nothing was started.
        CapacityError: an executor so large that YARN can never grant it; nothing was started.
        GangTimeout: not all executors came in time.
        RankFailed: the first failure of a rank; the others were stopped.
        DiscoveryError: two containers were given the same GPU.
        StoreError: the lake refused logs' directory or model.
        KeyboardInterrupt: Ctrl-C; the run was cancelled and its GPUs are back.
    """
    return wait_for(_started(given), interrupted)


def _plan(given: Arguments, run_id: str) -> LaunchPlan:
    spec, application = given.spec, given.application
    nodes = application.manager.nodes()
    shape = shape_of(spec, cores_per_gpu(nodes))
    container = Amount(shape.gpus, shape.cores, shape.heap_mib + shape.overhead_mib)
    check_container(container, application.manager.largest_container(), nodes)
    root = Lake(lake_root(application)).url
    paths = {"root": root, "run": f"{root}/runs/{run_id}"}
    if spec.model is not None:
        paths["model"] = f"{root}/models/{spec.model}"
    return LaunchPlan(
        spec=spec,
        executors=spec.workers,
        ranks_per_executor=1,
        shape=shape,
        queue=application.setting("spark.yarn.queue") or "default",
        environment={"OMP_NUM_THREADS": str(shape.cores), **spec.env_vars},
        paths=paths,
        warnings=given.modules.warnings,
    )


def lake_root(application: Application) -> str:
    """Where runs and models go: spark.hopsgpu.root, HOPSGPU_ROOT, or the user's directory."""
    named = application.setting("spark.hopsgpu.root") or os.environ.get("HOPSGPU_ROOT")
    if named:
        return named.rstrip("/")
    jvm = application.jvm
    files = (jvm.hadoop("fs.defaultFS") or "file:///").rstrip("/")
    return f"{files}/user/{jvm.user()}/hopsgpu"


def _new_run_id(name: str) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _started(given: Arguments) -> Run:
    run_id = _new_run_id(given.spec.name)
    planned = _plan(given, run_id)
    board = Board(run_id, planned.executors, planned.shape.gpus, given.progress)
    cancelled = threading.Event()
    work = functools.partial(execute, given, planned, board, cancelled)

    def start_thread(body: Callable[[], None]) -> None:
        # A daemon: a script that fails must not be kept alive, with its GPUs, by its run.
        InheritableThread(target=body, name=f"hopsgpu-{run_id}", daemon=True).start()

    return Run(board, cancelled, work, start_thread)
