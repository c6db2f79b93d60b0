"""Records and logs of runs on an object store, which has no directories and does not append."""

from __future__ import annotations

import time

from hopsgpu.artifacts.runs import RunStore
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.core.gang import GangExecutor, assign_ranks
from hopsgpu.display.base import NoDisplay
from hopsgpu.runs.run_details import write
from hopsgpu.storage.lake import LakePath
from tests.contract import test_runs
from tests.objects.contracts import contracts_of
from tests.unit.records import record_of

# They have a directory without files, or append.
WITHOUT = (
    "test_runs_are_listed_cancelled_and_pruned",
    "test_tensorboards_files_are_copied_as_they_grow",
)
globals().update(contracts_of(test_runs, WITHOUT))


def test_a_run_that_may_have_changed_is_listed(lake: LakePath) -> None:
    store = RunStore(lake.url)
    assert store.ids() == () and store.last_change_ms() is None
    write(store.directory(test_runs.RUN), record_of(test_runs.RUN, "running", time.time()))
    # Its directory has no time.
    assert store.ids(changed_since=1e10) == (test_runs.RUN,)
    store.ask_to_cancel(test_runs.RUN)
    assert (store.directory(test_runs.RUN) / "cancel").exists()


def test_a_log_is_written_anew_when_a_fifth_of_it_is_new(lake: LakePath) -> None:
    container = GangExecutor(0, "container_0", "node1", "10.0.0.1", ())
    log = lake / "rank-0.log"
    with Outputs(assign_ranks([container], 1), NoDisplay()) as outputs:
        for more, there in ((100, 100), (100, 200), (40, 200), (9, 200), (1, 250), (5, 250)):
            outputs.add(0, b"x" * more)
            for _, work in outputs.pending_appends(lake):
                work()
            assert log.stat().size == there
        for _, work in outputs.take_over().uploads(lake):
            work()
    assert log.read() == b"x" * 255
