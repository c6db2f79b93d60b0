"""The arguments of launches and held gangs: options, checked before anything starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hopsgpu.attempts.rank_call import PackedFunction
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.dataframe_writer import check_data, is_frame
from hopsgpu.core.spec import GangSpec
from hopsgpu.data.argument import Datasets, datasets_of
from hopsgpu.display.progress import Shielded, progress_of
from hopsgpu.errors import ConfigError
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.launcher.function_shipping import (
    PickledFunction,
    check_accepts,
    keywords,
    pack_function,
    pickle_function,
    positional,
)
from hopsgpu.launcher.options import (
    Duration,
    HeldRunOptions,
    HoldOptions,
    LaunchOptions,
    RunOptions,
    check_gpu_idle_timeout,
)
from hopsgpu.launcher.scripts import ReadyScript, Script, ScriptRequest, find_script, request_of
from hopsgpu.packaging.code_variables import carried_variables
from hopsgpu.packaging.modules import pack_modules
from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.packaging.preload import likely_imports
from hopsgpu.packaging.provenance import Provenance, provenance_of, provenance_of_script
from hopsgpu.packaging.python_env.builder import RequestedEnv, warnings_of
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.script import KeptDirectories
from hopsgpu.rank.context import VARIABLE
from hopsgpu.rank.rank_script import RankScript
from hopsgpu.tracking.mlflow import Tracking, tracking_to
from hopsgpu.units import parse_duration


@dataclass(frozen=True, kw_only=True)
class GangArguments:
    """The arguments of a gang, checked.

    Attributes:
        python_env: the Python environment of the ranks, still to be built or existing; or None.
    """

    spec: GangSpec
    application: GangApplication
    python_env: RequestedEnv | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        return warnings_of(self.python_env)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the ranks get besides the user's `env_vars`, which override them."""
        return carried_variables(os.environ)


@dataclass(frozen=True, kw_only=True)
class HeldArguments(GangArguments):
    """The arguments of a held gang, checked.

    Attributes:
        idle_timeout: seconds without a launch after which the gang is released, or None.
        frameworks: packages that its executors import while they wait, for any launch.
    """

    idle_timeout: float | None
    frameworks: tuple[str, ...]
    progress: Shielded


@dataclass(frozen=True, kw_only=True)
class FunctionArguments(GangArguments):
    """The arguments of a gang that runs a function, checked."""

    function: PackedFunction
    provenance: Provenance

    @property
    def warnings(self) -> tuple[str, ...]:
        modules, foreseen = self.function.modules, self.function.foreseen
        return (*modules.warnings, *super().warnings, *foreseen.warnings)

    @property
    def environment(self) -> Mapping[str, str]:
        return self.function.foreseen.environment(os.environ)


@dataclass(frozen=True, kw_only=True)
class Arguments(FunctionArguments):
    """The arguments of a launch, checked.

    Attributes:
        script: the script that the function runs; None for the user's own function.
        kept: the script's directories that are kept.
    """

    progress: Shielded
    tracking: Tracking | None = None
    data: Datasets | None = None
    script: Script | None = None
    kept: KeptDirectories = KeptDirectories()

    @property
    def warnings(self) -> tuple[str, ...]:
        script = () if self.script is None else self.script.warnings
        return (*script, *super().warnings)


@dataclass(frozen=True, kw_only=True)
class ItemArguments(FunctionArguments):
    """The checked arguments of a run that places items on executors: a search or a score.

    Attributes:
        terms: how many items run at a time, and on how many slots.
        timeout: seconds that the run may take, or None.
    """

    terms: PlacementTerms
    timeout: float | None

    def function_with(self, parameters: Mapping[str, Any]) -> PackedFunction:
        """Return the function with further keyword arguments.

        Raises:
            ConfigError: a parameter cannot be pickled; the message names it.
        """
        call = self.function.call + pickle_call(None, (), parameters)
        return replace(self.function, call=call)


def item_arguments(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    call: PickledFunction,
    gang: GangArguments,
    terms: PlacementTerms,
    timeout: float | None,
    interrupted: threading.Event | None,
) -> ItemArguments:
    """Pack the function of a search's trials or of a score's ranks.

    Args:
        function: the user's function.
        kwargs: the keyword arguments that it gets each time.
        call: the function, or a function that calls it, with its arguments.

    Raises:
        ConfigError, KeyboardInterrupt: as `pack_function`.
    """
    packed_function = pack_function(
        function, call, gang.application, gang.spec.env_vars, interrupted
    )
    return ItemArguments(
        **vars(gang),
        function=packed_function,
        terms=terms,
        timeout=timeout,
        provenance=provenance_of(function, (), kwargs, packed_function.modules),
    )


