"""Where a trial's rank meets: taken over from the last one on its slot, where that ended well."""

from __future__ import annotations

import pytest

from hopsgpu.core.gang import World
from hopsgpu.frameworks.endpoints import Endpoints
from hopsgpu.launcher.rendezvous import Rendezvous
from hopsgpu.tuning.scheduler import Slot, TrialEnd
from hopsgpu.tuning.trial_run import RendezvousCache

MET = Rendezvous(World((), 1), Endpoints(("127.0.0.1", 1), ("127.0.0.1", 2), ()))
SLOT, BESIDE, OTHER = Slot(1, 0), Slot(1, 1), Slot(2, 0)


@pytest.mark.parametrize("how", TrialEnd)
def test_only_a_trial_that_ended_well_leaves_its_meeting_and_only_once(how: TrialEnd) -> None:
    meetings = RendezvousCache()
    meetings.keep([SLOT], MET, how)
    assert meetings.taken([BESIDE]) is None and meetings.taken([OTHER]) is None
    left = meetings.taken([SLOT])
    assert left is (MET if how in (TrialEnd.COMPLETE, TrialEnd.PRUNED) else None)
    assert meetings.taken([SLOT]) is None


def test_several_ranks_meet_anew_and_leave_no_meeting() -> None:
    meetings = RendezvousCache()
    meetings.keep([SLOT, OTHER], MET, TrialEnd.COMPLETE)
    assert meetings.taken([SLOT]) is None
    meetings.keep([SLOT], MET, TrialEnd.COMPLETE)
    assert meetings.taken([SLOT, OTHER]) is None
    assert meetings.taken([SLOT]) is None, "what a gang had on the slot since is not known"


def test_a_rank_that_did_not_meet_leaves_nothing() -> None:
    meetings = RendezvousCache()
    meetings.keep([SLOT], None, TrialEnd.COMPLETE)
    assert meetings.taken([SLOT]) is None
