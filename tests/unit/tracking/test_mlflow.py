"""What a run is in MLflow, and when MLflow is asked for."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hopsgpu
from hopsgpu.backends.spark.yarn_application import YarnApplication
from hopsgpu.core.run_record import RunRecord, parse
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.launcher import arguments as arguments_module
from hopsgpu.launcher.arguments import arguments, held_arguments, launch_on
from hopsgpu.launcher.options import HeldRunOptions, HoldOptions, LaunchOptions
from hopsgpu.packaging.provenance import Provenance
from hopsgpu.storage.lake import LakePath
from hopsgpu.tracking import mlflow as tracking_module
from hopsgpu.tracking.mlflow import Tracking, log, tracking_to
from hopsgpu.tracking.mlflow_logger import (
    MetricValue,
    batches,
    fit_name,
    log_run,
    params_of,
    seconds_of,
    tags_of,
    thin_out,
    values_of,
)
from tests.unit.records import put_run

URL = "hdfs://nn/user/alice/hopsgpu/runs/fit-1"
MODEL = "hdfs://nn/user/alice/hopsgpu/models/net/12"


def record(tmp_path: Path, **changes: Any) -> RunRecord:
    return parse((put_run(tmp_path, "fit-1", **changes) / "run.json").read_bytes())


def report(step: int, time: float = 1000.0, **metrics: float | str) -> bytes:
    return json.dumps({"time": time, "step": step, "metrics": metrics}).encode() + b"\n"


def a_function(rate: float = 0.5) -> float:
    return rate


def test_a_runs_tags_say_whose_it_is_and_where_the_rest_is(tmp_path: Path) -> None:
    spec = {"workers": 2, "model": "net"}
    told = record(tmp_path, state="failed", error="x" * 9000, model=MODEL, spec=spec)
    tags = tags_of(told, URL, "sha256:ab")
    assert tags == {
        "mlflow.user": "alice",
        "hopsgpu.run_id": "fit-1",
        "hopsgpu.application": "application_1_0001",
        "hopsgpu.user": "alice",
        "hopsgpu.state": "failed",
        "hopsgpu.error": "x" * 5000,
        "hopsgpu.record": URL,
        "hopsgpu.code_digest": "sha256:ab",
        "hopsgpu.model": MODEL,
        "hopsgpu.model.name": "net",
        "hopsgpu.model.version": "12",
    }
    without = tags_of(record(tmp_path / "other"), URL, "")
    assert not {name for name in without if "model" in name or "error" in name or "code" in name}


def test_parameters_are_the_functions_and_the_gangs_without_variables(tmp_path: Path) -> None:
    parameters = {"rate": 0.1, "layers": [8, 4], "note": "n" * 9000, "none": None, "a=b": "ü"}
    params = params_of(record(tmp_path), parameters)
    assert (params["rate"], params["layers"], params["none"]) == ("0.1", "[8, 4]", "null")
    assert params["note"] == "n" * 6000 and params["a_b"] == "ü"
    assert (params["hopsgpu.workers"], params["hopsgpu.gpus_per_worker"]) == ("2", "1")
    assert (params["hopsgpu.queue"], params["hopsgpu.executors"]) == ("default", "2")
    assert not {"hopsgpu.env_vars", "hopsgpu.model"} & params.keys()


def test_reports_become_values_by_step_and_nothing_else_does() -> None:
    lines = [
        report(1, 1000.25, loss=0.5, best="NaN"),
        json.dumps({"time": 1000.3, "gpu": {"uuid": "GPU-1", "power": 300.0}}).encode(),
        report(2, 1001.0, loss="Infinity"),
        b"no JSON\n",
        b"[1]\n",
        json.dumps({"time": 1, "step": None, "metrics": {"x": 1.0}}).encode(),
        report(3, loss=0.25)[:20],  # of a rank that was killed
    ]
    values = values_of([lines])
    assert [(v.name, v.time, v.step) for v in values] == [
        ("loss", 1_000_250, 1),
        ("best", 1_000_250, 1),
        ("loss", 1_001_000, 2),
    ]
    assert values[0].value == 0.5 and math.isnan(values[1].value) and values[2].value == math.inf


def test_a_later_attempt_goes_on_from_the_step_of_its_checkpoint() -> None:
    first = [report(step, loss=1.0) for step in range(1, 6)]
    later = [report(step, loss=2.0) for step in range(4, 8)]
    found = [(v.step, v.value) for v in values_of([first, [], later])]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    # One that reported nothing hides nothing.
    assert [v.step for v in values_of([first, [], []])] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 150, 12_345])
def test_long_metrics_are_thinned_to_their_last_and_short_ones_are_whole(count: int) -> None:
    many = [MetricValue("many", float(step), step, step) for step in range(count)]
    few = [MetricValue("few", 1.0, 0, 0)]
    kept = thin_out([*many, *few], limit=200)
    steps = [value.step for value in kept if value.name == "many"]
    assert len(steps) <= 100 and len(steps) > min(count, 100) // 2
    assert steps[0] == 0 and steps[-1] == count - 1 and steps == sorted(set(steps))
    assert few[0] in kept
    assert count > 100 or steps == list(range(count))


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        ("loss", "loss"),
        ("val/top-1 acc.", "val/top-1 acc."),
        ("acc@1", "acc_1"),
        ("größe", "gr__e"),
        ("a/../b", "a_.._b"),
        ("/a", "_a"),
        ("a//b", "a__b"),
        ("..", "_"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_that_mlflow_refuses_are_made_fit(name: str, fit: str) -> None:
    assert fit_name(name) == fit


def test_gpu_seconds_are_metrics_and_batches_are_bounded(tmp_path: Path) -> None:
    seconds = {v.name: v.value for v in seconds_of(record(tmp_path))}
    assert seconds["hopsgpu.gpu_seconds.held"] == 120.0
    assert seconds["hopsgpu.gpu_seconds.training"] == 100.0
    assert [list(some) for some in batches([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    assert list(batches([], 2)) == []


def test_a_run_without_an_end_or_a_record_is_not_logged(tmp_path: Path) -> None:
    goes_on = LakePath(f"file://{put_run(tmp_path, 'fit-1', 'running')}")
    (problem,) = log_run("http://127.0.0.1:9", "tests", goes_on, {})
    assert problem == "the run: the record has no final state, but 'running'"
    (problem,) = log_run("http://127.0.0.1:9", "tests", LakePath(f"file://{tmp_path}/none"), {})
    assert problem.startswith("the run: ") and f"{tmp_path}/none/run.json" in problem


def test_mlflow_is_asked_for_by_its_uri_alone() -> None:
    assert tracking_to(None, "mine") is None
    assert tracking_to(" ", None) is None


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_module.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(origin="/site-packages/mlflow/__init__.py")
    monkeypatch.setattr(tracking_module.importlib.util, "find_spec", lambda name: there)


def test_mlflow_that_is_absent_is_refused_with_what_to_install(absent: None) -> None:
    with pytest.raises(ConfigError) as caught:
        tracking_to("http://alice:s3cret@mlflow:5000", None)
    said = str(caught.value)
    assert "spark.hopsgpu.mlflow='http://mlflow:5000'" in said and "s3cret" not in said
    assert "pip install mlflow-skinny, or hopsgpu[mlflow]" in said


def test_a_directory_of_that_name_is_not_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # Set first, so that an import of the directory is undone.
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "mlflow")
    with pytest.raises(ConfigError, match="not installed at the driver"):
        tracking_to("http://mlflow:5000", None)


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., YarnApplication]:
    """Has launches find an application with these Spark properties."""

    def ask(**options: str) -> YarnApplication:
        settings = {f"spark.hopsgpu.{name}": value for name, value in options.items()}
        rest: Any = None
        jvm: Any = SimpleNamespace(setting=settings.get)
        application = YarnApplication(rest, jvm, rest, rest)
        application.py_files_dir = tmp_path
        monkeypatch.setattr(arguments_module, "application_of", lambda spark: application)
        return application

    return ask


@pytest.mark.parametrize("call", [hopsgpu.launch, hopsgpu.submit, hopsgpu.plan])
def test_launches_are_refused_before_anything_is_asked_for(
    call: Callable[..., Any], absent: None, asking: Callable[..., YarnApplication]
) -> None:
    asking(mlflow="http://mlflow:5000")
    with pytest.raises(ConfigError, match="MLflow, which is not installed"):
        call(a_function)
    with pytest.raises(ConfigError, match="MLflow, which is not installed"):
        hopsgpu.hold(workers=1)


def test_the_settings_are_those_of_each_launch(
    present: None, asking: Callable[..., YarnApplication], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking()
    plain = arguments(LaunchOptions(a_function))
    assert plain.tracking is None
    held = held_arguments(HoldOptions(workers=1))
    monkeypatch.setenv("HOPSGPU_MLFLOW", "http://mlflow:5000")
    given = arguments(LaunchOptions(a_function))
    assert given.tracking == Tracking("http://mlflow:5000", "hopsgpu")
    assert given.provenance.parameters == {"rate": 0.5}
    monkeypatch.setenv("HOPSGPU_MLFLOW_EXPERIMENT", "digits")
    on_held = launch_on(held, HeldRunOptions(a_function))
    assert on_held.tracking == Tracking("http://mlflow:5000", "digits")
    # Spark's properties go before their twins.
    asking(mlflow="databricks", **{"mlflow.experiment": "letters"})
    assert arguments(LaunchOptions(a_function)).tracking == Tracking("databricks", "letters")


def test_what_the_logging_process_does_is_bounded_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.tracking")
    tracking = Tracking("http://alice:s3cret@mlflow:5000")
    run = f"file://{tmp_path}/fit-1"
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))

    def told(script: str, seconds: float = 20.0) -> str:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        with pytest.raises(HopsGpuError) as caught:
            log(tracking, run, Provenance("f", "sha256:ab", {"rate": 1}), seconds)
        return str(caught.value)

    about = f"{run} is logged incompletely to MLflow at http://mlflow:5000: "
    late = "the process that logs the run did not end in 0.2 s"
    assert told("exec sleep 60", 0.2) == f"{about}{late}"
    assert told("echo some lines >&2; echo ImportError: x >&2; exit 3") == f"{about}ImportError: x"
    assert told("exit 3") == f"{about}the process that logs the run exited with code 3"
    assert told("""echo '["the run: no", "metrics: y"]'""") == f"{about}the run: no; metrics: y"
    server = "API request to http://alice:s3cret@mlflow:5000/api failed"
    assert told(f"echo {server} >&2; exit 1").endswith("to http://mlflow:5000/api failed")
    # What it is given, and in what environment.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/given\nenv > {tmp_path}/env\necho '[]'\n")
    log(tracking, run, None)
    (message,) = caplog.messages
    assert message.startswith(f"logged {run} to MLflow at http://mlflow:5000 in ")
    given = json.loads((tmp_path / "given").read_text())
    assert given["uri"] == tracking.uri and given["parameters"] == {} and given["run_url"] == run
    lines = (tmp_path / "env").read_text().splitlines()
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT=3" in lines and "MLFLOW_HTTP_REQUEST_MAX_RETRIES=2" in lines
