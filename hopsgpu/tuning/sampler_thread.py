"""The thread in which Optuna proposes trials, receives their results, and decides about pruning.

No other thread waits for Optuna. A proposal takes milliseconds to seconds, so proposals are
requested ahead, and `take_news` returns Optuna's decisions.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import optuna

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.executors.item_placement import ItemEnd
from hopsgpu.tuning.journal import Journal
from hopsgpu.tuning.space import arguments_of

if TYPE_CHECKING:
    from hopsgpu.tuning.space import Space

Direction = Literal["minimize", "maximize"]
# Attribute of a trial in Optuna: what the trial ran on and how it ended.
ATTRIBUTE = "hopsgpu"
# Attribute of a trial: how often it was started, including its tries under earlier drivers.
_TRIES = "hopsgpu.tries"
# Attribute of the study: a digest of the code of its trials.
_CODE = "hopsgpu.code"
_STATES = {
    ItemEnd.COMPLETE: optuna.trial.TrialState.COMPLETE,
    ItemEnd.PRUNED: optuna.trial.TrialState.PRUNED,
    ItemEnd.FAILED: optuna.trial.TrialState.FAIL,
}
# Largest number of reports that Optuna gets of one batch; it asks the pruner once per batch.
_MAX_REPORTS = 100


@dataclass(frozen=True)
class Proposed:
    """News: Optuna proposes a trial.

    Attributes:
        tries: how often the trial was started in earlier runs of the study.
    """

    number: int
    params: Mapping[str, Any]
    arguments: Mapping[str, Any]
    tries: int = 0


@dataclass(frozen=True)
class Declined:
    """News: the user's space rejected a proposed trial, which Optuna records as pruned."""

    number: int


@dataclass(frozen=True)
class SamplerExhausted:
    """News: the sampler has no more trials to propose."""


@dataclass(frozen=True)
class PruneRequested:
    """News: the pruner decided that a trial should end."""

    number: int


@dataclass(frozen=True)
class SamplerFailed:
    """News: Optuna or the user's space raised an error; no more trials are proposed."""

    error: Exception


# Optuna's words about a parameter that earlier trials had in another form.
_OTHER_SPACE = re.compile("dynamic value space|Cannot set different")
_SAME_SPACE = (
    "In all trials of a search, a parameter keeps its kind, its choices and its scale; only bounds"
    " may change. Give the parameter another name, or the search"
)

News = Proposed | Declined | SamplerExhausted | PruneRequested | SamplerFailed


def open_study(
    journal: Journal,
    name: str,
    direction: Direction,
    sampler: optuna.samplers.BaseSampler,
    pruner: optuna.pruners.BasePruner,
) -> optuna.Study:
    """Return the study of a journal; create it if the journal is new.

    Raises:
        ConfigError: the existing study has another direction.
    """
    storage = optuna.storages.JournalStorage(journal)
    verbosity = optuna.logging.get_verbosity()
    try:
        # Suppresses "A new study created": the search has messages of its own.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=storage,
            sampler=sampler,
            pruner=pruner,
            study_name=name,
            direction=direction,
            load_if_exists=True,
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    if study.direction.name.lower() != direction:
        raise ConfigError(
            f"direction={direction!r}: the study {name!r} to resume has direction"
            f" {study.direction.name.lower()!r}; use another name for a new study"
        )
    return study


def check_same_space(study: optuna.Study, space: Space) -> None:
    """Check that new trials may have the parameters of a space beside those that a study has.

    A function is checked by Optuna, for each trial.

    Raises:
        ConfigError: a parameter has another kind, other choices, or another scale than before.
    """
    if callable(space):
        return
    for trial in study.get_trials(deepcopy=False):
        for name, before in trial.distributions.items():
            try:
                optuna.distributions.check_distribution_compatibility(
                    before, space.get(name, before)
                )
            except ValueError as error:
                raise ConfigError(
                    f"space[{name!r}]={space[name]}: the search {study.study_name!r} to resume has"
                    f" {before} ({error}). {_SAME_SPACE}"
                ) from None


