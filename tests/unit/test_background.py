from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import threading
from pathlib import Path

import pytest

from hopsgpu import records
from hopsgpu.background import Background
from hopsgpu.errors import StoreError
from hopsgpu.results import GangResult
from hopsgpu.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.stores.lake import Lake
from hopsgpu.values import Value
from tests.conftest import until

SECONDS = 10.0


def test_works_of_a_key_are_done_in_order_and_the_latest_replaces_those_that_wait() -> None:
    done: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()
    background = Background("records")

    def first() -> None:
        begun.set()
        assert goes_on.wait(SECONDS)
        done.append(0)

    background.put("a", first)
    assert begun.wait(SECONDS)
    for number in range(1, 20):
        background.put("a", functools.partial(done.append, number))
    goes_on.set()
    background.flush(SECONDS)
    assert done == [0, 19]
    assert background.problems() == ()


def test_works_of_several_keys_are_done_at_once_by_threads_that_end() -> None:
    together = threading.Barrier(8)
    background = Background("records of this test")
    for number in range(8):
        background.put(str(number), lambda: together.wait(SECONDS) and None)
    background.flush(SECONDS)
    assert background.problems() == ()
    assert until(
        lambda: not [t for t in threading.enumerate() if t.name == "records of this test"], SECONDS
    )
    done = threading.Event()
    background.put("again", done.set)
    background.flush(SECONDS)
    assert done.is_set()


def test_what_goes_wrong_is_told_once_and_ends_nothing() -> None:
    background = Background("records")
    done = threading.Event()

    def refuse() -> None:
        raise StoreError("no room on the lake")

    background.put("a", refuse)
    background.flush(SECONDS)
    background.put("b", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    background.put("c", done.set)
    background.flush(SECONDS)
    assert done.is_set()
    assert background.problems() == ("no room on the lake", "ZeroDivisionError: division by zero")
    assert background.problems() == ()


def test_a_lake_that_hangs_is_waited_for_so_long_and_told() -> None:
    background = Background("records")
    goes_on = threading.Event()
    background.put("the record", goes_on.wait)  # type: ignore[arg-type]
    background.flush(0.05)
    goes_on.set()
    (problem,) = background.problems()
    assert problem == "not on the lake after 0.05 s: the record"
    background.flush(SECONDS)
    assert background.problems() == ()


def test_a_value_on_the_lake_is_taken_only_as_its_agent_wrote_it(tmp_path: Path) -> None:
    directory = Lake(f"file://{tmp_path}")
    (tmp_path / "value").write_bytes(b"pickled")
    digest = hashlib.sha256(b"pickled").hexdigest()
    assert Value(file="value", digest=digest).content(directory) == b"pickled"
    (tmp_path / "value").write_bytes(b"another's")
    with pytest.raises(StoreError, match="its digest is another one. It was not unpickled"):
        Value(file="value", digest=digest).content(directory)
    assert Value(b"inline").content(directory) == b"inline"


def test_a_record_tells_all_but_secrets(tmp_path: Path) -> None:
    spec = GangSpec("fit", workers=2, env_vars={"API_TOKEN": "s3cret", "MODE": "fast"}, retries=1)
    plan = LaunchPlan(spec, 2, 1, ExecutorShape(1, 1, 512, 4608), "default", {}, {})
    result = GangResult("fit-1", metrics=({"loss": 0.5}, {}), warnings=("slow",))
    written = records.content(
        plan, result, application="application_1", state="released", attempt=1, error=None
    )
    records.write(Lake(f"file://{tmp_path}"), written)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["spec"]["env_vars"] == {"API_TOKEN": "(redacted)", "MODE": "fast"}
    assert found["spec"]["gpus_per_worker"] == 1 and found["spec"]["retries"] == 1
    assert (found["state"], found["attempt"], found["metrics"]) == (
        "released",
        1,
        [{"loss": 0.5}, {}],
    )
    with pytest.raises(StoreError, match="the run's record is not on the lake: "):
        records.write(Lake(f"file://{tmp_path}/none/here"), written)


def test_a_record_is_json_whatever_was_reported() -> None:
    plan = LaunchPlan(GangSpec("fit"), 1, 1, ExecutorShape(1, 1, 512, 4608), "default", {}, {})
    last = {"step": 7, "loss": math.nan, "best": math.inf, "worst": -math.inf, "lr": 0.1}
    written = records.content(
        plan,
        GangResult("fit-1", metrics=(last,)),
        application="application_1",
        state="failed",
        attempt=0,
        error=os.fsdecode(b"no caf\xe9"),
    )

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(written, parse_constant=refuse)
    (told,) = found["metrics"]
    assert told == {"step": 7, "loss": "NaN", "best": "Infinity", "worst": "-Infinity", "lr": 0.1}
    assert {name: float(value) for name, value in told.items() if name != "loss"} == {
        name: value for name, value in last.items() if name != "loss"
    }
