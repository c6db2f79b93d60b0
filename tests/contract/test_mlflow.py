"""Runs in a real tracking store of MLflow, read back by its own client.

It is imported within the tests: its import takes each of the tests' workers a second.
"""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hopsgpu.errors import HopsGpuError
from hopsgpu.packaging.provenance import Provenance
from hopsgpu.storage.lake import LakePath
from hopsgpu.tracking.mlflow import Tracking, log
from hopsgpu.tracking.mlflow_logger import log_run
from tests.unit.records import put_run

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RUN = "fit-20261122-120000-cccccc"
MODEL = "hdfs://nn/user/alice/hopsgpu/models/net/3"
SPEC = {"name": "fit", "workers": 2, "model": "net", "env_vars": {}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that needs neither a server nor a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow makes a database in the working directory all the same.
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "mlflow").as_uri()


def put(root: Path, state: str = "succeeded", **changes: Any) -> LakePath:
    """A run of two attempts, of which the second went on from step 3."""
    directory = put_run(root, RUN, state, attempt=1, **changes)
    for place, first, count in (("logs", 0, 5), ("logs/attempt-1", 3, 2500)):
        (directory / place).mkdir(exist_ok=True)
        losses = (1 / (step + 1) for step in range(first, first + count))
        lines = [
            json.dumps({"time": 1000 + number, "step": first + number, "metrics": {"loss": loss}})
            for number, loss in enumerate(losses)
        ]
        odd = {"time": 1000, "step": first, "metrics": {"val/acc@1": "NaN", "best": "Infinity"}}
        text = "\n".join([*lines, json.dumps(odd), ""])
        (directory / place / "metrics-0.jsonl").write_text(text)
    return LakePath(directory.as_uri())


def client_of(store: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def logged(store: str, experiment: str) -> tuple[MlflowClient, Any]:
    client = client_of(store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return client, run


def test_a_run_with_its_metrics_and_its_model_is_in_mlflow(store: str, tmp_path: Path) -> None:
    directory = put(tmp_path, model=MODEL, spec=SPEC)
    code = Provenance("f", "sha256:ab", {"rate": 0.1, "layers": list(range(2000))})
    log(Tracking(store, "digits"), directory.url, code)
    client, run = logged(store, "digits")
    record = json.loads((directory / "run.json").read())
    assert (run.info.run_name, run.info.status) == (RUN, "FINISHED")
    assert run.info.start_time == int(record["timeline"]["requested"] * 1000)
    assert run.info.end_time == int(record["updated"] * 1000)
    assert (run.data.params["rate"], run.data.params["hopsgpu.workers"]) == ("0.1", "2")
    assert len(run.data.params["layers"]) == 6000
    tags = run.data.tags
    assert (tags["hopsgpu.run_id"], tags["hopsgpu.record"]) == (RUN, directory.url)
    assert (tags["hopsgpu.model"], tags["hopsgpu.model.version"]) == (MODEL, "3")
    assert (tags["hopsgpu.user"], tags["hopsgpu.state"]) == ("alice", "succeeded")
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [m.step for m in sorted(losses, key=lambda m: m.step)] == list(range(2503))
    assert all(m.value == 1 / (m.step + 1) for m in losses)
    assert {m.timestamp for m in losses if m.step == 4} == {1_001_000}
    (odd,) = (m for m in client.get_metric_history(run.info.run_id, "val/acc_1") if m.step == 3)
    assert math.isnan(odd.value)
    assert run.data.metrics["best"] > 1e308
    assert run.data.metrics["hopsgpu.gpu_seconds.held"] == 120.0
    (version,) = client.search_model_versions("name = 'net'")
    assert (version.source, version.run_id) == (MODEL, run.info.run_id)
    assert version.tags["hopsgpu.model.version"] == "3"


def test_a_second_run_finds_experiment_and_model_there(store: str, tmp_path: Path) -> None:
    for number, state in enumerate(("succeeded", "cancelled", "failed")):
        directory = put(tmp_path / str(number), state, model=MODEL, spec=SPEC, error="boom")
        assert log_run(store, "digits", directory, {}) == []
    client = client_of(store)
    found = client.get_experiment_by_name("digits")
    assert found is not None
    runs = client.search_runs([found.experiment_id])
    states = {(run.data.tags["hopsgpu.state"], run.info.status) for run in runs}
    assert states == {("succeeded", "FINISHED"), ("cancelled", "KILLED"), ("failed", "FAILED")}
    assert len(client.search_model_versions("name = 'net'")) == 3


def test_a_part_that_mlflow_refuses_leaves_the_rest(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("the registry is full")

    monkeypatch.setattr(MlflowClient, "create_registered_model", refuse)
    problems = log_run(store, "digits", put(tmp_path, model=MODEL, spec=SPEC), {"rate": 1})
    assert problems == ["the model's version: the registry is full"]
    _, run = logged(store, "digits")
    assert run.info.status == "FINISHED" and run.data.tags["hopsgpu.model"] == MODEL
    assert run.data.params["rate"] == "1" and run.data.metrics["loss"] == 1 / 2503


@pytest.mark.parametrize("name", ["ENDPOINT_NOT_FOUND", "FEATURE_DISABLED"])
def test_a_server_without_models_gets_tags_only(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ErrorCode
    from mlflow.tracking import MlflowClient

    code = ErrorCode.Value(name)

    def refuse(*args: object, **kwargs: object) -> None:
        raise MlflowException("there is no such endpoint", error_code=code)

    monkeypatch.setattr(MlflowClient, "create_registered_model", refuse)
    assert log_run(store, "digits", put(tmp_path, model=MODEL, spec=SPEC), {}) == []
    client, run = logged(store, "digits")
    assert run.data.tags["hopsgpu.model"] == MODEL
    assert list(client.search_model_versions()) == []


def test_a_server_that_is_out_of_reach_is_told_soon(tmp_path: Path) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        with pytest.raises(HopsGpuError, match=f"to MLflow at {uri}: the run: .*refused"):
            log(Tracking(uri), put(tmp_path).url, None)
