"""The record of a run: it is written and read as it is, and what does not fit is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from hopsgpu.core.run_record import (
    LARGEST_RECORD,
    CallRecord,
    RankRecord,
    RunRecord,
    encode,
    fields_of,
    parse,
)
from hopsgpu.core.run_values import WorldReport
from hopsgpu.core.scores import FailedPart
from hopsgpu.core.spec import GangSpec, GpuRequest
from hopsgpu.core.trials import Best, TrialReport
from hopsgpu.core.waits import Wait
from hopsgpu.errors import StoreError
from tests.unit.records import SCORE, SEARCH, record_of

RUN = "fit-20261122-120000-bbbbbb"


def full() -> RunRecord:
    part = FailedPart(0, 10, "rows 0 to 9", 3, "boom")
    trial = TrialReport(0, {"lr": 0.1, "kind": "sgd", "on": True}, "complete", 0.5)
    return record_of(
        RUN,
        "failed",
        error="boom",
        waiting_details=("used by x",),
        waits=(Wait(900.0, "Needs 2 GPUs, 0 are free", 30.0),),
        call=CallRecord("mine.train", "sha256:ab", {"lr": "0.1"}),
        worlds=(WorldReport(0, 2, ("node1", "node2"), 930.0),),
        spec=GangSpec("fit", workers=2, gpus=GpuRequest(0.5), env_vars={"MODE": "fast"}),
        search=replace(
            SEARCH, space={"lr": "log"}, best=Best({"lr": 0.1}, 0.5, 0), trials=(trial,)
        ),
        score=replace(SCORE, rows=20, scored=10, columns=("a",), failed_parts=(part,)),
        aside={"node3": 2},
    )


def test_a_record_is_read_as_it_was_written() -> None:
    assert parse(encode(full())) == full()
    assert parse(encode(record_of(RUN))) == record_of(RUN)


def test_numbers_that_json_lacks_are_read_as_they_were_written() -> None:
    record = record_of(RUN, metrics=({"loss": math.inf, "worst": -math.inf, "odd": math.nan}, {}))
    read = parse(encode(record)).metrics[0]
    assert (read["loss"], read["worst"], math.isnan(read["odd"])) == (math.inf, -math.inf, True)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("run_id", 7, "a string"),
        ("ranks[1].host", ["node2"], "a string"),
        ("ranks[0].rank", -1, "a number from 0"),
        ("ranks[0].gpus[0]", None, "a string"),
        ("metrics[0]['loss']", "high", "a number"),
        ("timeline.requested", 1e300, "a number from 0"),
        ("timeline.requested", True, "a number"),
        ("updated", None, "a number"),
        ("attempt", 1.5, "an integer"),
        ("executors", 10**9, "a number from 0"),
        ("aside['node3']", "many", "an integer"),
        ("use[1].held", -1.0, "a number from 0"),
        ("use", [], "points in the order"),
        ("reason", None, "the reason of a run that is failed"),
        ("reason", "bored", "one of succeeded"),
        ("state", "dancing", "one of "),
        ("spec", {"name": "fit", "workers": 0}, "other values: "),
        ("search.trials[0].value", [], "a number"),
        ("search.trials[0].params['lr']", [[[[[[[[[]]]]]]]]], "at most 8 levels"),
        ("score.scored", 11, "at most 20 rows"),
        ("environment.packages", [], "an object"),
        ("call.arguments['lr']", 0.1, "a string"),
    ],
)
def test_what_does_not_fit_is_named(path: str, value: Any, expected: str) -> None:
    fields = fields_of(full())
    names = path.replace("]", "").replace("'", "").replace("[", ".").split(".")
    place: Any = fields
    for name in names[:-1]:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(names[-1]) if isinstance(place, list) else names[-1]] = value
    with pytest.raises(StoreError) as refused:
        parse(json.dumps(fields).encode(), "file:///lake/run.json")
    text = str(refused.value)
    assert refused.value.kind == "damaged"
    assert text.startswith(f"file:///lake/run.json is not a record of a run: {path}")
    assert isinstance(value, (list, dict)) or f"is {value!r}" in text
    assert expected in text


def test_a_field_that_is_missing_is_named() -> None:
    fields = fields_of(full())
    del fields["executor"]["gpus"]
    with pytest.raises(StoreError, match=r"executor\.gpus is missing, expected a value"):
        parse(json.dumps(fields).encode())


def test_fields_of_later_versions_are_ignored() -> None:
    assert parse(json.dumps({**fields_of(full()), "later": 7}).encode()) == full()


def test_a_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(StoreError, match=f"it has more than {LARGEST_RECORD} bytes"):
        parse(b"{" + b" " * LARGEST_RECORD)


def test_a_gang_of_512_ranks_and_a_search_of_1000_trials_are_recorded_whole() -> None:
    ranks = tuple(
        RankRecord(n, "worker", f"node{n}.example.com", (f"GPU-{n:036}",), 4_000_000 + n)
        for n in range(512)
    )
    metrics = tuple({f"metric-{m}": 1 / 3 for m in range(16)} for _ in ranks)
    gang = record_of(RUN, "running", ranks=ranks, metrics=metrics)
    assert parse(encode(gang)) == gang
    trials = tuple(
        TrialReport(
            **{"number": n, "params": {f"p{p}": 1 / 3 for p in range(10)}, "state": "complete"},
            **{"value": 1 / 3, "gpu": "GPU-" + "0" * 36, "host": "node1.example.com"},
            **{"log": f"hdfs://lake/user/alice/hopsgpu/runs/{RUN}/trials/{n}/logs"},
        )
        for n in range(1000)
    )
    search = record_of(RUN, "running", search=replace(SEARCH, trials=trials))
    assert parse(encode(search)) == search


def test_a_record_that_would_be_too_large_is_shortened() -> None:
    """The GPUs' samples stay, and of the trials those that run, the best and the newest."""
    metrics = {f"m{m}-{'x' * 190}": 0.5 for m in range(999)} | {"gpu.0.power": 9.0}
    trials = tuple(
        TrialReport(n, {}, "running" if n == 1 else "complete", 0.5, error="x" * 16384)
        for n in range(5000)
    )
    record = record_of(
        RUN,
        "running",
        metrics=(metrics,) * 512,
        search=replace(SEARCH, best=Best({}, 0.5, 0), trials=trials),
    )
    content = encode(record)
    assert len(content) <= LARGEST_RECORD
    read = parse(content)
    assert all(values["gpu.0.power"] == 9.0 for values in read.metrics)
    assert read.search is not None
    numbers = [trial.number for trial in read.search.trials]
    assert numbers[:2] == [0, 1] and numbers[-1] == 4999
    assert read.left_out["complete trials"] == 5000 - len(numbers)
    assert read.left_out["metrics"] > 0
