"""Images and queues of `hopsgpu submit` and `hopsgpu run` on Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hopsgpu.backends.spark.submit_arguments import ship, submit_arguments
from hopsgpu.backends.spark.submit_command import SubmitJob, SubmitPlan, plan_submission
from hopsgpu.cli.main import main
from hopsgpu.errors import ConfigError

MASTER = "k8s://https://api:6443"
OURS, SPARKS = "spark.hopsgpu.image", "spark.kubernetes.container.image"
PYTHON, DRIVER = "spark.pyspark.python", "spark.pyspark.driver.python"


def plan(
    directory: Path, conf: dict[str, str], defaults: dict[str, str] | None = None
) -> SubmitPlan:
    script = directory / "job.py"
    script.touch()
    job = SubmitJob(str(script), conf={"spark.master": MASTER, **conf})
    return plan_submission(job, defaults or {}, {}, "/v/bin/python")


def test_the_image_of_an_option_is_that_of_spark(tmp_path: Path) -> None:
    properties = plan(tmp_path, {OURS: "train:2"}, {SPARKS: "train:1"}).properties
    assert properties[OURS] == properties[SPARKS] == "train:2"
    # The path of this machine's Python is none of the image.
    assert (properties[PYTHON], properties[DRIVER]) == ("python3", "/v/bin/python")
    assert not [name for name in properties if "YARN_CONTAINER" in name]


def test_an_image_of_the_defaults_counts(tmp_path: Path) -> None:
    assert plan(tmp_path, {}, {OURS: "train:1"}).properties[SPARKS] == "train:1"
    # Two images of spark-defaults.conf are left for the session to refuse.
    properties = plan(tmp_path, {}, {OURS: "train:1", SPARKS: "train:2"}).properties
    assert (properties[OURS], properties[SPARKS]) == ("train:1", "train:2")
    with pytest.raises(ConfigError, match="container.image is not set"):
        plan(tmp_path, {})


def test_a_python_of_the_image_may_be_named(tmp_path: Path) -> None:
    conf = {SPARKS: "train:1", PYTHON: "/opt/python"}
    assert plan(tmp_path, conf).properties[PYTHON] == "/opt/python"


def test_a_submission_in_cluster_mode_is_labelled_and_ships_hopsgpu(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import helper")
    (tmp_path / "helper.py").touch()
    conf = {"spark.master": MASTER, SPARKS: "train:1"}
    job = SubmitJob(str(script), deploy_mode="cluster", conf=conf, tag="t")
    planned = plan_submission(job, {}, {}, "/v/bin/python")
    assert planned.properties["spark.kubernetes.driver.label.hopsgpu/submission"] == "t"
    assert planned.properties["spark.kubernetes.submission.waitAppCompletion"] == "false"
    assert not [name for name in planned.properties if name.startswith("spark.yarn")]
    shipped = ship(tmp_path / "cache", planned.properties, [str(script)])
    words = submit_arguments(planned.arguments, {}, shipped)
    given = dict(word.split("=", 1) for word in words if word.startswith("spark."))
    assert given["spark.submit.pyFiles"] == shipped.package.as_uri()
    assert shipped.modules is not None and shipped.modules.name in given["spark.archives"]
    for name in ("spark.kubernetes.driverEnv", "spark.executorEnv"):
        assert given[f"{name}.PYTHONPATH"] == "hopsgpu-modules/0"
    # The script travels inside the file that the pod runs.
    assert "import helper" in Path(words[-1].removeprefix("file://")).read_text()


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_queue_is_refused_and_the_namespace_named(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.py").touch()
    words = [command, "--master", MASTER, "--image", "train:1", "--queue", "q"]
    result = CliRunner().invoke(main, [*words, str(tmp_path / "job.py")])
    assert result.exit_code == 1
    assert "--queue q: Kubernetes has no queues; leave it out" in str(result.exception or "") + (
        result.output
    )
