"""What changed among the runs of a root since the last look, on every lake."""

from __future__ import annotations

import time

from hopsgpu.artifacts.run_changes import REREAD_SECONDS, RunChanges
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_record import RunRecord
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from tests.unit.records import RecordedRun

FIRST, SECOND = "fit-20261120-230000-aaaaaa", "fit-20261121-100000-bbbbbb"


class Reader:
    """Looks at a root by a clock that a test sets; notes which records are read."""

    def __init__(self, root: LakePath) -> None:
        self.now = 1000.0
        self.read: list[str] = []
        self.changes = RunChanges(root, self._digest, lambda: self.now)

    def _digest(self, record: RunRecord) -> str:
        self.read.append(record.run_id)
        if record.state == "preparing":
            raise StoreError("its numbers are odd", "damaged")
        return record.state

    def poll(self) -> tuple[dict[str, str], tuple[str, ...], int]:
        found = self.changes.poll()
        assert found.problem == ""
        return found.read, found.removed, found.unreadable


def ended(lake: LakePath, run_id: str) -> RecordedRun:
    run = RecordedRun(lake, run_id, time.time() - 100.0)
    run.trains(run.now + 1, run.now + 2)
    run.ends(run.now + 3, run.now + 4, run.now + 5, GangState.SUCCEEDED)
    return run


def test_each_poll_reads_what_changed(lake: LakePath) -> None:
    reader = Reader(lake)
    assert reader.poll() == ({}, (), 0)
    ended(lake, FIRST)
    live = RecordedRun(lake, SECOND, time.time())
    assert reader.poll() == ({FIRST: "succeeded", SECOND: "requested"}, (), 0)
    assert reader.poll() == ({}, (), 0)
    assert reader.poll() == ({}, (), 0)
    time.sleep(0.05)  # the file systems' clocks go in steps
    live.put("waiting")
    assert reader.poll() == ({SECOND: "waiting"}, (), 0)
    (lake / "runs" / FIRST).remove()
    assert reader.poll() == ({}, (FIRST,), 0)
    assert reader.poll() == ({}, (), 0)
    time.sleep(0.05)  # two polls within one step see the same time before and after a change
    ended(lake, FIRST)
    assert reader.poll() == ({FIRST: "succeeded"}, (), 0)


def test_only_records_of_runs_that_go_on_are_read_again_without_a_change(lake: LakePath) -> None:
    ended(lake, FIRST)
    RecordedRun(lake, SECOND, time.time())
    reader = Reader(lake)
    reader.poll()
    reader.now += REREAD_SECONDS + 1
    reader.read.clear()
    assert reader.poll()[0] == {SECOND: "requested"}
    assert reader.read == [SECOND]


def test_what_cannot_be_read_is_read_again_later_or_once_it_changes(lake: LakePath) -> None:
    (lake / "runs" / FIRST).make()
    (lake / "runs" / FIRST / "run.json").write(b"{")
    run = RecordedRun(lake, SECOND, time.time())
    run.put("preparing")
    reader = Reader(lake)
    assert reader.poll() == ({}, (), 2)
    reader.read.clear()
    assert reader.poll() == ({}, (), 2)
    assert reader.poll() == ({}, (), 2)
    assert reader.read == []
    time.sleep(0.05)
    run.put("waiting")
    assert reader.poll() == ({SECOND: "waiting"}, (), 1)
    # Repaired in place, which the directory does not show.
    (lake / "runs" / SECOND / "copy.json").write((lake / "runs" / SECOND / "run.json").read())
    whole = (lake / "runs" / SECOND / "run.json").read().replace(SECOND.encode(), FIRST.encode())
    (lake / "runs" / FIRST / "run.json").write(whole)
    reader.poll()
    reader.now += REREAD_SECONDS + 1
    assert reader.poll()[0] == {FIRST: "waiting", SECOND: "waiting"}
    assert reader.poll() == ({}, (), 0)
