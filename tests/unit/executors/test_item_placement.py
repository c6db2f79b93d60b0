"""Where trials run, and when executors come and go; simulated, with a clock that is set."""

from __future__ import annotations

import heapq
import itertools
import random
import time

from hopsgpu.core.gang import PART_SECONDS
from hopsgpu.executors.item_placement import (
    MAX_LOSSES,
    Decision,
    ItemEnd,
    Placement,
    PlacementTerms,
    Slot,
    Start,
)


def placement(trials: int, most: int, **terms: int) -> Placement:
    return Placement(PlacementTerms(trials, most, **terms))


def propose(there: Placement, decision: Decision, numbers: itertools.count[int]) -> None:
    """Optuna answers at once."""
    there.requested += decision.proposals
    for _ in range(decision.proposals):
        there.add_item(next(numbers))


def begin(there: Placement, now: float = 0.0) -> list[Start]:
    """Performs a decision's starts."""
    starts = there.decide(now).starts
    for start in starts:
        there.record_start(start, now)
    return list(starts)


def trials_on(there: Placement, executor: int) -> list[int]:
    """The trials with a rank on an executor."""
    return [t for t, slots in there.running.items() if any(s.executor == executor for s in slots)]


def ready(trials: int, most: int, **terms: int) -> Placement:
    """One with proposals for all its trials."""
    there = placement(trials, most, **terms)
    there.requested = trials
    for number in range(trials):
        there.add_item(number)
    return there


def test_the_first_trial_starts_on_the_first_executor_that_comes() -> None:
    there = placement(10, 4)
    decision = there.decide(0.0)
    assert decision.wanted == 4 and not decision.starts and decision.proposals >= 1
    propose(there, decision, itertools.count())
    assert not begin(there)
    there.add_executor(7, "node1", 1.0)
    assert begin(there, 1.0) == [Start(0, (Slot(7, 0),))]
    assert there.decide(1.0).wanted == 4


def test_no_more_is_asked_for_than_the_trials_that_are_left_can_use() -> None:
    there = ready(3, 8)
    assert there.decide(0.0).wanted == 3
    there.add_executor(1, "node1", 0.0)
    begin(there)
    there.record_end(0, ItemEnd.COMPLETE, 1.0)
    assert there.decide(1.0).wanted == 2


def test_executors_without_a_trial_go_while_the_last_trials_run() -> None:
    there = ready(5, 4)
    for key in range(4):
        there.add_executor(key, "node1", 0.0)
    assert len(begin(there)) == 4
    there.record_end(0, ItemEnd.COMPLETE, 1.0)
    assert [start.item for start in begin(there, 1.0)] == [4]
    assert there.decide(1.0).release == ()
    there.record_end(1, ItemEnd.FAILED, 2.0)
    there.record_end(2, ItemEnd.PRUNED, 2.0)
    decision = there.decide(2.0)
    assert set(decision.release) == {1, 2} and decision.wanted == 2 and not decision.is_over
    there.record_release(decision.release, 2.0, 0.0)
    there.record_end(3, ItemEnd.COMPLETE, 3.0)
    there.record_end(4, ItemEnd.COMPLETE, 3.0)
    assert there.decide(3.0).is_over and set(there.decide(3.0).release) == {0, 3}


def test_a_trial_that_loses_its_executor_is_the_next_to_start_and_fails_after_three() -> None:
    there = ready(2, 1)
    for number in range(MAX_LOSSES):
        there.add_executor(number, "node1", 0.0)
        assert [start.item for start in begin(there)] == [0]
        there.remove_executor(number, 1.0)
        how = there.record_end(0, ItemEnd.LOST, 1.0)
    assert how is ItemEnd.FAILED and there.failures == 1
    there.add_executor(9, "node1", 2.0)
    assert [start.item for start in begin(there)] == [1]


def test_a_trial_that_is_preempted_is_put_back_however_often() -> None:
    there = ready(2, 1)
    for number in range(2 * MAX_LOSSES):
        there.add_executor(number, "node1", 0.0)
        assert [start.item for start in begin(there)] == [0]
        there.remove_executor(number, 1.0)
        assert there.record_end(0, ItemEnd.PREEMPTED, 1.0) is ItemEnd.PREEMPTED
    assert there.failures == there.ended == 0


def test_a_rank_that_is_lost_keeps_the_places_of_the_others_until_they_are_gone() -> None:
    there = ready(2, 1, ranks=2)
    there.add_executor(0, "node1", 0.0)
    there.add_executor(1, "node1", 0.0)
    (start,) = begin(there)
    there.remove_executor(1, 1.0)
    there.add_executor(2, "node1", 1.0)
    # Its other rank still ends on executor 0.
    assert not begin(there, 1.0) and there.taken_slots == {0: 1, 2: 0}
    there.record_end(start.item, ItemEnd.LOST, 2.0)
    assert [again.item for again in begin(there, 2.0)] == [start.item]