def arguments(options: LaunchOptions, interrupted: threading.Event | None = None) -> Arguments:
    """Check the options of a launch.

    Raises:
        ConfigError: an option is wrong; the message names it, its value and what is accepted.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    refuse_nested()
    of_run, python_env = options.of_run(), options.recipe()
    spec = options.gang_of(**of_run)
    return _arguments(
        options,
        lambda: gang_in(application_of(options.spark), spec, python_env, options.gpu_idle_timeout),
        interrupted,
    )


def launch_on(
    held: HeldArguments, options: HeldRunOptions, interrupted: threading.Event | None = None
) -> Arguments:
    """Check the options of a launch on a held gang, as `arguments` does.

    Raises:
        ConfigError: an option is wrong; the message names it, its value and what is accepted.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    of_run = options.of_run()
    check_gpu_idle_timeout(
        options.gpu_idle_timeout,
        held.spec.gpus.per_worker,
        "a gang held with gpus_per_worker=0",
        "run",
    )
    spec = _with_gpu_idle_timeout(
        replace(held.spec, **of_run), held.application, options.gpu_idle_timeout
    )
    gang = GangArguments(spec=spec, application=held.application, python_env=held.python_env)
    return _arguments(options, lambda: gang, interrupted)


def _arguments(
    options: RunOptions,
    find_gang: Callable[[], GangArguments],
    interrupted: threading.Event | None,
) -> Arguments:
    data, kept = datasets_of(options.data, is_frame), options.kept_directories
    progress = progress_of(options.progress)
    if options.is_script:
        return _script_arguments(options, find_gang, data, kept, progress)
    train_fn: Any = options.train_fn
    args, kwargs = positional(options.args), keywords(options.kwargs)
    check_accepts(train_fn, args, kwargs)
    call = pickle_function(train_fn, args, kwargs)
    # Only now, so that a wrong option is reported even if there is no session.
    gang = find_gang()
    function = pack_function(train_fn, call, gang.application, gang.spec.env_vars, interrupted)
    check_data(data, gang.application)
    return Arguments(
        **vars(gang),
        function=function,
        progress=progress,
        provenance=provenance_of(train_fn, args, kwargs, function.modules),
        tracking=_tracking(gang.application),
        data=data,
    )


def _script_arguments(
    options: RunOptions,
    find_gang: Callable[[], GangArguments],
    data: Datasets | None,
    kept: KeptDirectories,
    progress: Shielded,
) -> Arguments:
    args = positional(options.args)
    if keywords(options.kwargs):
        raise ConfigError(
            f"kwargs={options.kwargs!r} with a script: a script has no keyword arguments; pass the"
            " words of its command line in args, as args=['--epochs', '3']"
        )
    target: Any = options.train_fn
    if not isinstance(target, (ScriptRequest, ReadyScript)):
        target = request_of(target, options.working_dir)
    gang = find_gang()
    limit = gang.application.working_dir_limit
    script = target
    if isinstance(target, ScriptRequest):
        script = find_script(target, args, kept, limit)
    check_data(data, gang.application)
    function = PackedFunction(
        pickle_call(RankScript(script.call), (), {}),
        pack_modules([]),
        script.foreseen,
        script.needs,
    )
    return Arguments(
        **vars(gang),
        function=function,
        progress=progress,
        provenance=provenance_of_script(script.call.target, script.call.args, script.content),
        tracking=_tracking(gang.application),
        data=data,
        script=script,
        kept=kept,
    )


def held_arguments(options: HoldOptions) -> HeldArguments:
    """Check the options of a held gang.

    Raises:
        ConfigError: an option is wrong; the message names it, its value and what is accepted.
    """
    refuse_nested()
    python_env = options.recipe()
    spec = options.gang_of(name="gang" if options.name is None else options.name)
    idle = parse_duration(options.idle_timeout, "idle_timeout")
    progress, application = progress_of(options.progress), application_of(options.spark)
    # A wrong setting is refused before the gang is acquired, not only at its first launch.
    _tracking(application)
    gang = gang_in(application, spec, python_env)
    return HeldArguments(
        **vars(gang), idle_timeout=idle, frameworks=likely_imports(), progress=progress
    )


def gang_in(
    application: GangApplication,
    spec: GangSpec,
    python_env: RequestedEnv | None,
    gpu_idle_timeout: Duration = None,
) -> GangArguments:
    """Return a gang with what is requested, else with what the application has.

    `hopsgpu submit` can set these for the application.

    Args:
        spec: the gang; its `gpu_idle_timeout` is the requested one in seconds.
        gpu_idle_timeout: the request, which tells "off" from none.

    Raises:
        ConfigError: those of the application are invalid, or its executors run in another image
            than requested.
    """
    default = application.option("python_env")
    if python_env is None and default:
        python_env = recipe_for(default)
    if spec.image is not None:
        application.check_image(spec.image)
    spec = replace(
        spec,
        python_env=None if python_env is None else python_env.name,
        image=application.image,
    )
    spec = _with_gpu_idle_timeout(spec, application, gpu_idle_timeout)
    return GangArguments(spec=spec, application=application, python_env=python_env)


def _with_gpu_idle_timeout(
    spec: GangSpec, application: GangApplication, requested: Duration
) -> GangSpec:
    """Return the gang with the application's gpu_idle_timeout if none is requested; not on CPUs."""
    if requested is not None or not spec.gpus.per_worker:
        return spec
    return replace(spec, gpu_idle_timeout=application.gpu_idle_timeout)


def refuse_nested() -> None:
    """Raise ConfigError if this process is a rank."""
    if VARIABLE in os.environ:
        raise ConfigError("a rank cannot launch a gang of its own; call launch() at the driver")


def _tracking(application: GangApplication) -> Tracking | None:
    return tracking_to(application.option("mlflow"), application.option("mlflow.experiment"))
