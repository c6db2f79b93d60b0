"""Optuna's side of a search: a thread in which it proposes, is told, and judges.

Nothing waits for Optuna: a proposal takes it milliseconds to seconds, so it is asked ahead, and
what it has to say is taken by `news`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import optuna

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.tuning.journal import Journal
from hopsgpu.tuning.scheduler import End
from hopsgpu.tuning.space import arguments_of

if TYPE_CHECKING:
    from hopsgpu.tuning.space import Space

Direction = Literal["minimize", "maximize"]
# What a trial ran on and how it ended: an attribute of it in Optuna.
ATTRIBUTE = "hopsgpu"
# How often a trial was started: of one that another driver resumes each try counts.
_TRIES = "hopsgpu.tries"
# Of the study: a digest of the code of its trials.
_CODE = "hopsgpu.code"
_STATES = {
    End.COMPLETE: optuna.trial.TrialState.COMPLETE,
    End.PRUNED: optuna.trial.TrialState.PRUNED,
    End.FAILED: optuna.trial.TrialState.FAIL,
}
# Of reports that came together; with each the pruner is asked once.
_MOST_REPORTS = 100


@dataclass(frozen=True)
class Proposed:
    """A trial that is to run.

    Attributes:
        number: Optuna's.
        params: by name, as Optuna has them.
        arguments: keyword arguments of the user's function.
        tries: how often it was started in earlier runs of the study.
    """

    number: int
    params: Mapping[str, Any]
    arguments: Mapping[str, Any]
    tries: int = 0


@dataclass(frozen=True)
class Declined:
    """The user's space does not want a trial that was proposed: Optuna has it as pruned."""

    number: int


@dataclass(frozen=True)
class NoMore:
    """The sampler has nothing to propose any more."""


@dataclass(frozen=True)
class Condemned:
    """The pruner wants a trial to end."""

    number: int


@dataclass(frozen=True)
class Broken:
    """Optuna, or the user's space, raised: nothing more is proposed."""

    error: Exception


News = Proposed | Declined | NoMore | Condemned | Broken


def open_study(
    journal: Journal,
    name: str,
    direction: Direction,
    sampler: optuna.samplers.BaseSampler,
    pruner: optuna.pruners.BasePruner,
) -> optuna.Study:
    """The study of a journal, made where it is new.

    Raises:
        ConfigError: the study that is there has another direction.
    """
    storage = optuna.storages.JournalStorage(journal)
    logged = optuna.logging.get_verbosity()
    try:
        # "A new study created": the search tells that itself.
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
        optuna.logging.set_verbosity(logged)
    if study.direction.name.lower() != direction:
        raise ConfigError(
            f"direction={direction!r}: the study {name!r} to resume is to"
            f" {study.direction.name.lower()}; give another name for a new one"
        )
    return study


