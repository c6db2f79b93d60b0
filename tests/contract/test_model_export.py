"""`ModelVersion.export`, and the code in it that servers run, with the real libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.cli.main import main
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving.server_files.served_model import ServedModel
from tests.bounds import HANG_SECONDS
from tests.served_models import MAKERS, X, bert, publish

# Their libraries are imported for seconds.
SLOW = {"saved_model", "torchscript", "xgboost", "pickled_module"}
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.soak if n in SLOW else ()) for n in MAKERS],
)
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
        timeout=HANG_SECONDS,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert said.stdout == "missing inputs: x; expected: x\n"
    found = np.load(tmp_path / "y.npy")
    assert found.dtype == made.answer.dtype
    np.testing.assert_allclose(found, made.answer, rtol=1e-5)


def test_a_pretrained_model_is_called_with_inputs_by_name(
    store: ModelStore, tmp_path: Path
) -> None:
    files = tmp_path / "files" / "best"
    files.mkdir(parents=True)
    inputs, outputs = bert(files)
    for name in ("optimizer.pt", "trainer_state.json"):
        (files / name).write_text("{}")
    version = store.publish(files.parent, "net", signature=(inputs, outputs))
    out = version.export("triton", out=tmp_path / "out")
    assert exported(out) == {
        "net/config.pbtxt",
        *(f"net/1/{name}.py" for name in ("model", "served_model")),
        "net/1/about.json",
        *(f"net/1/model-files/{name}" for name in ("config.json", "model.safetensors")),
        *(f"net/1/model-files/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
    }
    model = ServedModel(out / "net" / "1")
    np.testing.assert_allclose(model(inputs)["logits"], outputs["logits"], rtol=1e-4, atol=1e-6)
    unsigned = store.publish(files.parent, "net")
    with pytest.raises(ConfigError, match="has no signature"):
        unsigned.export("triton", out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no model of SavedModel"):
        version.export("tf-serving")


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
    out = made.version.export("tf-serving", out=tmp_path / "out", trust=True)
    assert "saved_model/1/saved_model.pb" in exported(out)
    assert "saved_model/1/variables/variables.index" in exported(out)
    assert "saved_model/1/signature.json" not in exported(out)
    import tensorflow as tf

    serve = tf.saved_model.load(str(out / "saved_model" / "1")).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"].numpy(), made.answer)


def served(store: ModelStore, out: Path, files: Path, signature: Any) -> Any:
    """What a server calls: a new version of the files, exported for Triton's Python backend."""
    version = store.publish(files, "m", signature=signature)
    version.export("triton", out=out, trust=True, python=True)
    place = out / "m" / str(version.version)
    return ServedModel(place)


def test_labels_and_probabilities_are_those_of_the_estimator(
    store: ModelStore, tmp_path: Path
) -> None:
    import joblib
    import xgboost
    from sklearn.linear_model import LogisticRegression

    rows = np.random.default_rng(0).random((60, 4), np.float32)
    for classes in (2, 3):
        labels = (rows[:, 0] * classes).astype(np.int64)
        boosted = xgboost.XGBClassifier(n_estimators=3).fit(rows, labels)
        for estimator, file in ((LogisticRegression(), "m.pkl"), (boosted, "m.json")):
            home = tmp_path / f"{classes}-{file}"
            home.mkdir()
            if file == "m.json":
                estimator.save_model(home / file)
            else:
                # By another name than joblib's.
                joblib.dump(estimator.fit(rows, labels), home / file)
            for method in (estimator.predict, estimator.predict_proba):
                expected = np.asarray(method(rows))
                if method == estimator.predict:
                    expected = expected.astype(np.int64)
                model = served(store, tmp_path / "out", home, ({"x": rows}, {"y": expected}))
                found = model({"x": rows})["y"]
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert store.get("m", 1).load(trust=True).predict(rows).shape == (60,)


def test_frames_and_strings_are_as_the_estimator_learned_them(
    store: ModelStore, tmp_path: Path
) -> None:
    import joblib
    import pandas
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    frame = pandas.DataFrame({"color": ["red", "blue"] * 4, "size": np.arange(8.0)})
    columns = ColumnTransformer(
        [("c", OneHotEncoder(handle_unknown="ignore"), ["color"])], remainder="drop"
    )
    model = make_pipeline(columns, LogisticRegression()).fit(frame, [1, 0] * 4)
    home = tmp_path / "files"
    home.mkdir()
    joblib.dump(model, home / "m.joblib")
    call = served(store, tmp_path / "out", home, (frame, model.predict(frame)))
    # As Triton passes strings.
    as_bytes = np.array([text.encode() for text in frame["color"]], object)
    given = {"size": frame["size"].to_numpy(), "color": as_bytes}
    (found,) = call(given).values()
    assert found.tolist() == [1, 0] * 4


def test_what_is_not_what_the_signature_says_is_an_error(store: ModelStore, tmp_path: Path) -> None:
    made = publish(store, "skops", tmp_path)
    files = made.version.download(tmp_path / "copy")
    (files / "manifest.json").unlink(missing_ok=True)
    for answer, said in (
        (made.answer[:, None] > 0, "has the shape"),
        (made.answer.astype(bool), "has the type int64, and the signature says BOOL"),
    ):
        call = served(store, tmp_path / "out", files, ({"x": X}, {"y": answer}))
        with pytest.raises(ValueError, match=said):
            call({"x": X})


def test_a_configuration_of_one_model_is_not_replaced_by_anothers(
    store: ModelStore, tmp_path: Path
) -> None:
    one = publish(store, "saved_model", tmp_path).version
    for _ in range(2):
        one.export("tf-serving", out=tmp_path / "tf", trust=True)
    other = store.publish(one.download(tmp_path / "saved"), "other")
    with pytest.raises(ConfigError, match=r"models.config there is of another model.*'other'"):
        other.export("tf-serving", out=tmp_path / "tf", trust=True)
    assert '"saved_model"' in (tmp_path / "tf" / "models.config").read_text()
    assert not (tmp_path / "tf" / "other").exists()


def test_several_exports_share_a_repository(store: ModelStore, tmp_path: Path) -> None:
    for name in ("xgboost", "skops"):
        publish(store, name, tmp_path).version.export("mlserver", out=tmp_path / "out")
    (tmp_path / "out" / "settings.json").write_text("{}")
    store.get("xgboost").export("mlserver", out=tmp_path / "out")
    found = exported(tmp_path / "out")
    files = {"xgboost/model-files/boost.json", "skops/model-files/classifier.skops"}
    assert {"settings.json", *files} < found
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
