"""Somebody who can publish a version has others read or write files that are not the version's."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.cli.main import main
from hopsgpu.errors import ConfigError
from hopsgpu.serving.export import check_copies
from hopsgpu.serving.export_layout import ExportLayout
from hopsgpu.serving.onnx_references import FIELDS, referenced_files
from hopsgpu.storage.digests import Digest
from tests.served_models import X, bert, onnx, xgboost

SIGNATURE = ({"x": X}, {"y": X})
Publish = Callable[..., ModelVersion]
# Where a tensor may be in a model, besides the weights that everybody knows.
PLACES = ("initializer", "constant", "branch", "function", "sparse", "list", "training")


@pytest.fixture
def publish(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/lake")
    monkeypatch.chdir(tmp_path)
    # What the attacker wants.
    (tmp_path / "id_rsa").write_bytes(bytes(12))

    def published(**about: Any) -> ModelVersion:
        store = ModelStore(f"file://{tmp_path}/lake/models")
        return store.publish(files, "net", **{"signature": SIGNATURE, **about})

    return published


def model_with_external(place: str, location: str) -> Any:
    """Return an ONNX model with a tensor whose numbers are in another file."""
    from onnx import AttributeProto, GraphProto, SparseTensorProto, TensorProto, helper

    tensor = TensorProto(name="two", data_type=TensorProto.FLOAT, dims=[1, 3])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="location", value=location)
    constant = helper.make_node("Constant", [], ["two"], value=tensor)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if place == "initializer":
        model.graph.initializer.append(tensor)
    elif place == "constant":
        model.graph.node.insert(0, constant)
    elif place == "branch":
        branch = AttributeProto(name="then", g=GraphProto(node=[constant]))
        model.graph.node[0].attribute.append(branch)
    elif place == "function":
        model.functions.add(name="f").node.append(constant)
    elif place == "sparse":
        model.graph.sparse_initializer.append(SparseTensorProto(values=tensor))
    elif place == "list":
        model.graph.node[0].attribute.append(AttributeProto(name="all", tensors=[tensor]))
    else:
        model.training_info.add().initialization.initializer.append(tensor)
    return model


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../../id_rsa", "{root}/id_rsa", "sub/../id_rsa", "missing"])
def test_onnx_reads_no_file_outside_its_version(
    files: Path, publish: Publish, tmp_path: Path, place: str, location: str
) -> None:
    model = model_with_external(place, location.format(root=tmp_path))
    (files / "net.onnx").write_bytes(model.SerializeToString())
    version = publish()
    with pytest.raises(ConfigError, match="net.onnx refers to .*, which is no file of the version"):
        version.load()
    for server in ("triton", "mlserver", "kserve"):
        with pytest.raises(ConfigError, match="which is no file of the version"):
            version.export(server, out="out")
    assert not Path("out").exists()


@pytest.mark.parametrize("place", PLACES)
def test_all_files_to_which_onnx_refers_are_exported(
    files: Path, publish: Publish, place: str
) -> None:
    (files / "w").mkdir()
    for name in ("w/two.bin", "notes.txt"):
        (files / name).write_bytes(np.full((1, 3), 2, np.float32).tobytes())
    model = model_with_external(place, "w/two.bin")
    (files / "net.onnx").write_bytes(model.SerializeToString())
    out = publish().export("triton", out="out")
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {"net/config.pbtxt", "net/1/model.onnx", "net/1/w/two.bin"}


def test_all_places_of_tensors_in_onnx_are_searched() -> None:
    import onnx.onnx_ml_pb2 as schema

    descriptors = schema.DESCRIPTOR.message_types_by_name
    found: dict[str, dict[int, str]] = {}
    while True:
        grown = {
            name: {
                field.number: field.message_type.name
                for field in message.fields
                if field.name == "external_data"
                or (field.message_type is not None and field.message_type.name in found)
            }
            for name, message in descriptors.items()
        }
        grown = {name: fields for name, fields in grown.items() if fields}
        if grown == found:
            break
        found = grown
    assert {name: dict(fields) for name, fields in FIELDS.items()} == found


def test_without_the_package_onnx_the_same_files_are_exported(
    files: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx(files)
    (files / "notes.txt").write_text("not of the model")
    version = publish()
    monkeypatch.setitem(sys.modules, "onnx", None)
    out = version.export("triton", out="out")
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {"net/config.pbtxt", "net/1/model.onnx", "net/1/weights.bin"}


def test_damaged_and_hostile_onnx_costs_little(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    whole = model_with_external("branch", "two.bin").SerializeToString()
    (tmp_path / "two.bin").write_bytes(b"")
    nested = b""
    for _ in range(2000):
        # A node's attribute with a graph.
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            nested = tag + _size(len(nested)) + nested
    hostile = [
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a size of 11 bytes
        b"\x3a\xff\xff\xff\xff\x0f",  # a size beyond the end
        b"\x3b\x3c",  # groups, which the format no longer has
        b"\x3a" + _size(len(nested)) + nested,
        b"\x3a" + _size(2**21) + b"\x0a\x00" * 2**20,  # a million empty nodes
        b"",
        b"\x80",
        *(whole[:cut] for cut in range(1, len(whole), 7)),
    ]
    tracemalloc.start()
    begun = time.process_time()
    for content in hostile:
        model.write_bytes(content)
        try:
            assert referenced_files(model) in ((), ("two.bin",))
        except ConfigError as error:
            assert "net.onnx" in str(error)
    assert time.process_time() - begun < 30
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


def _size(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tokenizer_config.json", {"vocab_file": "/etc/passwd"}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["../../../../id_rsa"]}),
        ("config.json", {"transformers_weights": "../other.safetensors"}),
        ("config.json", {"text_config": {"index_path": "/shared/index"}}),
        ("processor_config.json", {"audio_tokenizer": {"audio_tokenizer_name_or_path": "/other"}}),
    ],
)
def test_files_outside_a_directory_that_a_configuration_names_need_trust(
    files: Path, publish: Publish, name: str, keys: dict[str, Any]
) -> None:
    bert(files)
    before = json.loads((files / name).read_text()) if (files / name).exists() else {}
    (files / name).write_text(json.dumps({**before, **keys}))
    version = publish()
    with pytest.raises(ConfigError, match=rf"names files outside its directory \({name}: "):
        version.load()
    with pytest.raises(ConfigError, match="names files outside its directory"):
        version.export("triton", out="out")
    assert not Path("out").exists()


def test_an_adapter_does_not_choose_the_model_that_is_loaded(files: Path, publish: Publish) -> None:
    """transformers would load the model in another directory that this file names."""
    bert(files)
    named = {"base_model_name_or_path": "/home/other/model"}
    (files / "adapter_config.json").write_text(json.dumps(named))
    version = publish()
    with pytest.raises(ConfigError, match="does not load PEFT"):
        version.load()
    with pytest.raises(ConfigError, match=r"models: PEFT"):
        version.export("triton", out="out")


def test_shards_are_files_beside_their_index(files: Path, publish: Publish) -> None:
    bert(files)
    (files / "model.safetensors").rename(files / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "../../id_rsa"}}
    (files / "model.safetensors.index.json").write_text(json.dumps(index))
    version = publish()
    assert [model.name for model in version.formats] == ["safetensors"]
    index = {"weight_map": {"w": "../../id_rsa.safetensors"}}
    (files / "other.safetensors.index.json").write_text(json.dumps(index))
    assert {model.path for model in publish().formats} == {"model-00001-of-00001.safetensors"}


@pytest.mark.parametrize(
    ("copies", "problem"),
    [
        ({"../../id_rsa": "net/1/id_rsa"}, "is no file of this version"),
        ({"/etc/passwd": "net/1/passwd"}, "is no file of this version"),
        ({"a": "../id_rsa"}, "where the export has another file"),
        ({"a": "net/../../id_rsa"}, "where the export has another file"),
        ({"a": "/etc/id_rsa"}, "where the export has another file"),
        ({"a": "net/1/model.py"}, "where the export has another file"),
        ({"a": "net/1/x", "b": "net/1/x"}, "where the export has another file"),
        ({"a": "net/b/settings.json"}, "a file of the name settings.json: it is read"),
    ],
)
def test_an_export_copies_only_files_of_the_version_to_places_of_their_own(
    copies: dict[str, str], problem: str
) -> None:
    texts = {"net/1/model.py": ""}
    layout = ExportLayout(texts, copies, reserved=("settings.json", "it is read"))
    with pytest.raises(ConfigError, match=problem):
        check_copies(layout, {"a", "b"}, "hdfs://nn/models/net/1")


@pytest.mark.parametrize("size", ["Infinity", "1e999", "NaN", '"9"', "[]"])
def test_an_odd_signature_in_a_manifest_is_none(
    files: Path, publish: Publish, tmp_path: Path, size: str
) -> None:
    """A configuration of a server has names and numbers of the publisher's."""
    xgboost(files)
    publish()
    place = tmp_path / "lake" / "models" / "net" / "1" / "manifest.json"
    content = json.loads(place.read_text())
    tensor = {"name": 'x" }', "datatype": "FP32", "shape": ["SIZE"]}
    content["signature"] = {"inputs": [tensor], "outputs": [tensor]}
    place.write_text(json.dumps(content).replace('"SIZE"', size))
    version = ModelStore(f"file://{tmp_path}/lake/models").get("net")
    with pytest.raises(ConfigError, match="has no signature with names, types and shapes"):
        version.export("triton", out="out")


def test_digests_find_damage_and_no_tampering(
    files: Path, publish: Publish, tmp_path: Path
) -> None:
    (files / "notes.txt").write_text("honest")
    version = publish()
    place = tmp_path / "lake" / "models" / "net" / "1"
    (place / "notes.txt").write_text("forged")
    refused = CliRunner().invoke(main, ["models", "verify", "net"])
    assert refused.exit_code == 1 and "notes.txt" in refused.stderr
    # Whoever may write the file may write the manifest too.
    digest = Digest()
    digest.update(b"forged")
    content = json.loads((place / "manifest.json").read_text())
    content["files"]["notes.txt"]["digest"] = digest.facts.digest
    (place / "manifest.json").write_text(json.dumps(content))
    version.verify()
    told = " ".join(CliRunner().invoke(main, ["models", "verify", "--help"]).output.split())
    assert "finds damage, not tampering" in told
    assert "finds damage, not tampering" in " ".join((ModelVersion.verify.__doc__ or "").split())