class Asker:
    """Speaks with Optuna in a thread of its own.

    Args:
        study: Optuna's.
        space: from which trials get their parameters.
        wake: called in the thread when there is news.

    Attributes:
        unfinished: trials of an earlier run that had not ended, in order; they are proposed first.
    """

    def __init__(self, study: optuna.Study, space: Space, wake: Callable[[], None]) -> None:
        self.study = study
        self._space = space
        self._wake = wake
        self._changed = threading.Condition()
        self._works: deque[Callable[[], None]] = deque()
        self._wanted = 0
        self._news: deque[News] = deque()
        self._trials: dict[int, optuna.Trial] = {}
        # Steps that Optuna has of a trial: it warns of one that comes again, as after a restart.
        self._steps: dict[int, set[int]] = {}
        self._closed = False
        self._broken = False
        self._over = threading.Event()
        self._stopped = False
        running = (optuna.trial.TrialState.RUNNING,)
        self.unfinished = deque(
            trial.number for trial in study.get_trials(deepcopy=False, states=running)
        )
        # A sampler that has come to its end says so; outside optimize() that is an error.
        study.stop = self._stop

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="hopsgpu-optuna", daemon=True).start()

    def ask(self, count: int) -> None:
        """Has so many more proposed."""
        with self._changed:
            self._wanted += count
            self._changed.notify()

    def started(self, number: int, tries: int) -> None:
        """Has Optuna know how often a trial was started, in all runs of the study."""

        def work() -> None:
            self._trials[number].set_user_attr(_TRIES, tries)

        self._put(work)

    def tell(self, number: int, how: End, value: float | None, about: Mapping[str, Any]) -> None:
        """Has Optuna know how a trial ended.

        Args:
            number: of the trial.
            how: complete, pruned or failed.
            value: the metric, of one that is complete.
            about: what is kept of it; JSON.
        """

        def work() -> None:
            trial = self._trials.pop(number)
            del self._steps[number]
            trial.set_user_attr(ATTRIBUTE, dict(about))
            self.study.tell(number, value, _STATES[how])

        self._put(work)

    def report(self, number: int, values: Sequence[tuple[int, float]]) -> None:
        """Has Optuna know of a trial's metric at some steps, and asks its pruner.

        Args:
            number: of the trial; one that has ended is left as it is.
            values: steps, 0 and above, with the metric at each.
        """

        def work() -> None:
            trial = self._trials.get(number)
            if trial is None:
                return
            steps = self._steps[number]
            for step, value in values[-_MOST_REPORTS:]:
                if step not in steps:
                    steps.add(step)
                    trial.report(value, step)
            if trial.should_prune():
                self._tell_news(Condemned(number))

        self._put(work)

    def news(self) -> list[News]:
        """What there is to know since the last time."""
        with self._changed:
            found, self._news = list(self._news), deque()
        return found

    def close(self, seconds: float) -> bool:
        """Ends the thread once all is told; whether it has ended within so many seconds."""
        with self._changed:
            self._closed, self._wanted = True, 0
            self._changed.notify()
        return self._over.wait(seconds)

    def _stop(self) -> None:
        self._stopped = True

    def _put(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._works.append(work)
            self._changed.notify()

    def _tell_news(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
        self._wake()

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except Exception as error:  # noqa: BLE001 - ends the search, and is raised there
            self._tell_news(Broken(error))
        finally:
            self._over.set()

    @property
    def _proposes(self) -> bool:
        return self._wanted > 0 and not self._broken

    def _next(self) -> Callable[[], None] | None:
        """What is to be done: what is told comes first, as the next proposal goes by it."""
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._proposes or self._closed)
            if self._works:
                return self._works.popleft()
            if self._proposes and not self._closed:
                self._wanted -= 1
                return self._propose
            return None

    def _propose(self) -> None:
        try:
            news = self._proposal()
        except Exception as error:  # noqa: BLE001 - ends the search, and is raised there
            news = Broken(error)
            with self._changed:
                # Trials that end until then are told all the same: none of them is lost.
                self._broken = True
        self._tell_news(news)

    def _proposal(self) -> News:
        reported: set[int] = set()
        if self.unfinished:
            reported = self._reported(self.unfinished[0])
            trial = self._unfinished()
        elif self._is_exhausted():
            return NoMore()
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

    def _reported(self, number: int) -> set[int]:
        return set(self.study.get_trials(deepcopy=False)[number].intermediate_values)

    def _unfinished(self) -> optuna.Trial:
        """A trial that an earlier run has left, with the parameters that it has."""
        storage = self.study._storage
        study = storage.get_study_id_from_name(self.study.study_name)
        number = self.unfinished.popleft()
        return optuna.Trial(
            self.study, storage.get_trial_id_from_study_id_trial_number(study, number)
        )

    def _is_exhausted(self) -> bool:
        if self._stopped:
            return True
        points = getattr(self.study.sampler, "_all_grids", None)
        # A grid's sampler that has proposed all proposes some again.
        return points is not None and len(self.study.get_trials(deepcopy=False)) >= len(points)


def ended_before(study: optuna.Study) -> int:
    """How many trials of a study have ended."""
    return sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))


def note_code(study: optuna.Study, digest: str) -> bool:
    """Has a study know the code of the trials to come; whether those before had another."""
    before = study.user_attrs.get(_CODE)
    if before != digest:
        study.set_user_attr(_CODE, digest)
    return before not in (None, digest)


def refused(error: Exception) -> HopsGpuError:
    """What Optuna or the user's space raised, for the user."""
    if isinstance(error, HopsGpuError):
        return error
    told = HopsGpuError(f"Optuna could not go on: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
