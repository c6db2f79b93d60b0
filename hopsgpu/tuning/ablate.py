"""`ablate`: measures the worth of each component by leaving out one at a time."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hopsgpu.core.signatures import placed_field
from hopsgpu.core.spec import check_count
from hopsgpu.core.trials import COMPLETE, FAILED, AblationRow, TrialReport
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.function_shipping import check_accepts, check_callable, keywords
from hopsgpu.launcher.interrupts import takes
from hopsgpu.tuning.search import run_search
from hopsgpu.tuning.search_options import (
    SearchArguments,
    SearchOptions,
    TrialOptions,
    search_arguments,
)
from hopsgpu.tuning.search_results import AblationResult
from hopsgpu.tuning.space import check_optuna

if TYPE_CHECKING:
    import optuna

    from hopsgpu.tuning.sampler_thread import Direction

BASELINE = ""
_COMPONENT, _SEED = "component", "seed"


@dataclass(frozen=True, kw_only=True)
class AblateOptions(TrialOptions):
    """The options of `ablate`.

    Attributes:
        train_fn: as for `search`. If it takes an argument `seed`, it gets 0, 1, ….
        components: for each component's name the keyword arguments that leave it out, such as
            `{"dropout": {"dropout": 0.0}, "attention": {"attention": False}}`.
        seeds: number of trials of each component, each with a different seed.
    """

    components: Mapping[str, Mapping[str, Any]] = field(kw_only=False)
    seeds: int = 1
    metric: str | None = placed_field(None, "seeds")
    direction: Direction = placed_field("minimize", "metric")


@dataclass(frozen=True)
class Ablation:
    """The checked arguments of an ablation."""

    search: SearchArguments
    components: tuple[str, ...]


def ablation(options: AblateOptions, interrupted: threading.Event | None = None) -> Ablation:
    """Check an ablation's options.

    Raises:
        ConfigError: an option is invalid; the message names the option, the given value and the
            accepted values.
    """
    train_fn, seeds = options.train_fn, options.seeds
    check_callable(train_fn)
    check_count(seeds, "seeds", 1)
    check_optuna()
    left_out = _check_components(options.components)
    has_seed = _has_seed_argument(train_fn)
    if seeds > 1 and not has_seed:
        raise ConfigError(
            f"seeds={seeds}: train_fn has no argument `seed`, so all trials of a component would be"
            " identical; add the argument, or use seeds=1"
        )
    fixed = keywords(options.kwargs)
    for without in left_out.values():
        check_accepts(train_fn, (), {**fixed, **without, **({_SEED: 0} if has_seed else {})})
    names = (BASELINE, *left_out)

    def space(trial: optuna.Trial) -> Mapping[str, Any]:
        component = trial.suggest_categorical(_COMPONENT, names)
        seed = trial.suggest_int(_SEED, 0, seeds - 1)
        # A component's keyword arguments override those that all trials get.
        return {**left_out.get(component, {}), **({_SEED: seed} if has_seed else {})}

    shared = {f.name: getattr(options, f.name) for f in dataclasses.fields(TrialOptions)}
    of_search = SearchOptions(
        **shared, space=space, trials=len(names) * seeds, sampler=_grid(names, seeds)
    )
    return Ablation(search_arguments(of_search, interrupted), tuple(left_out))


@takes(AblateOptions)
def ablate(options: AblateOptions, interrupted: threading.Event) -> AblationResult:
    """Measure what each layer, module or feature is worth, by training with and without it.

    For each seed, one trial trains with all components, and one trial per component trains without
    that component. The trials run on GPUs as those of `search` do.

    Raises:
        ConfigError, CapacityError, GangTimeout, StoreError, HopsGpuError, KeyboardInterrupt: as for
            `search`.
    """
    arguments = ablation(options, interrupted)
    result = run_search(arguments.search, interrupted)
    return AblationResult(
        run_id=result.run_id,
        rows=rows_of(arguments.components, result.trials),
        direction=result.direction,
        metric=result.metric,
        search=result,
    )


def rows_of(components: Sequence[str], trials: Sequence[TrialReport]) -> tuple[AblationRow, ...]:
    """Return the rows of the table: the whole, then one row per component that was left out."""
    baseline = _row(BASELINE, trials)
    return (baseline, *(_against(baseline, _row(name, trials)) for name in components))


def _row(component: str, trials: Sequence[TrialReport]) -> AblationRow:
    component_trials = [trial for trial in trials if trial.params.get(_COMPONENT) == component]
    values = tuple(t.value for t in component_trials if t.state == COMPLETE and t.value is not None)
    return AblationRow(
        component=component,
        mean=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        difference=None,
        values=values,
        failed=sum(trial.state == FAILED for trial in component_trials),
    )


def _against(baseline: AblationRow, row: AblationRow) -> AblationRow:
    if baseline.mean is None or row.mean is None:
        return row
    return dataclasses.replace(row, difference=row.mean - baseline.mean)


def _grid(names: Sequence[str], seeds: int) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.GridSampler({_COMPONENT: list(names), _SEED: list(range(seeds))}, seed=0)


def _check_components(components: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(components, Mapping) or not components:
        raise ConfigError(
            f"components={components!r:.200}: must be a dict of names to the keyword arguments"
            " that leave each one out"
        )
    for name, without in components.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"components: {name!r}: a component's name must be a non-empty string"
            )
        if not isinstance(without, Mapping) or not without:
            raise ConfigError(
                f"components[{name!r}]={without!r:.200}: must be a dict of the keyword arguments"
                " that leave it out"
            )
    return dict(components)


def _has_seed_argument(train_fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(train_fn).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return _SEED in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
