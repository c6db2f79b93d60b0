"""What metrics take from a record: its numbers, as far as they can be a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts.runs import RunRecord, parse
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.errors import StoreError
from hopsgpu.monitoring.run_digest import GpuReading, ScoreProgress, digest_of
from hopsgpu.storage.lake import LakePath
from tests.unit.records import RecordedRun

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
    # The test's recorder is not told of a reason, as those of older versions are not.
    assert digest.reason is EndReason.SUCCEEDED
    assert digest_of(record(tmp_path, state="failed")).reason is EndReason.UNKNOWN
    assert digest_of(record(tmp_path, reason="user_error")).reason is EndReason.USER_ERROR


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
    return {"rank": number, "host": f"node{number}", "gpus": gpus, "ended": ended}


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


@pytest.mark.parametrize("odd", [1e300, -1.0, "NaN", None, True, [1], {}, 2**70])
def test_odd_samples_are_left_out(tmp_path: Path, odd: object) -> None:
    found = digest_of(
        running(tmp_path, [rank(0, "GPU-a")], [dict.fromkeys(SAMPLE, odd) | {"gpu.0.power": 9}])
    )
    assert [(one.memory_used, one.power) for one in found.readings] == [(None, 9.0)]


def test_a_score_has_its_progress_and_no_checkpoints(tmp_path: Path) -> None:
    running(tmp_path, [], [])
    score = {"rows": 1000, "scored": 300, "failed_parts": [{"rows": 100}]}
    found = digest_of(record(tmp_path, ranks=[rank(0, "GPU-a")], metrics=[SAMPLE], score=score))
    assert (found.trains_since, found.readings) == (None, ())
    assert found.score == ScoreProgress(scored=300, left=600, failed_parts=1)
    unknown = digest_of(record(tmp_path, score={"rows": 0, "scored": 0, "failed_parts": []}))
    assert unknown.score == ScoreProgress(scored=0, left=0, failed_parts=0)
    for odd in ({"scored": -1}, {"rows": 10**30}, {"failed_parts": None}, {"scored": 2000}):
        with pytest.raises(StoreError, match="odd values"):
            digest_of(record(tmp_path, score=score | odd))


def test_a_search_has_no_samples_and_no_checkpoints(tmp_path: Path) -> None:
    running(tmp_path, [], [])
    found = digest_of(
        record(tmp_path, ranks=[rank(0, "GPU-a")], metrics=[SAMPLE], search={"trials": []})
    )
    assert (found.trains_since, found.readings) == (None, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"use": [{"time": 1.0, "held": 1e300}]},
        {"use": [{"time": 1.0, "held": -1.0}]},
        {"use": [{"time": 1.0, "held": True}]},
        {"use": []},
        {"use": "much"},
        {"updated": 1e300},
        {"updated": -1.0},
        {"executors": 10**9},
        {"executors": -1},
        {"aside": {"node1": "many"}},
        {"aside": ["node1"]},
    ],
)
def test_numbers_that_are_no_runs_are_damage(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    recorded(tmp_path)
    with pytest.raises(StoreError) as caught:
        digest_of(record(tmp_path, **changes))
    assert caught.value.kind == "damaged" and RUN in str(caught.value)


@pytest.mark.parametrize("metrics", [{}, None, [None], [[]], 7])
def test_metrics_of_another_form_are_damage_or_none(tmp_path: Path, metrics: Any) -> None:
    running(tmp_path, [], [])
    try:
        found = digest_of(record(tmp_path, ranks=[rank(0, "GPU-a")], metrics=metrics))
    except StoreError as error:
        assert error.kind == "damaged"
    else:
        assert found.readings == ()


def test_times_that_are_absurd_are_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.trains(BEGAN + 30.0, BEGAN + 40.0)
    run.ends(BEGAN + 140.0, BEGAN + 150.0, BEGAN + 151.5, GangState.SUCCEEDED)
    timeline = record(tmp_path).content["timeline"]
    found = digest_of(record(tmp_path, timeline=timeline | {"granted": 1e300, "requested": -5.0}))
    assert (found.waited, found.started) == (None, None)
    found = digest_of(record(tmp_path, timeline=timeline | {"requested": 0.0, "later": 7.0}))
    assert (found.waited, found.started) == (None, 10.0)
