"""The space of a search: a trial's parameters, from Optuna's distributions or from a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import optuna

    Space = (
        Mapping[str, optuna.distributions.BaseDistribution]
        | Callable[[optuna.Trial], Mapping[str, Any] | None]
    )

T = TypeVar("T")

INSTALL = "pip install 'hopsgpu[search]'"


def check_space(space: object) -> None:
    """Check that an object is a space.

    Raises:
        ConfigError: the object is neither a mapping of names to distributions nor a function.
    """
    import optuna

    if callable(space):
        return
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            f"space={space!r:.200}: must be a mapping of parameter names to Optuna"
            " distributions, or a function of an Optuna trial that returns the parameters"
        )
    for name, distribution in space.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"space: {name!r}: a parameter's name must be a Python identifier, because trials"
                " get parameters as keyword arguments"
            )
        known_kinds = (
            optuna.distributions.FloatDistribution,
            optuna.distributions.IntDistribution,
            optuna.distributions.CategoricalDistribution,
        )
        if not isinstance(distribution, known_kinds):
            raise ConfigError(
                f"space[{name!r}]={distribution!r:.200}: must be a Float-, Int- or"
                " CategoricalDistribution, for example"
                " optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)"
            )


def arguments_of(space: Space, trial: optuna.Trial) -> dict[str, Any]:
    """Return the keyword arguments of a trial; parameters that it already has keep their values.

    Raises:
        ConfigError: the function returns something other than keyword arguments.
        optuna.TrialPruned: the function rejects these parameters.
    """
    if isinstance(space, Mapping):
        return {name: _suggest(trial, name, kind) for name, kind in space.items()}
    arguments = space(trial)
    if arguments is None:
        return dict(trial.params)
    if not isinstance(arguments, Mapping) or not all(
        isinstance(name, str) and name.isidentifier() for name in arguments
    ):
        raise ConfigError(
            f"space(trial) returned {arguments!r:.200}: it must return a mapping of keyword"
            " arguments by name, or None for the suggested parameters"
        )
    return dict(arguments)


def _suggest(trial: optuna.Trial, name: str, kind: optuna.distributions.BaseDistribution) -> Any:
    """Return a parameter of a trial; the same value again if the trial already has it."""
    from optuna import distributions as known

    if isinstance(kind, known.CategoricalDistribution):
        return trial.suggest_categorical(name, kind.choices)
    if isinstance(kind, known.IntDistribution):
        return trial.suggest_int(name, kind.low, kind.high, step=kind.step, log=kind.log)
    assert isinstance(kind, known.FloatDistribution), "check_space accepts no other"
    return trial.suggest_float(name, kind.low, kind.high, step=kind.step, log=kind.log)


def values_of(space: Space) -> list[Any]:
    """Return the values of a space that may have any type; for a function, the function itself."""
    from optuna import distributions as known

    if not isinstance(space, Mapping):
        return [space]
    categorical = [d for d in space.values() if isinstance(d, known.CategoricalDistribution)]
    return [choice for distribution in categorical for choice in distribution.choices]


def grid_of(space: Space) -> dict[str, Sequence[Any]]:
    """Return all values of each parameter.

    Raises:
        ConfigError: the values of a parameter cannot be listed, or the space is a function.
    """
    from optuna import distributions as known

    if not isinstance(space, Mapping):
        raise ConfigError(
            "sampler='grid' with a function for space: space must be a mapping of names to"
            " distributions whose values can be listed"
        )
    grid: dict[str, Sequence[Any]] = {}
    for name, distribution in space.items():
        if isinstance(distribution, known.CategoricalDistribution):
            grid[name] = distribution.choices
        elif isinstance(distribution, known.IntDistribution) and not distribution.log:
            grid[name] = range(distribution.low, distribution.high + 1, distribution.step)
        elif isinstance(distribution, known.FloatDistribution) and distribution.step is not None:
            steps = round((distribution.high - distribution.low) / distribution.step)
            values = (distribution.low + i * distribution.step for i in range(steps + 1))
            # Rounding may exceed the bound (3 * 0.1 > 0.3), which Optuna would refuse.
            grid[name] = [min(value, distribution.high) for value in values]
        else:
            raise ConfigError(
                f"sampler='grid': {name!r} ({distribution}) has values that cannot be listed: give"
                " it a step, or use a CategoricalDistribution"
            )
    return grid


def _samplers() -> dict[str, Callable[[Space, int | None], optuna.samplers.BaseSampler]]:
    from optuna import samplers as known

    return {
        "tpe": lambda space, seed: known.TPESampler(seed=seed, constant_liar=True),
        "random": lambda space, seed: known.RandomSampler(seed=seed),
        "grid": lambda space, seed: known.GridSampler(grid_of(space), seed=seed),
        "cmaes": lambda space, seed: known.CmaEsSampler(seed=seed),
        "genetic": lambda space, seed: known.NSGAIISampler(seed=seed),
    }


def _pruners() -> dict[str, Callable[[], optuna.pruners.BasePruner]]:
    from optuna import pruners as known

    return {
        "none": known.NopPruner,
        "median": known.MedianPruner,
        "asha": known.SuccessiveHalvingPruner,
        "hyperband": known.HyperbandPruner,
    }


def sampler_of(sampler: object, space: Space, seed: int | None) -> optuna.samplers.BaseSampler:
    """Return the sampler that `sampler=` names, or is; for None "tpe".

    Raises:
        ConfigError: the sampler or the seed is invalid, a sampler object is given together with a
            seed, or a package that the sampler needs is not installed.
    """
    import optuna

    if isinstance(sampler, optuna.samplers.BaseSampler):
        if seed is not None:
            raise ConfigError(
                f"seed={seed!r} with sampler={sampler!r:.100}: give the seed to the sampler itself"
            )
        return sampler
    make = _by_name(_samplers(), "tpe" if sampler is None else sampler, "sampler")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed={seed!r}: must be an integer or None")
    try:
        return make(space, seed)
    except ImportError as error:
        raise ConfigError(f"sampler={sampler!r} needs a package: {error}; {INSTALL}") from error


def pruner_of(pruner: object) -> optuna.pruners.BasePruner:
    """Return the pruner that `pruner=` names, or is; for None a pruner that ends no trial.

    Raises:
        ConfigError: the pruner is invalid.
    """
    import optuna

    if isinstance(pruner, optuna.pruners.BasePruner):
        return pruner
    return _by_name(_pruners(), "none" if pruner is None else pruner, "pruner")()


def _by_name(makers: Mapping[str, T], name: object, label: str) -> T:
    if isinstance(name, str) and name in makers:
        return makers[name]
    raise ConfigError(
        f"{label}={name!r:.200}: must be {', '.join(map(repr, makers))} or a {label} of"
        f" optuna.{label}s"
    )


def check_optuna() -> None:
    """Raise ConfigError if Optuna is not installed at the driver."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a search needs Optuna at the driver: {INSTALL} ({error})") from error
