"""Where a trial's rank meets: taken over from the last one on its slot, where that ended well."""

from __future__ import annotations

import pytest

from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.core.gang import World
from hopsgpu.executors.item_placement import ItemEnd, Slot
from hopsgpu.frameworks.endpoints import Endpoints
from hopsgpu.tuning.trial_run import RendezvousCache

MET = Rendezvous(World((), 1), Endpoints(("127.0.0.1", 1), ("127.0.0.1", 2), ()))
SLOT, BESIDE, OTHER = Slot(1, 0), Slot(1, 1), Slot(2, 0)


@pytest.mark.parametrize("how", ItemEnd)
def test_only_a_trial_that_ended_well_leaves_its_meeting_and_only_once(how: ItemEnd) -> None:
    cache = RendezvousCache()
    cache.keep([SLOT], MET, how)
    assert cache.take([BESIDE]) is None and cache.take([OTHER]) is None
    left = cache.take([SLOT])
    assert left is (MET if how in (ItemEnd.COMPLETE, ItemEnd.PRUNED) else None)
    assert cache.take([SLOT]) is None


def test_several_ranks_meet_anew_and_leave_no_meeting() -> None:
    cache = RendezvousCache()
    cache.keep([SLOT, OTHER], MET, ItemEnd.COMPLETE)
    assert cache.take([SLOT]) is None
    cache.keep([SLOT], MET, ItemEnd.COMPLETE)
    assert cache.take([SLOT, OTHER]) is None
    assert cache.take([SLOT]) is None, "what a gang had on the slot since is not known"


def test_a_rank_that_did_not_meet_leaves_nothing() -> None:
    cache = RendezvousCache()
    cache.keep([SLOT], None, ItemEnd.COMPLETE)
    assert cache.take([SLOT]) is None
