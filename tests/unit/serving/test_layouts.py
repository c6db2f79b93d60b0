"""What each server gets: pure functions of what is known of a version."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from hopsgpu.errors import ConfigError
from hopsgpu.serving import kserve, mlserver, tensorflow_serving, triton
from hopsgpu.serving.export_layout import ExportLayout, ServedVersion
from hopsgpu.serving.model_formats import ModelClass, ModelFormat
from hopsgpu.serving.model_signature import Signature, Tensor

SIGNATURE = Signature((Tensor("x", "FP32", (-1, 3)),), (Tensor("y", "INT64", (-1,)),))
HDFS = "hdfs://nn:8020/user/ann/hopsgpu/models/net/7"
WEB = "http://nn:9870"


def served(name: str, path: str, **known: Any) -> ServedVersion:
    whole = {"signature": SIGNATURE, "files": (path,), **known}
    return ServedVersion("net", 7, HDFS, ModelFormat(name, path), **whole)


ONNX = served("ONNX", "net/a.onnx", files=("net/a.onnx", "net/a.onnx_data"))
SCRIPT = served("TorchScript", "a.pt")
STATE = served("state_dict", "a.pt")
SAVED = served("SavedModel", ".", files=("saved_model.pb", "variables/variables.index"))
PICKLE = served("pickle", "a.joblib")
SKOPS = served("skops", "a.skops", trusted=("own.Step",))
XGBOOST = served("XGBoost", "a.json")
BERT = served("transformers", ".", files=("config.json", "model.safetensors"))


def manifests(layout: ExportLayout) -> dict[str, Any]:
    return {name: yaml.safe_load(text) for name, text in layout.texts.items() if "yaml" in name}


def about(layout: ExportLayout, path: str) -> Any:
    return json.loads(layout.texts[path])


def test_tritons_own_backends() -> None:
    made = triton.layout(ONNX)
    assert made.copies == {
        "net/a.onnx": "net/7/model.onnx",
        "net/a.onnx_data": "net/7/a.onnx_data",
    }
    assert made.texts == {
        "net/config.pbtxt": 'name: "net"\nbackend: "onnxruntime"\nplatform: "onnxruntime_onnx"\n'
        "max_batch_size: 0\nversion_policy { specific { versions: [7] } }\n"
        'input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] }\n'
        'output { name: "y" data_type: TYPE_INT64 dims: [-1] }\n'
    }
    made = triton.layout(SCRIPT)
    assert made.copies == {"a.pt": "net/7/model.pt"}
    assert 'input { name: "INPUT__0" ' in made.texts["net/config.pbtxt"]
    assert 'output { name: "OUTPUT__0" ' in made.texts["net/config.pbtxt"]
    made = triton.layout(replace(SAVED, signature=None))
    assert made.copies == {
        "saved_model.pb": "net/7/model.savedmodel/saved_model.pb",
        "variables/variables.index": "net/7/model.savedmodel/variables/variables.index",
    }
    assert "input" not in made.texts["net/config.pbtxt"]


def test_a_scalar_has_one_element_for_tritons_python_backend_and_others_refuse_it() -> None:
    assert ONNX.signature is not None
    scalar = ONNX.signature._replace(outputs=(Tensor("loss", "FP32", ()),))
    lossy = replace(ONNX, signature=scalar)
    with pytest.raises(ConfigError, match="'loss' is a scalar.*python=True"):
        triton.layout(lossy)
    config = triton.layout(lossy, python=True).texts["net/config.pbtxt"]
    assert 'output { name: "loss" data_type: TYPE_FP32 dims: [1] }' in config


def test_what_lies_below_a_model_stays_below_it() -> None:
    below = replace(ONNX, files=("net/a.onnx", "net/weights/w.bin"))
    copies = triton.layout(below).copies
    assert copies == {"net/a.onnx": "net/7/model.onnx", "net/weights/w.bin": "net/7/weights/w.bin"}


def test_tritons_batches() -> None:
    config = triton.layout(ONNX, max_batch_size=64).texts["net/config.pbtxt"]
    assert "max_batch_size: 64\n" in config and config.endswith("dynamic_batching { }\n")
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [3] }' in config
    assert 'output { name: "y" data_type: TYPE_INT64 dims: [1] reshape { shape: [] } }' in config
    fixed = replace(ONNX, signature=Signature((Tensor("x", "FP32", (8, 3)),), ()))
    with pytest.raises(ConfigError, match="'x' has no batch as its first dimension"):
        triton.layout(fixed, max_batch_size=64)
    for odd in (-1, True, 1.5):
        with pytest.raises(ConfigError, match="must be an integer ≥ 0"):
            triton.layout(ONNX, max_batch_size=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [PICKLE, SKOPS, XGBOOST])
def test_tritons_python_backend_for_formats_without_one(version: ServedVersion) -> None:
    made = triton.layout(version)
    path = version.model.path
    assert made.copies == {path: f"net/7/model-files/{path}"}
    beside = {f"net/7/{name}" for name in ("about.json", "model.py", "served_model.py")}
    assert made.texts.keys() == beside | {"net/config.pbtxt"}
    assert about(made, "net/7/about.json") == {
        "format": version.model.name,
        "path": f"model-files/{path}",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
        "trusted": list(version.trusted),
    }


def test_tritons_python_backend_on_demand() -> None:
    made = triton.layout(SAVED, python=True)
    assert made.copies["saved_model.pb"] == "net/7/model-files/saved_model.pb"
    assert about(made, "net/7/about.json")["path"] == "model-files"
    assert 'backend: "python"' in made.texts["net/config.pbtxt"]


def test_a_state_dict_is_served_with_its_class() -> None:
    of = replace(STATE, model_class=ModelClass("own.nets:Net", {"hidden": 8}))
    said = about(triton.layout(of), "net/7/about.json")
    assert (said["model_class"], said["arguments"]) == ("own.nets:Net", {"hidden": 8})
    for layout in (triton.layout, mlserver.layout):
        with pytest.raises(ConfigError, match="nothing says of which class .*model_class.json"):
            layout(STATE)


def test_what_a_server_calls_by_name_needs_a_signature() -> None:
    for version in (SCRIPT, SKOPS):
        with pytest.raises(ConfigError, match="has no signature with names, types and shapes"):
            triton.layout(replace(version, signature=None))
    brain = Signature((Tensor("x", "BF16", (-1,)),), ())
    with pytest.raises(ConfigError, match=r"NumPy has no BF16 \(x\)"):
        triton.layout(replace(SKOPS, signature=brain))


def test_tensorflow_serving() -> None:
    made = tensorflow_serving.layout(SAVED)
    assert made.copies == {
        "saved_model.pb": "net/7/saved_model.pb",
        "variables/variables.index": "net/7/variables/variables.index",
    }
    config = made.texts["models.config"]
    assert 'name: "net" base_path: "/models/net" model_platform: "tensorflow"' in config
    assert "versions: 7 " in config


def test_mlserver_with_a_runtime_of_its_own() -> None:
    made = mlserver.layout(XGBOOST)
    assert made.copies == {"a.json": "net/model-files/a.json"}
    assert about(made, "net/model-settings.json") == {
        "name": "net",
        "implementation": "mlserver_xgboost.XGBoostModel",
        "parameters": {"uri": "./model-files/a.json", "version": "7"},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "predict", "datatype": "INT64", "shape": [-1]}],
    }
    unsigned = mlserver.layout(replace(PICKLE, signature=None))
    settings = about(unsigned, "net/model-settings.json")
    assert settings["implementation"] == "mlserver_sklearn.SKLearnModel"
    assert "inputs" not in settings


def test_mlserver_with_our_runtime() -> None:
    made = mlserver.layout(SKOPS)
    settings = about(made, "net/model-settings.json")
    assert settings["implementation"] == "mlserver_runtime.Runtime"
    assert settings["outputs"][0]["name"] == "y"
    assert {"net/mlserver_runtime.py", "net/served_model.py", "net/about.json"} < set(made.texts)


def test_kserves_own_servers_get_the_file_alone() -> None:
    made = kserve.layout(XGBOOST, namenode=WEB)
    assert made.copies == {}
    service = manifests(made)["inference-service.yaml"]
    assert service["spec"]["predictor"] == {
        "serviceAccountName": "net-hdfs",
        "model": {
            "modelFormat": {"name": "xgboost"},
            "protocolVersion": "v2",
            # KServe takes all that follows hdfs:// for the path.
            "storageUri": "hdfs://user/ann/hopsgpu/models/net/7/a.json",
        },
    }
    (secret,) = manifests(made)["kustomization.yaml"]["secretGenerator"]
    assert secret == {"name": "net-hdfs", "literals": ["HDFS_NAMENODE=http://nn:9870"]}


def test_kserve_with_a_predictor_and_kerberos() -> None:
    made = kserve.layout(SKOPS, namenode=WEB, principal="serve@EXAMPLE.ORG", image="reg/net:1")
    (container,) = manifests(made)["inference-service.yaml"]["spec"]["predictor"]["containers"]
    assert container["image"] == "reg/net:1"
    uri = "hdfs://user/ann/hopsgpu/models/net/7"
    assert container["env"] == [{"name": "STORAGE_URI", "value": uri}]
    assert "pip install --no-cache-dir kserve skops\n" in made.texts["predictor/Dockerfile"]
    assert about(made, "predictor/about.json")["trusted"] == ["own.Step"]
    (secret,) = manifests(made)["kustomization.yaml"]["secretGenerator"]
    assert secret["literals"][1] == "KERBEROS_PRINCIPAL=serve@EXAMPLE.ORG"
    assert secret["files"] == ["KERBEROS_KEYTAB"]


def test_kserve_takes_the_address_from_webhdfs() -> None:
    web = replace(XGBOOST, url=HDFS.replace("hdfs://nn:8020", "swebhdfs://nn:9871"))
    (secret,) = manifests(kserve.layout(web))["kustomization.yaml"]["secretGenerator"]
    assert secret["literals"] == ["HDFS_NAMENODE=https://nn:9871"]
    made = kserve.layout(XGBOOST, namenode="http://a:9870;http://b:9870")
    (secret,) = manifests(made)["kustomization.yaml"]["secretGenerator"]
    assert secret["literals"] == ["HDFS_NAMENODE=http://a:9870;http://b:9870"]


def test_what_kserve_cannot_reach_or_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not on HDFS"):
        kserve.layout(replace(XGBOOST, url="file:///models/net/7"), namenode=WEB)
    for odd in (None, "nn:9870", "hdfs://nn:8020", "http://a;b"):
        with pytest.raises(ConfigError, match="must be the address of WebHDFS"):
            kserve.layout(XGBOOST, namenode=odd)
    named = manifests(kserve.layout(replace(XGBOOST, name="My_Net "), namenode=WEB))
    annotations = {"hopsgpu/model": "My_Net ", "hopsgpu/version": "7"}
    metadata = {"name": "my-net", "annotations": annotations}
    assert named["inference-service.yaml"]["metadata"] == metadata
    for odd in ("数字", "3net"):
        with pytest.raises(ConfigError, match="Kubernetes' names consist of"):
            kserve.layout(replace(XGBOOST, name=odd), namenode=WEB)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_kserves_hugging_face_runtime(is_trusted: bool) -> None:
    format_ = ModelFormat("transformers", ".", trust_reason="names code" if is_trusted else None)
    made = kserve.layout(replace(BERT, model=format_, signature=None), namenode=WEB)
    service = manifests(made)["inference-service.yaml"]
    trusted = ["--trust_remote_code"] if is_trusted else []
    assert service["spec"]["predictor"]["model"] == {
        "modelFormat": {"name": "huggingface"},
        "args": ["--model_name=net", "--model_dir=/mnt/models", *trusted],
        "storageUri": "hdfs://user/ann/hopsgpu/models/net/7",
    }
    below = replace(BERT, model=ModelFormat("transformers", "best"))
    service = manifests(kserve.layout(below, namenode=WEB))["inference-service.yaml"]
    assert service["spec"]["predictor"]["model"]["storageUri"].endswith("models/net/7/best")


def test_a_directory_keeps_its_files_together() -> None:
    made = triton.layout(BERT)
    assert made.copies == {
        "config.json": "net/7/model-files/config.json",
        "model.safetensors": "net/7/model-files/model.safetensors",
    }
    said = about(made, "net/7/about.json")
    assert (said["format"], said["path"], said["is_trusted"]) == (
        "transformers",
        "model-files",
        False,
    )
