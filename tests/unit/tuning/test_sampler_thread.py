"""What Optuna proposes, keeps and judges; its journal on the lake, and a study that goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.executors.item_placement import ItemEnd
from hopsgpu.storage.lake import LakePath
from hopsgpu.tuning import space as spaces
from hopsgpu.tuning.journal import Journal
from hopsgpu.tuning.sampler_thread import (
    ATTRIBUTE,
    Declined,
    News,
    Proposed,
    PruneRequested,
    SamplerExhausted,
    SamplerFailed,
    SamplerThread,
    as_user_error,
    check_same_space,
    count_ended,
    open_study,
    record_code,
)
from tests.bounds import HANG_SECONDS

FLOAT = optuna.distributions.FloatDistribution
INT = optuna.distributions.IntDistribution
CHOICE = optuna.distributions.CategoricalDistribution


class Session:
    """A study on a local file, and the thread that calls Optuna."""

    def __init__(self, directory: Path, space: Any = None, **given: Any) -> None:
        self.space = {"x": FLOAT(0.0, 1.0)} if space is None else space
        self.journal = Journal(LakePath(f"file://{directory}/journal.log"))
        sampler = spaces.sampler_of(given.get("sampler"), self.space, given.get("seed"))
        pruner = spaces.pruner_of(given.get("pruner"))
        direction = given.get("direction", "minimize")
        self.study = open_study(self.journal, "s", direction, sampler, pruner)
        self.woken = threading.Event()
        self.thread = SamplerThread(self.study, self.space, self.woken.set)
        self.thread.start()

    def news(self, count: int) -> list[News]:
        found: list[News] = []
        while len(found) < count:
            assert self.woken.wait(HANG_SECONDS), found
            self.woken.clear()
            found += self.thread.take_news()
        return found

    def proposed(self, count: int) -> list[Proposed]:
        self.thread.ask(count)
        news = self.news(count)
        assert all(isinstance(one, Proposed) for one in news), news
        return [one for one in news if isinstance(one, Proposed)]

    def close(self) -> None:
        assert self.thread.close(HANG_SECONDS)
        self.journal.follow()


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    sessions = []

    def make(space: Any = None, **given: Any) -> Session:
        sessions.append(Session(tmp_path, space, **given))
        return sessions[-1]

    yield make
    for one in sessions:
        one.thread.close(HANG_SECONDS)


def test_sampler_proposes_ahead_and_gets_results(open_session: Callable[..., Session]) -> None:
    session = open_session()
    first, second = session.proposed(2)
    assert (first.number, second.number) == (0, 1)
    assert 0.0 <= first.arguments["x"] <= 1.0 and first.params == first.arguments
    session.thread.record_end(0, ItemEnd.COMPLETE, 0.5, {"host": "node1"})
    session.thread.record_end(1, ItemEnd.FAILED, None, {"error": "it raised"})
    session.close()
    done, failed = session.study.trials
    assert done.value == 0.5 and done.user_attrs[ATTRIBUTE] == {"host": "node1"}
    assert failed.state is optuna.trial.TrialState.FAIL
    assert count_ended(session.study) == 2


def test_optuna_reads_the_journal_by_itself(
    open_session: Callable[..., Session], tmp_path: Path
) -> None:
    session = open_session()
    session.proposed(1)
    session.thread.record_end(0, ItemEnd.COMPLETE, 0.25, {})
    session.close()
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    storage = optuna.storages.JournalStorage(backend)
    loaded = optuna.load_study(study_name="s", storage=storage)
    assert loaded.best_value == 0.25
    assert loaded.best_params == session.study.best_params


def test_a_study_goes_on_with_what_had_not_ended(
    open_session: Callable[..., Session], tmp_path: Path
) -> None:
    before = open_session({"x": FLOAT(0.0, 1.0), "n": INT(1, 9)})
    first, second = before.proposed(2)
    before.thread.record_end(0, ItemEnd.COMPLETE, 0.5, {})
    before.close()
    # The driver was killed in the middle of a line.
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code":')
    after = open_session({"x": FLOAT(0.0, 1.0), "n": INT(1, 9)})
    assert count_ended(after.study) == 1
    again, new = after.proposed(2)
    assert again == second and new.number == 2
    after.thread.record_end(1, ItemEnd.COMPLETE, 0.1, {})
    after.close()
    assert after.study.best_trial.number == 1 and first.number == 0


def test_two_drivers_on_one_study_are_noticed(open_session: Callable[..., Session]) -> None:
    open_session().close()
    one, other = open_session(), open_session()
    one.proposed(1)
    one.close()
    other.proposed(2)
    with pytest.raises(StoreError, match="another driver"):
        other.journal.follow()


def test_backlog_is_completed_after_a_refused_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LakePath(f"file://{tmp_path}/journal.log")
    journal = Journal(target, chunk_bytes=8)
    journal.append_logs([{"n": 0}])
    journal.follow()
    journal.append_logs([{"n": number} for number in range(1, 5)])
    append, calls = LakePath.append, iter(range(99))

    def refuses_the_third(self: LakePath, content: bytes, at: int) -> int:
        if next(calls) == 2:
            raise StoreError("refused", "unreachable")
        return append(self, content, at)

    monkeypatch.setattr(LakePath, "append", refuses_the_third)
    with pytest.raises(StoreError, match="refused"):
        journal.follow()
    journal.follow()
    assert journal.lake_size == journal.size
    assert [log["n"] for log in Journal(target).read_logs(0)] == [0, 1, 2, 3, 4]


def test_invalid_journal_is_refused_with_the_line(tmp_path: Path) -> None:
    content = b'{"op_code":0}\nnot this\nnor this'
    (tmp_path / "journal.log").write_bytes(content)
    with pytest.raises(StoreError, match="line 2 .*b'not this'"):
        Journal(LakePath(f"file://{tmp_path}/journal.log"))
    assert (tmp_path / "journal.log").read_bytes() == content


def test_another_direction_is_refused(open_session: Callable[..., Session]) -> None:
    open_session().close()
    with pytest.raises(ConfigError, match="direction='maximize'"):
        open_session(direction="maximize")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (CHOICE(["a", "b", "c"]), "space['x']=CategoricalDistribution(choices=('a', 'b', 'c'))"),
        (INT(0, 1), "to resume has CategoricalDistribution(choices=('a', 'b'))"),
    ],
)
def test_a_space_that_does_not_fit_the_study_is_refused(
    open_session: Callable[..., Session], other: Any, said: str
) -> None:
    first = open_session({"x": CHOICE(["a", "b"]), "y": FLOAT(0, 1)})
    first.proposed(1)
    check_same_space(first.study, {"x": CHOICE(["a", "b"]), "y": FLOAT(0.5, 2), "new": INT(0, 1)})
    check_same_space(first.study, {"new": INT(0, 1)})
    check_same_space(first.study, lambda trial: {})
    with pytest.raises(ConfigError) as error:
        check_same_space(first.study, {"x": other})
    assert said in str(error.value) and "another name" in str(error.value)


def test_a_function_that_does_not_fit_the_study_is_told_what_may_change(
    open_session: Callable[..., Session],
) -> None:
    values = [["a", "b"], ["c", "d"]]
    talking = open_session(lambda trial: {"x": trial.suggest_categorical("x", values.pop(0))})
    talking.proposed(1)
    talking.thread.ask(1)
    (failed,) = talking.news(1)
    assert isinstance(failed, SamplerFailed)
    assert "only bounds may change" in str(as_user_error(failed.error))


def test_the_pruner_condemns_what_is_worse(open_session: Callable[..., Session]) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    session = open_session(pruner=pruner)
    session.proposed(2)
    session.thread.report(0, [(step, 0.1) for step in range(5)])
    session.thread.record_end(0, ItemEnd.COMPLETE, 0.1, {})
    session.thread.report(1, [(0, 0.9), (1, 0.9)])
    assert session.news(1) == [PruneRequested(1)]
    session.thread.record_end(1, ItemEnd.PRUNED, None, {})
    # A late word of a trial that has ended is no error.
    session.thread.report(1, [(2, 0.9)])
    session.close()
    assert session.study.trials[1].state is optuna.trial.TrialState.PRUNED
    assert session.study.trials[1].value == 0.9


def test_steps_that_a_restarted_trial_reports_again_are_no_news(
    open_session: Callable[..., Session], recwarn: pytest.WarningsRecorder
) -> None:
    before = open_session()
    before.proposed(1)
    before.thread.report(0, [(0, 0.5), (1, 0.4)])
    before.close()
    after = open_session()
    after.proposed(1)
    after.thread.report(0, [(0, 0.9), (1, 0.8), (2, 0.7)])
    after.thread.report(0, [(2, 0.6)])
    after.thread.record_end(0, ItemEnd.COMPLETE, 0.7, {})
    after.close()
    assert after.study.trials[0].intermediate_values == {0: 0.5, 1: 0.4, 2: 0.7}
    assert not [str(one.message) for one in recwarn if "reported" in str(one.message)]


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_is_judged_by_the_pruner(open_session: Callable[..., Session]) -> None:
    session = open_session(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    session.proposed(2)
    session.thread.report(0, [(0, 0.1)])
    session.thread.record_end(0, ItemEnd.COMPLETE, 0.1, {})
    session.thread.report(1, [(0, float("nan"))])
    assert session.news(1) == [PruneRequested(1)]


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes", "genetic"])
def test_a_seed_has_the_same_proposed_again(sampler: str, tmp_path: Path) -> None:
    space = {"x": FLOAT(0.0, 1.0), "y": FLOAT(-5.0, 5.0)}

    def proposals(directory: Path) -> list[Any]:
        directory.mkdir()
        session = Session(directory, space, sampler=sampler, seed=7)
        found = []
        for number in range(15):
            (one,) = session.proposed(1)
            found.append(one.arguments)
            session.thread.record_end(number, ItemEnd.COMPLETE, one.arguments["x"] ** 2, {})
        session.close()
        return found

    assert proposals(tmp_path / "a") == proposals(tmp_path / "b")


def test_a_grid_proposes_each_point_once(open_session: Callable[..., Session]) -> None:
    space = {"n": INT(1, 2), "c": CHOICE(["a", "b"]), "f": FLOAT(0.0, 0.5, step=0.5)}
    session = open_session(space, sampler="grid", seed=1)
    session.thread.ask(10)
    news = session.news(10)
    points = [tuple(one.arguments.values()) for one in news if isinstance(one, Proposed)]
    assert len(points) == len(set(points)) == 8
    assert sum(isinstance(one, SamplerExhausted) for one in news) == 2
    for number in range(8):
        session.thread.record_end(number, ItemEnd.COMPLETE, 0.0, {})
    session.close()


def test_a_grid_has_no_value_beyond_its_end() -> None:
    grid = spaces.grid_of({"x": FLOAT(0.0, 0.3, step=0.1)})
    assert grid["x"] == [0.0, 0.1, 0.2, 0.3]


def test_a_function_gives_the_arguments(open_session: Callable[..., Session]) -> None:
    def space(trial: Any) -> dict[str, Any]:
        kind = trial.suggest_categorical("kind", ["sgd"])
        return {"kind": kind, "rate": trial.suggest_float("rate", 0.1, 0.2), "fixed": 3}

    session = open_session(space)
    (one,) = session.proposed(1)
    assert one.params.keys() == {"kind", "rate"}
    assert one.arguments == {**one.params, "fixed": 3}


def test_error_of_the_users_space_ends_the_search(open_session: Callable[..., Session]) -> None:
    def space(trial: Any) -> Any:
        raise KeyError("mine")

    session = open_session(space)
    session.thread.ask(1)
    (broken,) = session.news(1)
    assert isinstance(broken, SamplerFailed) and isinstance(broken.error, KeyError)


def test_trials_that_end_after_the_users_space_has_raised_are_kept(
    open_session: Callable[..., Session],
) -> None:
    def space(trial: Any) -> Any:
        if trial.number:
            raise KeyError("mine")

    session = open_session(space)
    session.thread.ask(2)
    first, broken = session.news(2)
    assert isinstance(first, Proposed) and isinstance(broken, SamplerFailed)
    session.thread.ask(1)
    session.thread.record_end(0, ItemEnd.COMPLETE, 0.5, {})
    session.close()
    assert session.study.best_value == 0.5 and len(session.study.trials) == 2


def test_end_that_optuna_cannot_record_is_a_warning(
    open_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session()
    session.proposed(1)
    monkeypatch.delattr(optuna.Study, "tell")
    session.thread.record_end(0, ItemEnd.COMPLETE, 0.5, {})
    session.close()
    assert isinstance(session.thread.failure, AttributeError)


def test_trial_that_the_space_prunes_is_reported(
    open_session: Callable[..., Session],
) -> None:
    def space(trial: Any) -> None:
        raise optuna.TrialPruned

    session = open_session(space)
    session.thread.ask(3)
    assert session.news(3) == [Declined(0), Declined(1), Declined(2)]
    session.close()
    assert count_ended(session.study) == 3


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "must be a mapping of parameter names to Optuna distributions"),
        ({"x": (0, 1)}, "Float-, Int- or CategoricalDistribution"),
        ({"no name": FLOAT(0, 1)}, "a parameter's name must be"),
        (3, "a function"),
    ],
)
def test_no_space(space: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spaces.check_space(space)


def test_samplers_and_pruners_are_optunas() -> None:
    space = {"x": FLOAT(0.0, 1.0)}
    own = optuna.samplers.RandomSampler(seed=3)
    assert spaces.sampler_of(own, space, None) is own
    with pytest.raises(ConfigError, match="sampler itself"):
        spaces.sampler_of(own, space, 3)
    with pytest.raises(ConfigError, match="'cmaes'"):
        spaces.sampler_of("annealing", space, None)
    with pytest.raises(ConfigError, match="a step"):
        spaces.sampler_of("grid", space, None)
    assert isinstance(spaces.pruner_of("asha"), optuna.pruners.SuccessiveHalvingPruner)
    assert isinstance(spaces.pruner_of(None), optuna.pruners.NopPruner)
    with pytest.raises(ConfigError, match="'hyperband'"):
        spaces.pruner_of("mean")


def test_a_study_knows_whether_its_trials_had_other_code(
    open_session: Callable[..., Session],
) -> None:
    first = open_session()
    assert not record_code(first.study, "sha256:1")
    assert not record_code(first.study, "sha256:1")
    first.close()
    again = open_session()
    assert not record_code(again.study, "sha256:1")
    assert record_code(again.study, "sha256:2")
    assert not record_code(again.study, "sha256:2")
