"""The arguments of a launch: declared once, and checked before anything starts."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hopsgpu.backends.backend import Site
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.dataframe_writer import check_data, is_frame
from hopsgpu.core.spec import GangSpec, GpuRequest
from hopsgpu.data.argument import Datasets, datasets_of
from hopsgpu.display.progress import Shielded, progress_of
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.function_shipping import needs_of, packed_modules, pickled
from hopsgpu.packaging.import_scan import ImportedModules
from hopsgpu.packaging.modules import PackedModules, Packer
from hopsgpu.packaging.pickling import name_of
from hopsgpu.packaging.preload import StaticFindings, likely_preloads, scan_function
from hopsgpu.packaging.provenance import Provenance, provenance_of
from hopsgpu.packaging.python_env.builder import Wanted, warnings_of
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.rank.context import VARIABLE
from hopsgpu.storage.names import file_name, model_name
from hopsgpu.tracking.mlflow import Tracking, tracking_to
from hopsgpu.units import parse_duration, parse_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Arguments:
    """A launch's arguments, checked.

    Attributes:
        spec: the requested gang.
        call: the pickled function with its arguments.
        modules: the user's own modules.
        foreseen: facts that the function's code reveals in advance.
        progress: the display.
        application: the application in which the launch runs.
        provenance: provenance of the model to publish, or of the run in MLflow; None if there is
            neither.
        tracking: the MLflow experiment in which the run is logged too, or None.
        data: the data that the ranks read, or None.
        python_env: the Python environment of the ranks, still to be built or existing; or None.
        needs: top-level modules that the ranks' Python must have to unpickle the call.
    """

    spec: GangSpec
    call: bytes
    modules: PackedModules
    foreseen: StaticFindings
    progress: Shielded
    application: Site
    provenance: Provenance | None = None
    tracking: Tracking | None = None
    data: Datasets | None = None
    python_env: Wanted | None = None
    needs: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about modules, Python environment and function, for people."""
        return (*self.modules.warnings, *warnings_of(self.python_env), *self.foreseen.warnings)


@dataclass(frozen=True)
class HeldArguments:
    """The arguments of a held gang, checked.

    Attributes:
        spec: the requested gang.
        idle_timeout: seconds without a launch after which the gang is released, or None.
        frameworks: packages that its executors import while they wait, for any launch.
        progress: the display while it waits.
        application: the application in which it runs.
        python_env: the Python environment of the ranks of all its launches; or None.
        packer: packs the modules of its launches.
    """

    spec: GangSpec
    idle_timeout: float | None
    frameworks: tuple[str, ...]
    progress: Shielded
    application: Site
    python_env: Wanted | None = None
    packer: Packer = field(default_factory=Packer)


Duration = str | float | datetime.timedelta | None


def arguments(
    train_fn: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 1,
    gpus_per_worker: float = 1,
    cores_per_worker: int | None = None,
    memory_per_worker: str | int = "4g",
    parameter_servers: int = 0,
    placement: str | None = None,
    gpu_type: str | None = None,
    visible: str | None = None,
    data: Any = None,
    model: str | None = None,
    name: str | None = None,
    acquire_timeout: Duration = "10m",
    run_timeout: Duration = None,
    retries: int = 0,
    resume: str | None = None,
    python_env: Any = None,
    env_vars: Mapping[str, str] | None = None,
    progress: Any = None,
    spark: SparkSession | None = None,
) -> Arguments:
    """Check the arguments of a launch, which `launcher.api.launch` describes.

    Raises:
        ConfigError: an argument is wrong; the message names it, its value and what is accepted.
    """
    refuse_nested()
    check_callable(train_fn)
    datasets = datasets_of(data, is_frame)
    wanted: Wanted | None = None if python_env is None else recipe_for(python_env)
    spec = gang_spec(
        gpus_per_worker,
        memory_per_worker,
        acquire_timeout,
        name=name if name is not None else default_name(train_fn),
        workers=workers,
        cores_per_worker=cores_per_worker,
        placement=placement,
        gpu_type=gpu_type,
        parameter_servers=parameter_servers,
        visible=visible,
        model=None if model is None else model_name(model),
        resume=None if resume is None else file_name(resume, "resume"),
        run_timeout=parse_duration(run_timeout, "run_timeout"),
        retries=retries,
        env_vars={} if env_vars is None else env_vars,
    )
    shown = progress_of(progress)
    call, imported = _pickled(train_fn, args, kwargs)
    application = application_of(spark)
    modules = packed_modules(Packer(), train_fn, call, imported, application)
    check_data(datasets, application)
    spec, wanted = with_python(spec, wanted, application)
    tracking = _tracking(application)
    return Arguments(
        spec,
        call,
        modules,
        scan_function(train_fn, modules),
        shown,
        application,
        _provenance(model, tracking, train_fn, args, kwargs, modules),
        tracking,
        datasets,
        wanted,
        needs_of(imported, modules),
    )


def held_arguments(
    *,
    workers: int,
    gpus_per_worker: float = 1,
    cores_per_worker: int | None = None,
    memory_per_worker: str | int = "4g",
    parameter_servers: int = 0,
    placement: str | None = None,
    gpu_type: str | None = None,
    visible: str | None = None,
    name: str | None = None,
    acquire_timeout: Duration = "10m",
    idle_timeout: Duration = "10m",
    python_env: Any = None,
    progress: Any = None,
    spark: SparkSession | None = None,
) -> HeldArguments:
    """Check the arguments of a held gang, which `launcher.api.hold` describes.

    Raises:
        ConfigError: an argument is wrong; the message names it, its value and what is accepted.
    """
    refuse_nested()
    wanted: Wanted | None = None if python_env is None else recipe_for(python_env)
    spec = gang_spec(
        gpus_per_worker,
        memory_per_worker,
        acquire_timeout,
        name="gang" if name is None else name,
        workers=workers,
        cores_per_worker=cores_per_worker,
        placement=placement,
        gpu_type=gpu_type,
        parameter_servers=parameter_servers,
        visible=visible,
    )
    idle = parse_duration(idle_timeout, "idle_timeout")
    shown, application = progress_of(progress), application_of(spark)
    # A wrong setting is refused before the gang is acquired, not only at its first launch.
    _tracking(application)
    spec, wanted = with_python(spec, wanted, application)
    return HeldArguments(spec, idle, likely_preloads(), shown, application, wanted)


