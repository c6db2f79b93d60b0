"""Searches of single trials and of gangs that want the same few executors; its clock is set."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from hopsgpu.executors.item_placement import Decision, ItemEnd, Placement, PlacementTerms
from tests.unit.executors.test_item_placement import trials_on

# Of simulated time; some hold a part for half a minute, and take turns.
MOST_SECONDS = 3600.0


@dataclass
class Search:
    """One search and the executors that it has."""

    there: Placement
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    is_over: bool = False


class Cluster:
    """Executors of which each search gets one at a time, at random, so that all have parts."""

    def __init__(self, executors: int, all_terms: tuple[PlacementTerms, ...], seed: int) -> None:
        self.searches = [Search(Placement(terms)) for terms in all_terms]
        self.now = 0.0
        self._free = executors
        self._chance = random.Random(seed)
        self._keys, self._order = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Search, str, int, int]] = []

    def run(self) -> None:
        """Until all have ended."""
        while not all([self._go_on(search) for search in self.searches]):
            assert self.now < MOST_SECONDS, [search.there for search in self.searches]
            if not self._grant():
                self._happen()

    def _go_on(self, search: Search) -> bool:
        while not search.is_over:
            decision = search.there.decide(self.now)
            self._release(search, decision)
            search.is_over = decision.is_over
            for start in decision.starts:
                self._start(search, start.item, decision)
            search.there.requested += decision.proposals
            for _ in range(decision.proposals):
                search.there.add_item(next(search.numbers))
            if not decision.proposals and not decision.starts:
                break
        return search.is_over

    def _release(self, search: Search, decision: Decision) -> None:
        there = search.there
        assert not any(there.taken_slots[key] for key in decision.release)
        there.record_release(decision.release, self.now, self._chance.uniform(1.0, 20.0))
        self._free += len(decision.release)

    def _start(self, search: Search, trial: int, decision: Decision) -> None:
        there = search.there
        (start,) = (start for start in decision.starts if start.item == trial)
        taken = {slot for slots in there.running.values() for slot in slots}
        assert len(set(start.slots)) == there.terms.ranks and not taken & set(start.slots)
        there.record_start(start, self.now)
        assert len(there.running) <= there.terms.max_running
        at = self.now + self._chance.uniform(0.5, 20.0)
        self._at(at, search, "ended", trial, there.count_tries(trial))
        if self._chance.random() < 0.05:
            self._at(self.now + 0.2, search, "lost", start.slots[0].executor, 0)

    def _at(self, when: float, search: Search, what: str, which: int, tries: int) -> None:
        heapq.heappush(self._events, (when, next(self._order), search, what, which, tries))

    def _grant(self) -> bool:
        wanting = []
        for search in self.searches:
            decision = search.there.decide(self.now)
            missing = decision.wanted - len(search.there.executors)
            if not search.is_over and missing > 0:
                assert decision.at_once <= missing, "they can never come together"
                wanting.append(search)
        if not self._free or not wanting:
            return False
        self._free -= 1
        key = next(self._keys)
        self._chance.choice(wanting).there.add_executor(key, f"node{key % 3}", self.now)
        return True

    def _happen(self) -> None:
        """Time goes on to the next event, or by a second, as who waits looks at the clock."""
        if not self._events or self._events[0][0] > self.now + 1.0:
            self.now += 1.0
            return
        self.now, _, search, what, which, tries = heapq.heappop(self._events)
        there = search.there
        if what == "lost" and which in there.executors:
            self._free += 1
            how = self._chance.choice((ItemEnd.LOST, ItemEnd.PREEMPTED))
            there.remove_executor(which, self.now)
            for trial in trials_on(there, which):
                there.record_end(trial, how, self.now)
        elif what == "ended" and which in there.running and there.count_tries(which) == tries:
            how = self._chance.choice((ItemEnd.COMPLETE, ItemEnd.PRUNED, ItemEnd.FAILED))
            there.record_end(which, how, self.now)


@pytest.mark.parametrize("seed", range(20))
def test_gangs_and_single_trials_come_to_their_end_on_few_executors(seed: int) -> None:
    all_terms = (
        PlacementTerms(items=20, max_running=3),
        PlacementTerms(items=6, max_running=2, ranks=3),
        PlacementTerms(items=6, max_running=2, ranks=4),
        PlacementTerms(items=8, max_running=4, ranks=3, slots=2),
        PlacementTerms(items=8, max_running=3, min_running=2, ranks=2),
    )
    cluster = Cluster(5, all_terms, seed)
    cluster.run()
    assert [search.there.ended for search in cluster.searches] == [20, 6, 6, 8, 8]
    assert cluster._free == 5
