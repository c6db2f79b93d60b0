"""`ModelVersion.export`, and the code in it that servers run, with the real libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.cli.main import main
from hopsgpu.errors import ConfigError, StoreError
from tests.served_models import MAKERS, X, publish

# As a server does: with the files beside each other, and without hopsgpu.
CALL = """
import sys
sys.modules["hopsgpu"] = None
sys.path.insert(0, sys.argv[1])
import numpy, pathlib
from served_model import ServedModel
model = ServedModel(pathlib.Path(sys.argv[1]))
found = model({"x": numpy.load(sys.argv[2])})
numpy.save(sys.argv[3], found["y"])
try:
    model({})
except ValueError as error:
    print(error)
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/lake")
    return ModelStore(f"file://{tmp_path}/lake/models")


def exported(directory: Path) -> set[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix() for path in files}


@pytest.mark.parametrize("name", MAKERS)
def test_servers_call_each_format_without_hopsgpu(
    store: ModelStore, tmp_path: Path, name: str
) -> None:
    made = publish(store, name, tmp_path)
    out = made.version.export("triton", out=tmp_path / "out", trust=True, python=True)
    assert out == tmp_path / "out"
    np.save(tmp_path / "x.npy", X)
    place = out / name / "1"
    said = subprocess.run(
        [sys.executable, "-c", CALL, str(place), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")],
        check=True,
        timeout=250,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert said.stdout == "missing inputs: x; expected: x\n"
    found = np.load(tmp_path / "y.npy")
    assert found.dtype == made.answer.dtype
    np.testing.assert_allclose(found, made.answer, rtol=1e-5)


def test_names_and_weights_of_onnx_are_read_from_the_file(
    store: ModelStore, tmp_path: Path
) -> None:
    publish(store, "onnx", tmp_path)
    files = tmp_path / "files-onnx"
    (files / "notes.txt").write_text("not of the model")
    unsigned = store.publish(files, "onnx")
    out = unsigned.export("triton", out=tmp_path / "out")
    assert exported(out) == {"onnx/config.pbtxt", "onnx/2/model.onnx", "onnx/2/weights.bin"}
    config = (out / "onnx" / "config.pbtxt").read_text()
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] }' in config
    assert 'output { name: "y" data_type: TYPE_FP32 dims: [-1, 3] }' in config


def test_a_saved_model_for_tensorflow_serving(store: ModelStore, tmp_path: Path) -> None:
    made = publish(store, "saved_model", tmp_path)
    out = made.version.export("tf-serving", out=tmp_path / "out")
    assert "saved_model/1/saved_model.pb" in exported(out)
    assert "saved_model/1/variables/variables.index" in exported(out)
    assert "saved_model/1/signature.json" not in exported(out)
    import tensorflow as tf

    serve = tf.saved_model.load(str(out / "saved_model" / "1")).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"].numpy(), made.answer)


def test_several_exports_share_a_repository(store: ModelStore, tmp_path: Path) -> None:
    for name in ("xgboost", "skops"):
        publish(store, name, tmp_path).version.export("mlserver", out=tmp_path / "out")
    (tmp_path / "out" / "settings.json").write_text("{}")
    store.get("xgboost").export("mlserver", out=tmp_path / "out")
    found = exported(tmp_path / "out")
    assert {"settings.json", "xgboost/boost.json", "skops/classifier.skops"} < found
    assert not [path for path in found if ".export-" in path]


def test_what_needs_trust_is_refused(store: ModelStore, tmp_path: Path) -> None:
    made = publish(store, "pickle", tmp_path)
    for server in ("mlserver", "triton", "kserve"):
        with pytest.raises(ConfigError, match="classifier.joblib is a pickle"):
            made.version.export(server, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_server_cannot_do_is_refused(store: ModelStore, tmp_path: Path) -> None:
    version = publish(store, "xgboost", tmp_path).version
    with pytest.raises(ConfigError, match=r"no model of SavedModel .*; models: XGBoost"):
        version.export("tf-serving")
    with pytest.raises(ConfigError, match="must be one of kserve, triton, tf-serving, mlserver"):
        version.export("torchserve")
    with pytest.raises(ConfigError, match="max_batch_size=4: only for triton, not for mlserver"):
        version.export("mlserver", max_batch_size=4)
    with pytest.raises(ConfigError, match="is not on HDFS"):
        version.export("kserve", namenode="http://nn:9870")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot export to"):
        version.export("mlserver", out=tmp_path / "file")


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_the_command_exports_and_says_what_comes_next(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "xgboost", tmp_path)
    store.tag("xgboost", 1, "production")
    monkeypatch.chdir(tmp_path)
    result = call("models", "export", "xgboost", "production", "--to", "mlserver")
    assert result.output.splitlines() == [
        "xgboost 1 for mlserver is in xgboost-mlserver; next:",
        f"  mlserver start {tmp_path}/xgboost-mlserver",
    ]
    outcome = json.loads(
        call("models", "export", "xgboost", "--to", "triton", "--out", "a b", "--json").output
    )
    assert outcome == {
        "name": "xgboost",
        "version": 1,
        "directory": "a b",
        "server": "triton",
        "next": [f"tritonserver --model-repository '{tmp_path}/a b'"],
    }
    publish(store, "pickle", tmp_path)
    refused = call("models", "export", "pickle", "--to", "mlserver")
    assert refused.exit_code == 1 and "--trust" in refused.stderr
    assert call("models", "export", "pickle", "--to", "mlserver", "--trust").exit_code == 0