def test_too_many_failures_stop_what_runs() -> None:
    there = ready(9, 2, max_failures=0)
    there.add_executor(0, "node1", 0.0)
    there.add_executor(1, "node1", 0.0)
    begin(there)
    there.record_end(0, ItemEnd.FAILED, 1.0)
    decision = there.decide(1.0)
    assert decision.should_stop and not decision.is_over and not decision.starts
    assert there.record_end(1, ItemEnd.STOPPED, 2.0) is ItemEnd.STOPPED
    assert there.decide(2.0).is_over and there.failures == 1


def test_an_exhausted_sampler_ends_the_search() -> None:
    there = placement(100, 4)
    there.add_executor(0, "node1", 0.0)
    there.requested = 2
    there.add_item(0)
    there.record_exhaustion()
    begin(there)
    assert there.decide(0.0).proposals == 0
    there.record_end(0, ItemEnd.COMPLETE, 1.0)
    assert there.decide(1.0).is_over


def test_fewer_trials_than_the_least_start_where_the_sampler_has_no_more() -> None:
    there = placement(100, 4, min_running=4)
    there.requested = 2
    there.add_item(0)
    there.record_exhaustion()
    assert there.decide(0.0).wanted == there.decide(0.0).at_once == 1
    there.add_executor(0, "node1", 0.0)
    assert [start.item for start in begin(there)] == [0]


def test_a_trial_that_the_space_does_not_want_has_ended() -> None:
    there = placement(2, 1)
    there.requested = there.decide(0.0).proposals
    there.record_decline()
    there.record_decline()
    assert there.decide(0.0).is_over and there.ended == 2


def test_trials_share_an_executor_and_fill_the_fullest_first() -> None:
    there = ready(6, 6, slots=2)
    there.add_executor(0, "node1", 0.0)
    there.add_executor(1, "node2", 0.0)
    assert there.decide(0.0).wanted == 3
    starts = begin(there)
    assert [slot for start in starts for slot in start.slots] == [
        Slot(0, 0),
        Slot(0, 1),
        Slot(1, 0),
        Slot(1, 1),
    ]
    there.record_end(0, ItemEnd.COMPLETE, 1.0)
    there.record_end(2, ItemEnd.COMPLETE, 1.0)
    there.record_end(3, ItemEnd.COMPLETE, 1.0)
    # Executor 0 is half full: it is filled before the idle one.
    assert [start.slots[0].executor for start in begin(there, 1.0)] == [0, 1]


def test_a_trial_of_several_workers_waits_for_all_of_them_and_prefers_one_host() -> None:
    there = ready(2, 2, ranks=2)
    there.add_executor(0, "node1", 0.0)
    there.add_executor(1, "node2", 0.0)
    there.add_executor(2, "node2", 0.0)
    # With one more, the executor that is left over takes a trial.
    assert there.decide(0.0).wanted == 4 and there.decide(0.0).at_once == 1
    (start,) = begin(there)
    assert {slot.executor for slot in start.slots} == {1, 2}
    assert there.decide(0.0).release == ()


def test_as_many_executors_must_come_together_as_a_trial_lacks() -> None:
    there = ready(9, 3, ranks=3, slots=2)
    assert (there.decide(0.0).at_once, there.decide(0.0).wanted) == (2, 5)
    there.add_executor(0, "node1", 0.0)
    there.add_executor(1, "node1", 0.0)
    begin(there)
    # One slot is left over of four.
    assert there.decide(0.0).at_once == 1
    there.add_executor(2, "node1", 0.0)
    begin(there)
    # None is left over of six.
    assert there.decide(0.0).at_once == 2


def test_a_part_of_a_trial_is_not_held_for_ever() -> None:
    """Two searches with half of what they want each would wait for each other."""
    there = ready(4, 2, ranks=2)
    there.add_executor(0, "node1", 5.0)
    assert there.decide(5.0 + PART_SECONDS - 1).release == ()
    decision = there.decide(5.0 + PART_SECONDS)
    assert decision.release == (0,) and decision.wanted == 0
    there.record_release(decision.release, 5.0 + PART_SECONDS, pause=10.0)
    assert there.decide(40.0).wanted == 0
    assert there.decide(45.0).wanted == 4


def test_a_share_that_is_left_over_on_a_busy_executor_does_not_keep_a_search_from_growing() -> None:
    there = ready(9, 4, ranks=3, slots=2)
    there.add_executor(0, "node1", 0.0)
    there.add_executor(1, "node1", 0.0)
    assert len(begin(there)) == 1
    later = there.decide(PART_SECONDS + 1.0)
    assert later.wanted == 6 and not later.release


def test_nothing_starts_before_the_least_can_run_at_a_time() -> None:
    there = ready(9, 4, min_running=2)
    assert there.decide(0.0).at_once == 2
    there.add_executor(0, "node1", 0.0)
    assert not begin(there)
    there.add_executor(1, "node1", 1.0)
    assert len(begin(there)) == 2
    there.remove_executor(1, 2.0)
    there.record_end(1, ItemEnd.LOST, 2.0)
    there.record_end(0, ItemEnd.COMPLETE, 2.0)
    # It has begun: one executor is enough to go on.
    assert [start.item for start in begin(there)] == [1]
    assert there.decide(2.0).at_once == 1


