"""The arguments of a search, declared once and checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.backends.backend import Site
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.core.spec import GangSpec, GpuRequest, check_count
from hopsgpu.display.progress import ShieldedSearch, search_progress_of
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.function_shipping import needs_of, packed_modules
from hopsgpu.launcher.options import (
    Duration,
    check_call,
    check_callable,
    default_name,
    gang_spec,
    keywords,
    refuse_nested,
    with_python,
)
from hopsgpu.packaging.import_scan import ImportedModules, ImportRecorder
from hopsgpu.packaging.modules import PackedModules, Packer
from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.packaging.preload import StaticFindings, scan_function
from hopsgpu.packaging.provenance import code_digest
from hopsgpu.packaging.python_env.builder import Wanted
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.storage.names import file_name
from hopsgpu.tuning.scheduler import SearchTerms
from hopsgpu.tuning.space import check_optuna, check_space, pruner_of, sampler_of, values_of
from hopsgpu.units import parse_duration

if TYPE_CHECKING:
    import optuna

    from hopsgpu.tuning.sampler_thread import Direction
    from hopsgpu.tuning.space import Space

_DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True)
class SearchArguments:
    """The checked arguments of a search.

    Attributes:
        terms: how many trials run, and on how many slots.
        spec: the ranks of one executor, as a gang.
        space: the space of the trials' parameters.
        direction: "minimize" or "maximize".
        metric: name of the metric that is optimized, or None.
        sampler, pruner: Optuna's.
        seed: the given seed, or None.
        timeout: seconds that the search may take, or None.
        function: the pickled call of the function with the arguments that all trials share.
        modules: the user's own modules.
        code: a digest of the function and the user's modules.
        foreseen: what an analysis of the function's code found.
        progress: the display.
        application: the application in which the search runs.
        python_env: Python environment of the ranks, to be built or existing; or None.
        named: the given name, by which the search is resumed; None if the search gets a new run id.
        resume: id of the search to resume, which must exist; or None.
        needs: top-level modules that the ranks' Python must have to unpickle the function.
    """

    terms: SearchTerms
    spec: GangSpec
    space: Space
    direction: Direction
    metric: str | None
    sampler: optuna.samplers.BaseSampler
    pruner: optuna.pruners.BasePruner
    seed: int | None
    timeout: float | None
    function: bytes
    modules: PackedModules
    code: str
    foreseen: StaticFindings
    progress: ShieldedSearch
    application: Site
    python_env: Wanted | None
    named: str | None
    resume: str | None
    needs: tuple[str, ...] = ()

    @property
    def memory_share(self) -> float | None:
        """Return the share of a GPU's memory that a trial may use; None if it may use all of it."""
        return 1 / self.terms.slots if self.terms.slots > 1 else None

    def call(self, arguments: Mapping[str, Any]) -> bytes:
        """Return the pickled call of a trial with its arguments.

        Raises:
            ConfigError: an argument cannot be pickled; the message names it.
        """
        return self.function + pickle_call(None, (), arguments)