class SamplerThread:
    """Calls Optuna in a separate thread.

    Args:
        on_news: called in the thread when there is news.

    Attributes:
        unfinished: numbers of the trials that an earlier run did not finish, in order; they are
            proposed first.
        failure: the error that ended the thread, so that later trials are not recorded; or None.
    """

    def __init__(self, study: optuna.Study, space: Space, on_news: Callable[[], None]) -> None:
        self.study = study
        self._space = space
        self._on_news = on_news
        self._changed = threading.Condition()
        self._works: deque[Callable[[], None]] = deque()
        self._wanted = 0
        self._news: deque[News] = deque()
        self._trials: dict[int, optuna.Trial] = {}
        # Steps that each trial has reported to Optuna, which warns if a step is reported again, as
        # happens after a restart.
        self._steps: dict[int, set[int]] = {}
        self._is_closed = False
        self._has_failed_to_propose = False
        self._ended = threading.Event()
        self._is_sampler_stopped = False
        self.failure: Exception | None = None
        running = (optuna.trial.TrialState.RUNNING,)
        self.unfinished = deque(
            trial.number for trial in study.get_trials(deepcopy=False, states=running)
        )
        # A sampler without further trials calls study.stop(), which raises outside optimize().
        study.stop = self._stop

    def start(self) -> None:
        threading.Thread(target=self._run, name="hopsgpu-optuna", daemon=True).start()

    def ask(self, count: int) -> None:
        """Request a number of further proposals."""
        with self._changed:
            self._wanted += count
            self._changed.notify()

    def record_start(self, number: int, tries: int) -> None:
        """Record in Optuna how often a trial was started, in all runs of the study."""

        def work() -> None:
            self._trials[number].set_user_attr(_TRIES, tries)

        self._queue(work)

    def record_end(
        self, number: int, how: ItemEnd, value: float | None, about: Mapping[str, Any]
    ) -> None:
        """Record in Optuna how a trial ended.

        Args:
            how: complete, pruned or failed.
            value: the metric of a complete trial; None otherwise.
            about: what else Optuna keeps of the trial; JSON.
        """

        def work() -> None:
            trial = self._trials.pop(number)
            del self._steps[number]
            trial.set_user_attr(ATTRIBUTE, dict(about))
            self.study.tell(number, value, _STATES[how])

        self._queue(work)

    def report(self, number: int, values: Sequence[tuple[int, float]]) -> None:
        """Report a trial's metric at some steps to Optuna, and ask its pruner.

        Args:
            number: number of the trial; reports of an ended trial are ignored.
            values: pairs (step, metric); steps are 0 or above.
        """

        def work() -> None:
            trial = self._trials.get(number)
            if trial is None:
                return
            steps = self._steps[number]
            for step, value in values[-_MAX_REPORTS:]:
                if step not in steps:
                    steps.add(step)
                    trial.report(value, step)
            if trial.should_prune():
                self._publish(PruneRequested(number))

        self._queue(work)

    def take_news(self) -> list[News]:
        """Return the news since the last call."""
        with self._changed:
            news, self._news = list(self._news), deque()
        return news

    def close(self, seconds: float) -> bool:
        """End the thread once Optuna has recorded all; return whether it ended in time."""
        with self._changed:
            self._is_closed, self._wanted = True, 0
            self._changed.notify()
        return self._ended.wait(seconds)

    def _stop(self) -> None:
        self._is_sampler_stopped = True

    def _queue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._works.append(work)
            self._changed.notify()

    def _publish(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
        self._on_news()

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except Exception as error:  # noqa: BLE001 - ends the search, and is raised there
            self.failure = error
            self._publish(SamplerFailed(error))
        finally:
            self._ended.set()

    @property
    def _should_propose(self) -> bool:
        return self._wanted > 0 and not self._has_failed_to_propose

    def _next(self) -> Callable[[], None] | None:
        """Return what to do next, or None at the end.

        Results come before proposals, because the next proposal takes them into account.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._should_propose or self._is_closed)
            if self._works:
                return self._works.popleft()
            if self._should_propose and not self._is_closed:
                self._wanted -= 1
                return self._propose
            return None

    def _propose(self) -> None:
        try:
            news = self._proposal()
        except Exception as error:  # noqa: BLE001 - ends the search, and is raised there
            news = SamplerFailed(error)
            with self._changed:
                # Optuna still records trials that end before the search does: none is lost.
                self._has_failed_to_propose = True
        self._publish(news)

    def _proposal(self) -> News:
        reported: set[int] = set()
        if self.unfinished:
            reported = self._reported_steps(self.unfinished[0])
            trial = self._next_unfinished()
        elif self._is_exhausted():
            return SamplerExhausted()
        else:
            trial = self.study.ask()
        try:
            arguments = arguments_of(self._space, trial)
        except optuna.TrialPruned:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return Declined(trial.number)
        self._trials[trial.number] = trial
        self._steps[trial.number] = reported
        tries = int(trial.user_attrs.get(_TRIES, 0))
        return Proposed(trial.number, dict(trial.params), arguments, tries)

    def _reported_steps(self, number: int) -> set[int]:
        return set(self.study.get_trials(deepcopy=False)[number].intermediate_values)

    def _next_unfinished(self) -> optuna.Trial:
        """Return a trial that an earlier run did not finish, with its parameters."""
        storage = self.study._storage
        study = storage.get_study_id_from_name(self.study.study_name)
        number = self.unfinished.popleft()
        return optuna.Trial(
            self.study, storage.get_trial_id_from_study_id_trial_number(study, number)
        )

    def _is_exhausted(self) -> bool:
        if self._is_sampler_stopped:
            return True
        points = getattr(self.study.sampler, "_all_grids", None)
        # After the last point, a grid sampler proposes points again.
        return points is not None and len(self.study.get_trials(deepcopy=False)) >= len(points)


def count_ended(study: optuna.Study) -> int:
    return sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))


def record_code(study: optuna.Study, digest: str) -> bool:
    """Record the digest of the next trials' code; return whether earlier trials had other code."""
    before = study.user_attrs.get(_CODE)
    if before != digest:
        study.set_user_attr(_CODE, digest)
    return before not in (None, digest)


def as_user_error(error: Exception) -> HopsGpuError:
    """Return the error to raise for an error of Optuna or of the user's space."""
    if isinstance(error, HopsGpuError):
        return error
    advice = f". {_SAME_SPACE}" if _OTHER_SPACE.search(str(error)) else ""
    failure = HopsGpuError(f"Optuna failed: {type(error).__name__}: {error}{advice}")
    failure.__cause__ = error
    return failure
