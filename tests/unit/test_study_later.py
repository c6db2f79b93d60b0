"""What of a search has time until the trials that were started have begun."""

from __future__ import annotations

from hopsgpu.study.later import Later


def done(later: Later, now: float, *, hurry: bool = False) -> list[object]:
    return [work() for work in later.due(now, hurry=hurry)]


def test_work_waits_for_the_trials_that_are_about_to_begin_and_keeps_its_order() -> None:
    later = Later()
    later.put(lambda: "before")
    assert done(later, 0.0) == ["before"] and done(later, 0.0) == []
    later.started(1, 0.0)
    later.started(2, 0.01)
    later.put(lambda: "told")
    later.put(lambda: "asked")
    assert done(later, 0.02) == []
    later.begun(1)
    assert done(later, 0.03) == []
    later.begun(2)
    later.begun(2)
    assert done(later, 0.03) == ["told", "asked"] and done(later, 0.03) == []


def test_work_does_not_wait_long_nor_where_it_is_wanted() -> None:
    later = Later()
    later.started(1, 0.0)
    later.put(lambda: "wanted")
    assert done(later, 0.0, hurry=True) == ["wanted"]
    later.put(lambda: "late")
    assert done(later, 0.09) == [] and done(later, 0.11) == ["late"]
