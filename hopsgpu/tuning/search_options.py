"""The options of searches, each written once, and the arguments that they check to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.core.signatures import placed_field
from hopsgpu.core.spec import GpuRequest, check_count
from hopsgpu.display.progress import ShieldedSearch, search_progress_of
from hopsgpu.errors import ConfigError
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.launcher.arguments import ItemArguments, gang_in, item_arguments, refuse_nested
from hopsgpu.launcher.function_shipping import (
    PickledFunction,
    check_accepts,
    check_callable,
    keywords,
    pickle_function,
)
from hopsgpu.launcher.options import (
    Duration,
    ExecutorOptions,
    FunctionOptions,
    check_gpu_idle_timeout,
)
from hopsgpu.storage.names import file_name
from hopsgpu.tuning.space import check_optuna, check_space, pruner_of, sampler_of, values_of
from hopsgpu.units import parse_duration, parse_duration_or_off

if TYPE_CHECKING:
    import optuna

    from hopsgpu.tuning.sampler_thread import Direction
    from hopsgpu.tuning.space import Space

_DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True, kw_only=True)
class TrialOptions(FunctionOptions, ExecutorOptions):
    """The options of everything that runs trials: of `search` and of `ablate`.

    Attributes:
        train_fn: any callable that cloudpickle can pickle. It returns the metric, a number, or a
            dict of numbers that contains the metric. `context().report(step, **metrics)` reports
            the metric during training, and `context().should_prune()` says whether to return early.
        max_concurrent: largest number of trials that run at a time; GPUs are requested for so many.
        min_concurrent: number of trials for which there must be GPUs before the first one starts.
        gpus_per_trial: whole GPUs of each worker of a trial; 0 for CPUs; 1/k (such as 0.5) if k
            trials share a GPU, each with the setting to use its share of the memory.
        workers_per_trial: ranks of each trial; if above 1, a trial is a gang with one executor per
            rank.
        direction: "minimize" or "maximize".
        metric: name of the metric, needed if the function returns or reports several.
        search_timeout: how long the search may take from its first wait for executors on. Trials
            that still run then are stopped; the search can be resumed.
        trial_timeout: how long a trial may take; a trial that takes longer fails.
        gpu_idle_timeout: how long all GPUs of a trial may idle in a row, as for `launch`; then it
            fails. "off" for no bound.
        max_failures: number of failed trials that the search tolerates; None for any number.
        name: name of the search. If a search of this name exists, it is resumed.
        resume: id of the search to resume. Trials that have ended are kept; those that were running
            start again and find their checkpoints.
        kwargs: keyword arguments that all trials get.
        acquire_timeout: how long the search may wait for the first executor; None for no limit.
        progress: as for `launch`; a callable receives a SearchStatus.
    """

    max_concurrent: int
    min_concurrent: int = 1
    gpus_per_trial: float = 1
    workers_per_trial: int = 1
    direction: Direction = "minimize"
    metric: str | None = None
    search_timeout: Duration = None
    trial_timeout: Duration = None
    gpu_idle_timeout: Duration = None
    max_failures: int | None = None
    name: str | None = placed_field(None, "max_failures")
    resume: str | None = None
    kwargs: Mapping[str, Any] | None = None
    spark: Any = None


@dataclass(frozen=True, kw_only=True)
class SearchOptions(TrialOptions):
    """The options of `search`.

    Attributes:
        space: a dict of parameter names to Optuna distributions, or a function of an Optuna trial
            that suggests parameters; what that returns, if anything, are the keyword arguments.
        trials: total number of trials that should end, including those of earlier runs of the
            search.
        sampler: "tpe" (the default), "random", "grid", "cmaes", "genetic", or a sampler of Optuna.
        pruner: "none" (the default), "median", "asha", "hyperband", or a pruner of Optuna.
        seed: seed of a sampler given by name. The same seed proposes the same trials as long as
            trials end in the same order; with max_concurrent=1 it always does.
    """

    space: Space = field(kw_only=False)
    trials: int
    sampler: Any = placed_field(None, "metric")
    pruner: Any = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class SearchArguments(ItemArguments):
    """The checked arguments of a search.

    Attributes:
        named: the given name, by which the search is resumed; None if the search gets a new run id.
        resume: id of the search to resume, which must exist; or None.
    """

    options: SearchOptions
    sampler: optuna.samplers.BaseSampler
    pruner: optuna.pruners.BasePruner
    progress: ShieldedSearch
    named: str | None
    resume: str | None

    @property
    def memory_share(self) -> float | None:
        """Return the share of a GPU's memory that a trial may use; None if it may use all of it."""
        return 1 / self.terms.slots if self.terms.slots > 1 else None