def search_arguments(
    train_fn: Callable[..., Any],
    space: Space,
    *,
    trials: int,
    max_concurrent: int,
    min_concurrent: int = 1,
    gpus_per_trial: float = 1,
    workers_per_trial: int = 1,
    direction: Direction = "minimize",
    metric: str | None = None,
    sampler: Any = None,
    pruner: Any = None,
    seed: int | None = None,
    search_timeout: Duration = None,
    trial_timeout: Duration = None,
    max_failures: int | None = None,
    name: str | None = None,
    resume: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    cores_per_worker: int | None = None,
    memory_per_worker: str | int = "4g",
    gpu_type: str | None = None,
    visible: str | None = None,
    acquire_timeout: Duration = "10m",
    python_env: Any = None,
    env_vars: Mapping[str, str] | None = None,
    progress: Any = None,
    spark: Any = None,
) -> SearchArguments:
    """Check a search's arguments, which `search.search` documents.

    Raises:
        ConfigError: an argument is invalid; the message names the argument, the given value and the
            accepted values.
    """
    refuse_nested()
    check_callable(train_fn)
    check_optuna()
    check_space(space)
    terms = _terms(
        trials, max_concurrent, min_concurrent, gpus_per_trial, workers_per_trial, max_failures
    )
    if direction not in _DIRECTIONS:
        raise ConfigError(f"direction={direction!r}: must be 'minimize' or 'maximize'")
    if metric is not None and (not isinstance(metric, str) or not metric):
        raise ConfigError(f"metric={metric!r}: must be the name of a metric or None")
    if name is not None and resume is not None:
        raise ConfigError(
            f"name={name!r} and resume={resume!r}: a search goes on by either, give one of them"
        )
    wanted: Wanted | None = None if python_env is None else recipe_for(python_env)
    spec = gang_spec(
        gpus_per_trial,
        memory_per_worker,
        acquire_timeout,
        name=name if name is not None else default_name(train_fn),
        workers=terms.slots,
        cores_per_worker=cores_per_worker,
        gpu_type=gpu_type,
        visible=visible,
        run_timeout=parse_duration(trial_timeout, "trial_timeout"),
        env_vars={} if env_vars is None else env_vars,
    )
    timeout = parse_duration(search_timeout, "search_timeout")
    proposes, prunes = sampler_of(sampler, space, seed), pruner_of(pruner)
    resumed = None if resume is None else file_name(resume, "resume")
    function, imported = _function(train_fn, space, keywords(kwargs))
    shown = search_progress_of(progress)
    application = application_of(spark)
    modules = packed_modules(Packer(), train_fn, function, imported, application)
    spec, wanted = with_python(spec, wanted, application)
    return SearchArguments(
        terms=terms,
        spec=spec,
        space=space,
        direction=direction,
        metric=metric,
        sampler=proposes,
        pruner=prunes,
        seed=seed,
        timeout=timeout,
        function=function,
        modules=modules,
        code=code_digest(train_fn, modules),
        foreseen=scan_function(train_fn, modules),
        progress=shown,
        application=application,
        python_env=wanted,
        named=None if name is None else spec.name,
        resume=resumed,
        needs=needs_of(imported, modules),
    )


def _terms(
    trials: int,
    most: int,
    least: int,
    gpus: float,
    workers: int,
    max_failures: int | None,
) -> SearchTerms:
    check_count(trials, "trials", 1)
    check_count(most, "max_concurrent", 1)
    check_count(least, "min_concurrent", 1)
    check_count(workers, "workers_per_trial", 1)
    if least > most:
        raise ConfigError(
            f"min_concurrent={least} with max_concurrent={most}: min_concurrent must be at"
            f" most {most}, as no more trials run at a time"
        )
    if max_failures is not None:
        check_count(max_failures, "max_failures", 0)
    slots = _gpus(gpus).sharing
    if slots > 1 and workers > 1:
        raise ConfigError(
            f"gpus_per_trial={gpus!r} with workers_per_trial={workers}: trials that share a GPU"
            " have one worker each, since NCCL connects no ranks on one GPU; ask for whole GPUs,"
            " which each worker of a trial gets"
        )
    return SearchTerms(trials, most, least, workers, slots, max_failures)


def _gpus(given: float) -> GpuRequest:
    try:
        return GpuRequest(given)
    except ConfigError as error:
        raise ConfigError(str(error).replace("gpus_per_worker", "gpus_per_trial")) from None


def _function(
    train_fn: Callable[..., Any], space: Space, fixed: Mapping[str, Any]
) -> tuple[bytes, ImportedModules]:
    """Return the pickled function with its shared arguments, and the modules that they import."""
    if isinstance(space, Mapping):
        if twice := sorted(fixed.keys() & space.keys()):
            raise ConfigError(
                f"kwargs and space both give {', '.join(twice)}: leave it out of one of them"
            )
        check_call(train_fn, (), {**fixed, **space})
    else:
        check_call(train_fn, (), fixed, all_known=False)
    noted = ImportRecorder()
    call = pickle_call(train_fn, (), fixed, noted=noted)
    for value in values_of(space):
        # The parameters that trials get in addition may need modules of their own.
        noted.see(value if callable(value) else type(value), by_value=True)
    return call, noted.imported()
