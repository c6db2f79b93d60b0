"""What of a search has time until the trials that were started have begun."""

from __future__ import annotations

from hopsgpu.tuning.deferred_work import DeferredWork


def done(later: DeferredWork, now: float, *, hurry: bool = False) -> list[object]:
    return [work() for work in later.due(now, hurry=hurry)]


def test_work_waits_for_the_trials_that_are_about_to_begin_and_keeps_its_order() -> None:
    later = DeferredWork()
    later.put(lambda: "before", 0.0)
    assert done(later, 0.0) == ["before"] and done(later, 0.0) == []
    later.started(1)
    later.started(2)
    later.put(lambda: "told", 0.01)
    later.put(lambda: "asked", 0.02)
    assert done(later, 0.02) == []
    later.begun(1)
    assert done(later, 0.03) == []
    later.begun(2)
    later.begun(2)
    assert done(later, 0.03) == ["told", "asked"] and done(later, 0.03) == []


def test_work_does_not_wait_long_nor_where_it_is_wanted() -> None:
    later = DeferredWork()
    assert later.patience(0.0) == float("inf")
    later.started(1)
    later.put(lambda: "wanted", 0.0)
    assert done(later, 0.0, hurry=True) == ["wanted"] and later.patience(0.0) == float("inf")
    later.put(lambda: "late", 1.0)
    # Trials that begin one after another do not put it off further.
    for trial, now in ((2, 1.03), (3, 1.06), (4, 1.09)):
        later.begun(trial - 1)
        later.started(trial)
        assert 0 < later.patience(now) < 0.1 and done(later, now) == []
    later.put(lambda: "behind", 1.09)
    assert later.patience(1.11) == 0 and done(later, 1.11) == ["late", "behind"]
