"""A launch's arguments: declared once, checked before anything is started."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hopsgpu.errors import ConfigError
from hopsgpu.frameworks.preload import likely_preloads, preloads
from hopsgpu.interrupts import interrupts_noted
from hopsgpu.modules import PackedModules, Packer, module_roots
from hopsgpu.pickling import name_of, pickle_call
from hopsgpu.progress import Shielded, progress_of
from hopsgpu.run import Run
from hopsgpu.spark.application import Application, application_of
from hopsgpu.spec import GangSpec, GpuRequest
from hopsgpu.units import parse_duration, parse_memory
from hopsgpu.worker.channel import MOST_PAYLOAD
from hopsgpu.worker.context import VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Arguments:
    """A launch's arguments, checked.

    Attributes:
        spec: the gang asked for.
        call: the pickled function with its arguments.
        modules: the user's own modules.
        frameworks: packages that the function imports and that are slow to import.
        progress: what is shown.
        application: in which it runs.
    """

    spec: GangSpec
    call: bytes
    modules: PackedModules
    frameworks: tuple[str, ...]
    progress: Shielded
    application: Application


@dataclass(frozen=True)
class HeldArguments:
    """What a gang is that is held for several launches, checked.

    Attributes:
        spec: the gang asked for.
        idle_timeout: seconds without a launch after which it lets go, or None.
        frameworks: packages that its executors import while they wait, for whichever launch.
        progress: what is shown while it waits.
        application: in which it runs.
        packer: of the modules of its launches.
    """

    spec: GangSpec
    idle_timeout: float | None
    frameworks: tuple[str, ...]
    progress: Shielded
    application: Application
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
    """Checks a launch's arguments; `launcher.launch` says what each means.

    Raises:
        ConfigError: naming the argument, what was given and what is accepted.
    """
    _refuse_nested()
    _refuse_later(
        data=(data, None),
        resume=(resume, None),
        python_env=(python_env, None),
    )
    _check_callable(train_fn)
    spec = _gang_spec(
        gpus_per_worker,
        memory_per_worker,
        acquire_timeout,
        name=name if name is not None else _default_name(train_fn),
        workers=workers,
        cores_per_worker=cores_per_worker,
        placement=placement,
        gpu_type=gpu_type,
        parameter_servers=parameter_servers,
        visible=visible,
        model=model,
        run_timeout=parse_duration(run_timeout, "run_timeout"),
        retries=retries,
        env_vars={} if env_vars is None else env_vars,
    )
    shown = progress_of(progress)
    call, modules = _packed(Packer(), train_fn, args, kwargs)
    frameworks = preloads(train_fn, modules)
    return Arguments(spec, call, modules, frameworks, shown, application_of(spark))


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
    """Checks the arguments of `launcher.hold`, which says what each means.

    Raises:
        ConfigError: naming the argument, what was given and what is accepted.
    """
    _refuse_nested()
    _refuse_later(python_env=(python_env, None))
    spec = _gang_spec(
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
    return HeldArguments(
        spec, idle, likely_preloads(), progress_of(progress), application_of(spark)
    )


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
    env_vars: Mapping[str, str] | None = None,
    progress: Any = None,
) -> Arguments:
    """Checks the arguments of a launch on a held gang, as `arguments` does.

    Raises:
        ConfigError: naming the argument, what was given and what is accepted.
    """
    _refuse_later(data=(data, None))
    _check_callable(train_fn)
    spec = dataclasses.replace(
        held.spec,
        name=name if name is not None else _default_name(train_fn),
        model=model,
        run_timeout=parse_duration(run_timeout, "run_timeout"),
        retries=retries,
        env_vars={} if env_vars is None else env_vars,
    )
    shown = progress_of(progress)
    call, modules = _packed(held.packer, train_fn, args, kwargs)
    return Arguments(spec, call, modules, preloads(train_fn, modules), shown, held.application)


def _gang_spec(gpus: Any, memory: str | int, timeout: Duration, **rest: Any) -> GangSpec:
    """A GangSpec from GPUs per worker, memory and duration as users write them."""
    return GangSpec(
        gpus=GpuRequest(gpus),
        memory_per_worker=parse_memory(memory, "memory_per_worker"),
        acquire_timeout=parse_duration(timeout, "acquire_timeout"),
        **rest,
    )


def _refuse_nested() -> None:
    if VARIABLE in os.environ:
        raise ConfigError("a rank cannot launch a gang of its own; call launch() at the driver")


def _check_callable(train_fn: object) -> None:
    if not callable(train_fn):
        raise ConfigError(f"train_fn={train_fn!r}: a function or another callable is wanted")


def _packed(
    packer: Packer, train_fn: Callable[..., Any], args: object, kwargs: object
) -> tuple[bytes, PackedModules]:
    """The pickled function with its arguments, and the user's modules that it needs."""
    positional, keywords = _positional(args), _keywords(kwargs)
    _check_call(train_fn, positional, keywords)
    call = pickle_call(train_fn, positional, keywords)
    modules = packer.pack(module_roots(train_fn))
    if len(call) + len(modules.archive) > MOST_PAYLOAD:
        raise ConfigError(
            f"train_fn with its arguments is {len(call)} bytes pickled, its modules are"
            f" {len(modules.archive)}; at most {MOST_PAYLOAD} together are accepted. Put data on"
            " the lake and read it in the ranks"
        )
    return call, modules


def _refuse_later(**given: tuple[object, object]) -> None:
    for name, (value, default) in given.items():
        if value is not default and (type(value) is not type(default) or value != default):
            raise ConfigError(f"{name}={value!r} is not available yet; leave it at {default!r}")


def _positional(args: object) -> tuple[Any, ...]:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ConfigError(f"args={args!r}: a tuple or list of the function's arguments is wanted")
    return tuple(args)


def _keywords(kwargs: object) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(f"kwargs={kwargs!r}: a mapping of argument names to values is wanted")
    return kwargs


def _check_call(
    train_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(train_fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"train_fn={name_of(train_fn)}{signature} does not take these args and kwargs: {error}"
        ) from error


def _default_name(train_fn: Callable[..., Any]) -> str:
    letters = "".join(c if c.isalnum() else "-" for c in name_of(train_fn).rpartition(".")[2])
    return letters.strip("-")[:40] or "run"


def takes(
    checked: Callable[P, A],
) -> Callable[[Callable[[A, threading.Event], R]], Callable[P, R]]:
    """Gives a function of checked arguments the signature that they are made from.

    Ctrl-C sets the event that the function gets, and is raised when the function is done.
    """

    def decorate(function: Callable[[A, threading.Event], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with interrupts_noted() as interrupted:
                result = function(checked(*args, **kwargs), interrupted)
            if interrupted.is_set():
                if isinstance(result, Run):  # its handle is lost with this
                    result.cancel()
                raise KeyboardInterrupt
            return result

        signature = inspect.signature(checked)
        returns = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return call

    return decorate