def launch_on(
    held: HeldArguments,
    train_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    model: str | None = None,
    name: str | None = None,
    run_timeout: Duration = None,
    retries: int = 0,
    resume: str | None = None,
    env_vars: Mapping[str, str] | None = None,
    progress: Any = None,
) -> Arguments:
    """Check the arguments of a launch on a held gang, as `arguments` does.

    Raises:
        ConfigError: an argument is wrong; the message names it, its value and what is accepted.
    """
    check_callable(train_fn)
    datasets = datasets_of(data, is_frame)
    spec = dataclasses.replace(
        held.spec,
        name=name if name is not None else default_name(train_fn),
        model=None if model is None else model_name(model),
        resume=None if resume is None else file_name(resume, "resume"),
        run_timeout=parse_duration(run_timeout, "run_timeout"),
        retries=retries,
        env_vars={} if env_vars is None else env_vars,
    )
    shown = progress_of(progress)
    call, imported = _pickled(train_fn, args, kwargs)
    modules = packed_modules(held.packer, train_fn, call, imported, held.application)
    check_data(datasets, held.application)
    tracking = _tracking(held.application)
    return Arguments(
        spec,
        call,
        modules,
        scan_function(train_fn, modules),
        shown,
        held.application,
        _provenance(model, tracking, train_fn, args, kwargs, modules),
        tracking,
        datasets,
        needs=needs_of(imported, modules),
    )


def with_python(
    spec: GangSpec, wanted: Wanted | None, application: Site
) -> tuple[GangSpec, Wanted | None]:
    """Return the gang with the requested Python environment, else with the application's.

    `hopsgpu submit` can set an environment for the application.
    """
    default = application.option("python_env")
    if wanted is None and default:
        wanted = recipe_for(default)
    return dataclasses.replace(spec, python_env=None if wanted is None else wanted.name), wanted


def gang_spec(gpus: Any, memory: str | int, timeout: Duration, **rest: Any) -> GangSpec:
    """Return a GangSpec from GPUs per worker, memory and duration as users write them."""
    return GangSpec(
        gpus=GpuRequest(gpus),
        memory_per_worker=parse_memory(memory, "memory_per_worker"),
        acquire_timeout=parse_duration(timeout, "acquire_timeout"),
        **rest,
    )


def refuse_nested() -> None:
    """Raise ConfigError if this process is a rank."""
    if VARIABLE in os.environ:
        raise ConfigError("a rank cannot launch a gang of its own; call launch() at the driver")


def check_callable(train_fn: object) -> None:
    """Raise ConfigError if this is not callable, or if a call would not run its body."""
    if not callable(train_fn):
        raise ConfigError(f"train_fn={train_fn!r}: must be a function or another callable")
    for one in (train_fn, type(train_fn).__call__):
        if inspect.iscoroutinefunction(one):
            problem = "is an async function: give one that calls asyncio.run() on it"
        elif inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            problem = "is a generator function (it has a yield), which a call does not run"
        else:
            continue
        raise ConfigError(f"train_fn={name_of(train_fn)} {problem}")


def _pickled(
    train_fn: Callable[..., Any], args: object, kwargs: object
) -> tuple[bytes, ImportedModules]:
    positional, named = _positional(args), keywords(kwargs)
    check_call(train_fn, positional, named)
    return pickled(train_fn, positional, named)


def _tracking(application: Site) -> Tracking | None:
    return tracking_to(application.option("mlflow"), application.option("mlflow.experiment"))


def _provenance(
    model: str | None,
    tracking: Tracking | None,
    train_fn: Callable[..., Any],
    args: object,
    kwargs: object,
    modules: PackedModules,
) -> Provenance | None:
    if model is None and tracking is None:
        return None
    return provenance_of(train_fn, _positional(args), keywords(kwargs), modules)


def _positional(args: object) -> tuple[Any, ...]:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ConfigError(f"args={args!r}: must be a tuple or list of the function's arguments")
    return tuple(args)


def keywords(kwargs: object) -> Mapping[str, Any]:
    """Return keyword arguments by name; raise ConfigError if this is no mapping of names."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(f"kwargs={kwargs!r}: must be a mapping of argument names to values")
    return kwargs


def check_call(
    train_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    all_known: bool = True,
) -> None:
    """Check that a function accepts arguments.

    Args:
        train_fn: the function.
        args, kwargs: the arguments.
        all_known: whether these are all arguments; if not, others may be added later.

    Raises:
        ConfigError: the function does not accept them.
    """
    try:
        signature = inspect.signature(train_fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        (signature.bind if all_known else signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"train_fn={name_of(train_fn)}{signature} does not take these args and kwargs: {error}"
        ) from error


def default_name(train_fn: Callable[..., Any]) -> str:
    """Return the default name of a run of this function."""
    letters = "".join(c if c.isalnum() else "-" for c in name_of(train_fn).rpartition(".")[2])
    return letters.strip("-")[:40] or "run"
