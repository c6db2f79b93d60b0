from __future__ import annotations

import hashlib
import json
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

SECONDS = 10.0


def test_works_are_done_in_order_by_another_thread_which_then_ends() -> None:
    done: list[int] = []
    threads: list[threading.Thread] = []
    background = Background("records")

    def work(number: int) -> None:
        threads.append(threading.current_thread())
        done.append(number)

    for number in range(20):
        background.put(lambda number=number: work(number))  # type: ignore[misc]
    background.flush(SECONDS)
    assert done == list(range(20))
    assert threading.current_thread() not in threads
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    background.put(lambda: work(20))
    background.flush(SECONDS)
    assert done[-1] == 20
    assert background.problems() == ()


def test_what_goes_wrong_is_told_once_and_ends_nothing() -> None:
    background = Background("records")
    done = threading.Event()

    def refuse() -> None:
        raise StoreError("no room on the lake")

    background.put(refuse)
    background.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    background.put(done.set)
    background.flush(SECONDS)
    assert done.is_set()
    assert background.problems() == ("no room on the lake", "ZeroDivisionError: division by zero")
    assert background.problems() == ()


def test_a_lake_that_hangs_is_waited_for_so_long_and_told() -> None:
    background = Background("records")
    goes_on = threading.Event()
    background.put(goes_on.wait)  # type: ignore[arg-type]
    background.flush(0.05)
    goes_on.set()
    (problem,) = background.problems()
    assert "not on the lake yet" in problem and "0.05 s" in problem
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
