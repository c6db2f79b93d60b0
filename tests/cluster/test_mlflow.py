"""Launches that are logged to MLflow beside the lake."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu

pytestmark = pytest.mark.usefixtures("nothing_warmed")


def fits(rate: float, steps: int = 5) -> None:
    """Reports a loss at each step and leaves a model; a rate of zero makes it fail."""
    context = hopsgpu.context()
    for step in range(steps):
        context.report(step, loss=rate / (step + 1))
    if not rate:
        raise ValueError("no rate")
    (Path(context.model_dir) / "weights").write_bytes(b"w")


@pytest.mark.soak
def test_launches_on_a_held_gang_are_in_mlflow_when_it_is_closed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    # MLflow makes a database in the working directory, though this store needs none.
    monkeypatch.chdir(tmp_path)
    uri = (tmp_path / "mlflow").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HOPSGPU_MLFLOW", uri)
    monkeypatch.setenv("HOPSGPU_MLFLOW_EXPERIMENT", "digits")
    with hopsgpu.hold(workers=1, gpus_per_worker=0, progress="off") as held:
        result = held.launch(fits, args=(0.5,), model="mlflow-test")
        with pytest.raises(hopsgpu.RankFailed) as failed:
            held.launch(fits, kwargs={"rate": 0})
    assert result.model is not None and result.warnings == ()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {result.run_id, failed.value.result.run_id}
    good, bad = runs[result.run_id], runs[failed.value.result.run_id]
    assert (good.info.status, bad.info.status) == ("FINISHED", "FAILED")
    assert (good.data.params["rate"], bad.data.params["rate"]) == ("0.5", "0")
    losses = client.get_metric_history(good.info.run_id, "loss")
    assert {m.step: m.value for m in losses} == {step: 0.5 / (step + 1) for step in range(5)}
    assert len(client.get_metric_history(bad.info.run_id, "loss")) == 5
    assert good.data.tags["hopsgpu.model"] == result.model.url
    assert good.data.tags["hopsgpu.application"] == spark.sparkContext.applicationId
    assert "no rate" in bad.data.tags["hopsgpu.error"]
    (version,) = client.search_model_versions("name = 'mlflow-test'")
    assert version.source == result.model.url and version.run_id == good.info.run_id
