"""The part of a search's record that other runs' records lack, and the trials of a study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import optuna

from hopsgpu.core.run_record import SearchRecord
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, RUNNING, Best, TrialReport
from hopsgpu.tuning.sampler_thread import ATTRIBUTE

if TYPE_CHECKING:
    from hopsgpu.tuning.search_options import SearchArguments

_STATES = {
    optuna.trial.TrialState.COMPLETE: COMPLETE,
    optuna.trial.TrialState.PRUNED: PRUNED,
    optuna.trial.TrialState.FAIL: FAILED,
    optuna.trial.TrialState.RUNNING: RUNNING,
}


def reports_of(study: optuna.Study) -> Iterator[TrialReport]:
    """Yield reports of a study's trials, in order of their numbers, without those that wait."""
    for trial in study.get_trials(deepcopy=False):
        if trial.state in _STATES:
            yield _report(trial)


def _report(trial: optuna.trial.FrozenTrial) -> TrialReport:
    state = _STATES[trial.state]
    value = trial.value if state == COMPLETE else None
    if state == PRUNED and trial.intermediate_values:
        value = trial.intermediate_values[max(trial.intermediate_values)]
    recorded = dict(trial.user_attrs.get(ATTRIBUTE, {}))
    if recorded.get("ended") is None and state != RUNNING and trial.datetime_complete is not None:
        # The user's space declined the trial, which never ran.
        recorded |= {"ended": trial.datetime_complete.timestamp(), "tries": 0}
    return TrialReport(
        number=trial.number, params=dict(trial.params), state=state, value=value, **recorded
    )


def search_record(
    arguments: SearchArguments, study: optuna.Study | None, best: Best | None
) -> SearchRecord:
    """Return the part of the record about a search and its trials."""
    terms, options = arguments.terms, arguments.options
    return SearchRecord(
        trials_wanted=terms.items,
        max_concurrent=terms.max_running,
        min_concurrent=terms.min_running,
        workers_per_trial=terms.ranks,
        gpus_per_trial=arguments.spec.gpus.per_worker,
        max_failures=terms.max_failures,
        direction=options.direction,
        metric=options.metric,
        sampler=type(arguments.sampler).__name__,
        pruner=type(arguments.pruner).__name__,
        seed=options.seed,
        space={name: str(distribution) for name, distribution in options.space.items()}
        if isinstance(options.space, Mapping)
        else repr(options.space),
        best=best,
        trials=() if study is None else tuple(reports_of(study)),
    )
