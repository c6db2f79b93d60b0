"""What of a search has time until the trials that were started have begun."""

from __future__ import annotations

from hopsgpu.tuning.deferred_work import DeferredWork


def done(later: DeferredWork, now: float, *, is_urgent: bool = False) -> list[object]:
    return [work() for work in later.take_due(now, is_urgent=is_urgent)]


def test_work_waits_for_the_trials_that_are_about_to_begin_and_keeps_its_order() -> None:
    later = DeferredWork()
    later.add(lambda: "before", 0.0)
    assert done(later, 0.0) == ["before"] and done(later, 0.0) == []
    later.record_starting(1)
    later.record_starting(2)
    later.add(lambda: "told", 0.01)
    later.add(lambda: "asked", 0.02)
    assert done(later, 0.02) == []
    later.record_started(1)
    assert done(later, 0.03) == []
    later.record_started(2)
    later.record_started(2)
    assert done(later, 0.03) == ["told", "asked"] and done(later, 0.03) == []


def test_work_does_not_wait_long_nor_where_it_is_wanted() -> None:
    later = DeferredWork()
    assert later.seconds_until_due(0.0) == float("inf")
    later.record_starting(1)
    later.add(lambda: "wanted", 0.0)
    assert done(later, 0.0, is_urgent=True) == ["wanted"] and later.seconds_until_due(0.0) == float(
        "inf"
    )
    later.add(lambda: "late", 1.0)
    # Trials that begin one after another do not put it off further.
    for trial, now in ((2, 1.03), (3, 1.06), (4, 1.09)):
        later.record_started(trial - 1)
        later.record_starting(trial)
        assert 0 < later.seconds_until_due(now) < 0.1 and done(later, now) == []
    later.add(lambda: "behind", 1.09)
    assert later.seconds_until_due(1.11) == 0 and done(later, 1.11) == ["late", "behind"]