def search_arguments(
    options: SearchOptions, interrupted: threading.Event | None = None
) -> SearchArguments:
    """Check a search's options.

    Raises:
        ConfigError: an option is invalid; the message names the option, the given value and the
            accepted values.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    refuse_nested()
    train_fn, space = options.train_fn, options.space
    check_callable(train_fn)
    check_optuna()
    check_space(space)
    terms = _terms(options)
    direction, metric = options.direction, options.metric
    name, resume = options.name, options.resume
    if direction not in _DIRECTIONS:
        raise ConfigError(f"direction={direction!r}: must be 'minimize' or 'maximize'")
    if metric is not None and (not isinstance(metric, str) or not metric):
        raise ConfigError(f"metric={metric!r}: must be the name of a metric or None")
    if name is not None and resume is not None:
        raise ConfigError(
            f"name={name!r} and resume={resume!r}: each can resume a search; give only one of them"
        )
    python_env = options.recipe()
    check_gpu_idle_timeout(
        options.gpu_idle_timeout, options.gpus_per_trial, "gpus_per_trial=0", "trial"
    )
    spec = options.gang_of(
        name=options.run_name,
        workers=terms.slots,
        gpus=_gpus(options.gpus_per_trial),
        run_timeout=parse_duration(options.trial_timeout, "trial_timeout"),
        gpu_idle_timeout=parse_duration_or_off(options.gpu_idle_timeout, "gpu_idle_timeout"),
        env_vars={} if options.env_vars is None else options.env_vars,
        independent_ranks=options.independent_ranks,
    )
    timeout = parse_duration(options.search_timeout, "search_timeout")
    sampler, pruner = sampler_of(options.sampler, space, options.seed), pruner_of(options.pruner)
    resumed = None if resume is None else file_name(resume, "resume")
    kwargs = keywords(options.kwargs)
    call = _function(train_fn, space, kwargs)
    progress = search_progress_of(options.progress)
    gang = gang_in(application_of(options.spark), spec, python_env, options.gpu_idle_timeout)
    return SearchArguments(
        **vars(item_arguments(train_fn, kwargs, call, gang, terms, timeout, interrupted)),
        options=options,
        sampler=sampler,
        pruner=pruner,
        progress=progress,
        named=None if name is None else spec.name,
        resume=resumed,
    )


def _terms(options: SearchOptions) -> PlacementTerms:
    least, most = options.min_concurrent, options.max_concurrent
    workers = options.workers_per_trial
    check_count(options.trials, "trials", 1)
    check_count(most, "max_concurrent", 1)
    check_count(least, "min_concurrent", 1)
    check_count(workers, "workers_per_trial", 1)
    if least > most:
        raise ConfigError(
            f"min_concurrent={least} with max_concurrent={most}: min_concurrent must not"
            " exceed max_concurrent"
        )
    if options.max_failures is not None:
        check_count(options.max_failures, "max_failures", 0)
    slots = _gpus(options.gpus_per_trial).sharing
    if slots > 1 and workers > 1:
        raise ConfigError(
            f"gpus_per_trial={options.gpus_per_trial!r} with workers_per_trial={workers}: trials"
            " that share a GPU have one worker each, because NCCL does not connect ranks on the"
            " same GPU; use whole GPUs, or workers_per_trial=1"
        )
    return PlacementTerms(options.trials, most, least, workers, slots, options.max_failures)


def _gpus(gpus_per_trial: float) -> GpuRequest:
    try:
        return GpuRequest(gpus_per_trial)
    except ConfigError as error:
        raise ConfigError(str(error).replace("gpus_per_worker", "gpus_per_trial")) from None


def _function(
    train_fn: Callable[..., Any], space: Space, fixed: Mapping[str, Any]
) -> PickledFunction:
    if isinstance(space, Mapping):
        if twice := sorted(fixed.keys() & space.keys()):
            raise ConfigError(
                f"kwargs and space both contain {', '.join(twice)}: remove it from one of them"
            )
        check_accepts(train_fn, (), {**fixed, **space})
    else:
        check_accepts(train_fn, (), fixed, are_all_known=False)
    # The parameters that trials get in addition may need modules of their own.
    later = [value if callable(value) else type(value) for value in values_of(space)]
    return pickle_function(train_fn, (), fixed, later)
