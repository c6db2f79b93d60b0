"""What metrics take from a record: its numbers, as far as they can be a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.core.run_record import RunRecord, parse
from hopsgpu.core.run_values import Timeline
from hopsgpu.core.scores import FailedPart
from hopsgpu.monitoring.run_digest import GpuReading, ScoreProgress, digest_of
from hopsgpu.storage.lake import LakePath
from tests.unit.records import SCORE, SEARCH, RecordedRun, record_of

RUN = "fit-20261120-230000-aaaaaa"
BEGAN = 1_795_300_000.0
SAMPLE = {
    "gpu.0.utilisation": 0.5,
    "gpu.0.memory_used": 2**30,
    "gpu.0.memory_total": 2**34,
    "gpu.0.power": 250.0,
}


def record(tmp_path: Path, **changes: Any) -> RunRecord:
    content = json.loads((tmp_path / "runs" / RUN / "run.json").read_text())
    return parse(json.dumps(content | changes).encode())


def recorded(tmp_path: Path) -> RecordedRun:
    return RecordedRun(LakePath(f"file://{tmp_path}"), RUN, BEGAN)


def test_a_run_that_waits_says_since_when(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.now += 5.0
    run.goes(run.now, GangState.WAITING)
    run.board.on_parked(["node3", "node3"])
    run.now += 60.0
    run.put("waiting")
    digest = digest_of(record(tmp_path))
    assert (digest.user, digest.queue, digest.state, digest.gpus) == (
        "alice",
        "default",
        "waiting",
        2,
    )
    assert (digest.waits_since, digest.trains_since, digest.reason) == (BEGAN, None, None)
    assert digest.use == GpuUse(waited=120.0)
    assert digest.aside == {"node3": 2}
    assert not digest.is_lost(run.now + 30.0) and digest.is_lost(run.now + 61.0)


def test_a_run_that_ended_has_how_long_each_phase_took(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.trains(BEGAN + 30.0, BEGAN + 40.0)
    run.ends(BEGAN + 140.0, BEGAN + 150.0, BEGAN + 151.5, GangState.SUCCEEDED)
    digest = digest_of(record(tmp_path))
    assert (digest.waited, digest.started, digest.released) == (30.0, 10.0, 11.5)
    assert digest.use == GpuUse(held=243.0, training=200.0, publishing=20.0, waited=60.0)
    assert digest.reason is EndReason.SUCCEEDED


def test_a_run_that_gave_up_waiting_has_no_time_of_waiting(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.goes(BEGAN, GangState.WAITING)
    run.now += 600.0
    run.goes(run.now, GangState.RELEASING)
    run.board.mark("released")
    run.goes(run.now, GangState.FAILED)
    digest = digest_of(record(tmp_path))
    assert (digest.waited, digest.started, digest.released) == (None, None, None)
    assert digest.use.waited == 1200.0


def running(tmp_path: Path, ranks: list[Mapping[str, Any]], metrics: list[Any]) -> RunRecord:
    run = recorded(tmp_path)
    run.trains(BEGAN + 30.0, BEGAN + 40.0)
    return record(tmp_path, ranks=ranks, metrics=metrics)


def rank(number: int, *gpus: str, ended: bool = False) -> Mapping[str, Any]:
    fields = {"rank": number, "role": "worker", "host": f"node{number}", "pid": 7}
    return {**fields, "gpus": list(gpus), "ended": ended}


def test_gpus_of_ranks_that_train_have_their_last_sample(tmp_path: Path) -> None:
    second = {name.replace("0", "1", 1): value for name, value in SAMPLE.items()}
    ranks = [rank(0, "GPU-a", "GPU-b"), rank(1, "GPU-c", ended=True), rank(2, "GPU-d"), rank(9)]
    found = digest_of(running(tmp_path, ranks, [SAMPLE | second, SAMPLE, {"loss": 1.0}]))
    assert found.trains_since == BEGAN + 40.0
    sample = (0.5, 2.0**30, 2.0**34, 250.0)
    assert found.readings == (
        GpuReading(0, "node0", "GPU-a", *sample),
        GpuReading(0, "node0", "GPU-b", *sample),
    )


@pytest.mark.parametrize("odd", [1e300, -1.0, "NaN", 2**70])
def test_odd_samples_are_left_out(tmp_path: Path, odd: object) -> None:
    found = digest_of(
        running(tmp_path, [rank(0, "GPU-a")], [dict.fromkeys(SAMPLE, odd) | {"gpu.0.power": 9}])
    )
    assert [(one.memory_used, one.power) for one in found.readings] == [(None, 9.0)]


def test_a_score_has_its_progress_and_no_checkpoints() -> None:
    part = FailedPart(300, 100, "rows 300 to 399", 3, "boom")
    score = replace(SCORE, rows=1000, scored=300, failed_parts=(part,))
    found = digest_of(record_of(RUN, "running", score=score, metrics=(SAMPLE,)))
    assert (found.trains_since, found.readings) == (None, ())
    assert found.score == ScoreProgress(scored=300, rows_left=600, failed_parts=1)


def test_a_search_has_no_samples_and_no_checkpoints() -> None:
    found = digest_of(record_of(RUN, "running", search=SEARCH, metrics=(SAMPLE,)))
    assert (found.trains_since, found.readings) == (None, ())


def test_a_phase_that_is_absurd_is_left_out() -> None:
    timeline = Timeline(requested=0.0, granted=BEGAN, started=BEGAN + 10.0)
    found = digest_of(record_of(RUN, now=BEGAN + 20.0, timeline=timeline))
    assert (found.waited, found.started) == (None, 10.0)