def test_closing_stops_all_and_starts_nothing() -> None:
    there = ready(5, 2)
    there.add_executor(0, "node1", 0.0)
    begin(there)
    there.is_closing = True
    decision = there.decide(1.0)
    assert decision.should_stop and not decision.starts and decision.wanted == 0
    there.record_end(0, ItemEnd.STOPPED, 2.0)
    assert there.decide(2.0).is_over and list(there.waiting)[0] == 0


class Simulation:
    """A search whose executors come one by one and are lost now and then; its clock is set.

    Attributes:
        held: executor seconds.
        used: of them those in which a trial ran.
    """

    def __init__(self, executors: int, trials: int, seed: int = 0) -> None:
        self.there = placement(trials, executors)
        self.held = self.used = self.now = 0.0
        self._chance = random.Random(seed)
        self._numbers, self._keys, self._order = (itertools.count() for _ in range(3))
        self._events: list[tuple[float, int, str, int, int]] = []
        self._coming = 0

    def run(self) -> None:
        while not (decision := self.there.decide(self.now)).is_over:
            self._do(decision)
            if not decision.proposals and not decision.starts:
                self._happen()

    def _at(self, seconds: float, what: str, which: int, tries: int = 0) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, which, tries))

    def _do(self, decision: Decision) -> None:
        propose(self.there, decision, self._numbers)
        self.there.record_release(decision.release, self.now, 1.0)
        while len(self.there.executors) + self._coming < decision.wanted:
            self._coming += 1
            self._at(self._chance.uniform(1.0, 5.0), "came", next(self._keys))
        for start in decision.starts:
            self.there.record_start(start, self.now)
            if self._chance.random() < 0.001:
                self._at(0.2, "lost", start.slots[0].executor)
            tries = self.there.count_tries(start.item)
            self._at(self._chance.uniform(0.5, 5.0), "ended", start.item, tries)

    def _happen(self) -> None:
        before = self.now
        self.now, _, what, which, tries = heapq.heappop(self._events)
        self.held += (self.now - before) * len(self.there.executors)
        self.used += (self.now - before) * len(self.there.running)
        if what == "came":
            self._coming -= 1
            self.there.add_executor(which, f"node{which % 32}", self.now)
        elif what == "lost":
            self.there.remove_executor(which, self.now)
            for trial in trials_on(self.there, which):
                self.there.record_end(trial, ItemEnd.LOST, self.now)
        elif which in self.there.running and tries == self.there.count_tries(which):
            self.there.record_end(which, ItemEnd.COMPLETE, self.now)


def test_ten_thousand_trials_on_256_executors() -> None:
    began = time.process_time()
    simulation = Simulation(256, 10_000)
    simulation.run()
    took = time.process_time() - began
    assert simulation.there.ended == 10_000
    assert simulation.used / simulation.held > 0.95
    # What is simulated takes two minutes and more; the bound is one core's for all of it.
    assert took < simulation.now, f"{took:.1f} s"


def test_an_executor_gets_its_next_trial_early_while_enough_are_left_for_all() -> None:
    there = ready(6, 2, ahead=1)
    for key in range(2):
        there.add_executor(key, "node1", 0.0)
    assert [start.slots[0].executor for start in begin(there)] == [0, 1, 0, 1]
    assert there.decide(0.0).wanted == 2
    there.record_end(0, ItemEnd.COMPLETE, 1.0)
    # Two wait for two executors: each keeps one for when it has none.
    assert not begin(there, 1.0)
    there.record_end(2, ItemEnd.COMPLETE, 2.0)
    assert [start.slots[0].executor for start in begin(there, 2.0)] == [0]


def test_an_executor_without_a_trial_goes_although_another_has_one_ahead() -> None:
    there = ready(3, 2, ahead=1)
    there.add_executor(0, "node1", 0.0)
    assert len(begin(there)) == 2
    there.add_executor(1, "node1", 0.0)
    assert len(begin(there)) == 1
    there.record_end(2, ItemEnd.COMPLETE, 1.0)
    decision = there.decide(1.0)
    assert decision.release == (1,) and decision.wanted == 1


def test_a_trial_fails_as_often_as_the_terms_allow_and_losses_count() -> None:
    there = ready(1, 1, max_tries=3)
    for number, how in enumerate([ItemEnd.FAILED, ItemEnd.LOST]):
        there.add_executor(number, "node1", 0.0)
        begin(there)
        assert there.record_end(0, how, 1.0) is ItemEnd.LOST
        there.remove_executor(number, 1.0)
    there.add_executor(9, "node1", 2.0)
    begin(there)
    assert there.record_end(0, ItemEnd.FAILED, 3.0) is ItemEnd.FAILED and there.failures == 1
