"""Where a trial's rank meets: taken over from the last one on its slot, where that ended well."""

from __future__ import annotations

import pytest

from hopsgpu.core.gang import World
from hopsgpu.frameworks.endpoints import Endpoints
from hopsgpu.launcher.rendezvous import Meeting
from hopsgpu.tuning.scheduler import End, Slot
from hopsgpu.tuning.trial_run import Meetings

MET = Meeting(World((), 1), Endpoints(("127.0.0.1", 1), ("127.0.0.1", 2), ()))
SLOT, BESIDE, OTHER = Slot(1, 0), Slot(1, 1), Slot(2, 0)


@pytest.mark.parametrize("how", End)
def test_only_a_trial_that_ended_well_leaves_its_meeting_and_only_once(how: End) -> None:
    meetings = Meetings()
    meetings.keep([SLOT], MET, how)
    assert meetings.taken([BESIDE]) is None and meetings.taken([OTHER]) is None
    left = meetings.taken([SLOT])
    assert left is (MET if how in (End.COMPLETE, End.PRUNED) else None)
    assert meetings.taken([SLOT]) is None


def test_several_ranks_meet_anew_and_leave_no_meeting() -> None:
    meetings = Meetings()
    meetings.keep([SLOT, OTHER], MET, End.COMPLETE)
    assert meetings.taken([SLOT]) is None
    meetings.keep([SLOT], MET, End.COMPLETE)
    assert meetings.taken([SLOT, OTHER]) is None
    assert meetings.taken([SLOT]) is None, "what a gang had on the slot since is not known"


def test_a_rank_that_did_not_meet_leaves_nothing() -> None:
    meetings = Meetings()
    meetings.keep([SLOT], None, End.COMPLETE)
    assert meetings.taken([SLOT]) is None
