"""A launch's arguments: declared once, checked before anything is started."""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hopsgpu.errors import ConfigError
from hopsgpu.interrupts import interrupts_noted
from hopsgpu.modules import PackedModules, module_roots, pack_modules
from hopsgpu.pickling import name_of, pickle_call
from hopsgpu.progress import Shielded, progress_of
from hopsgpu.spark.application import Application, application_of
from hopsgpu.spark.checks import check_gang
from hopsgpu.spec import GangSpec, GpuRequest
from hopsgpu.units import parse_duration, parse_memory
from hopsgpu.worker.channel import MOST_PAYLOAD
from hopsgpu.worker.context import VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Arguments:
    """A launch's arguments, checked.

    Attributes:
        spec: the gang asked for.
        call: the pickled function with its arguments.
        modules: the user's own modules.
        progress: what is shown.
        application: in which it runs.
    """

    spec: GangSpec
    call: bytes
    modules: PackedModules
    progress: Shielded
    application: Application


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
    acquire_timeout: str | float | datetime.timedelta | None = "10m",
    run_timeout: str | float | datetime.timedelta | None = None,
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
    if VARIABLE in os.environ:
        raise ConfigError("a rank cannot launch a gang of its own; call launch() at the driver")
    _refuse_later(
        parameter_servers=(parameter_servers, 0),
        placement=(placement, None),
        gpu_type=(gpu_type, None),
        visible=(visible, None),
        data=(data, None),
        run_timeout=(run_timeout, None),
        retries=(retries, 0),
        resume=(resume, None),
        python_env=(python_env, None),
    )
    if not callable(train_fn):
        raise ConfigError(f"train_fn={train_fn!r}: a function or another callable is wanted")
    spec = GangSpec(
        name=name if name is not None else _default_name(train_fn),
        workers=workers,
        gpus=GpuRequest(gpus_per_worker),  # type: ignore[arg-type]
        cores_per_worker=cores_per_worker,
        memory_per_worker=parse_memory(memory_per_worker, "memory_per_worker"),
        model=model,
        acquire_timeout=parse_duration(acquire_timeout, "acquire_timeout"),
        env_vars={} if env_vars is None else env_vars,
    )
    shown = progress_of(progress)
    positional, keywords = _positional(args), _keywords(kwargs)
    _check_call(train_fn, positional, keywords)
    call = pickle_call(train_fn, positional, keywords)
    modules = pack_modules(module_roots(train_fn))
    if len(call) + len(modules.archive) > MOST_PAYLOAD:
        raise ConfigError(
            f"train_fn with its arguments is {len(call)} bytes pickled, its modules are"
            f" {len(modules.archive)}; at most {MOST_PAYLOAD} together are accepted. Put data on"
            " the lake and read it in the ranks"
        )
    application = application_of(spark)
    check_gang(application.setting, spec.workers)
    return Arguments(spec, call, modules, shown, application)


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
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[Arguments, threading.Event], R]], Callable[P, R]]:
    """Gives a function of checked Arguments the signature that they are made from.

    Ctrl-C sets the event that the function gets, and is raised when the function is done.
    """

    def decorate(function: Callable[[Arguments, threading.Event], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with interrupts_noted() as interrupted:
                result = function(arguments(*args, **kwargs), interrupted)
            if interrupted.is_set():
                raise KeyboardInterrupt
            return result

        signature = inspect.signature(arguments)
        returns = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return call

    return decorate
