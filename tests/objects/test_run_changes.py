"""What changed of the runs on an object store, whose directories have no times."""

from __future__ import annotations

import time

from hopsgpu.artifacts.run_changes import REREAD_SECONDS
from hopsgpu.storage.lake import LakePath
from tests.contract.test_run_changes import FIRST, SECOND, Reader, ended
from tests.unit.records import RecordedRun

THIRD = "fit-20261121-110000-cccccc"


def test_each_look_reads_the_runs_that_go_on(lake: LakePath) -> None:
    reader = Reader(lake)
    assert reader.poll() == ({}, (), 0)
    ended(lake, FIRST)
    going = RecordedRun(lake, SECOND, time.time())
    assert reader.poll() == ({FIRST: "succeeded", SECOND: "requested"}, (), 0)
    for state in ("waiting", "running"):
        going.put(state)
        assert reader.poll() == ({SECOND: state}, (), 0)
    # A run that began since is seen at once.
    RecordedRun(lake, THIRD, time.time())
    assert reader.poll() == ({SECOND: "running", THIRD: "requested"}, (), 0)
    (lake / "runs" / FIRST).remove()
    assert reader.poll()[1] == (FIRST,)


def test_what_cannot_be_read_is_read_again_later(lake: LakePath) -> None:
    reader = Reader(lake)
    run = RecordedRun(lake, FIRST, time.time())
    run.put("preparing")
    assert reader.poll() == ({}, (), 1)
    run.put("waiting")
    assert reader.poll() == ({}, (), 1)
    assert reader.read == [FIRST]
    reader.now += REREAD_SECONDS + 1
    assert reader.poll() == ({FIRST: "waiting"}, (), 0)
