"""Somebody who can publish a version has others, or their servers, run code without `trust`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.cli.main import main
from hopsgpu.errors import ConfigError
from hopsgpu.serving.model_directories import MAX_JSON_BYTES
from hopsgpu.serving.server_files.served_model import ServedModel
from tests.bounds import HANG_SECONDS
from tests.contract.test_model_loading import Planted
from tests.served_models import X, bert, onnx, xgboost

SIGNATURE = ({"x": X}, {"y": X[:, :2]})
# The import of modules as the servers do it: by name, with the exported directory in the path.
IMPORT = """
import importlib, sys
sys.modules["triton_python_backend_utils"] = sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print(importlib.import_module(name).__file__)
"""
Publish = Callable[..., ModelVersion]


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What exists once code of the publisher's has run."""
    return tmp_path / "ran"


@pytest.fixture
def publish(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/lake")
    monkeypatch.chdir(tmp_path)

    def published(**about: Any) -> ModelVersion:
        store = ModelStore(f"file://{tmp_path}/lake/models")
        return store.publish(files, "net", **{"signature": SIGNATURE, **about})

    return published


def state_dict(files: Path, model_class: str, **arguments: Any) -> None:
    import torch

    torch.save(torch.nn.Linear(3, 2).state_dict(), files / "net.pt")
    named = {"class": model_class, "arguments": arguments}
    (files / "model_class.json").write_text(json.dumps(named))


@pytest.mark.parametrize("server", ["triton", "mlserver", "kserve"])
def test_a_class_that_a_version_names_is_trusted_by_name(
    files: Path, publish: Publish, ran: Path, server: str
) -> None:
    state_dict(files, "subprocess:Popen", args=["mkdir", str(ran)])
    version = publish()
    for trust in (False, [], ["torch.nn:Linear", "subprocess"]):
        with pytest.raises(ConfigError, match=r"trust=\['subprocess:Popen'\]"):
            version.export(server, out="out", trust=trust)
        with pytest.raises(ConfigError, match=r"trust=\['subprocess:Popen'\]"):
            version.load(trust=trust)
    assert not Path("out").exists() and not ran.exists()


def test_a_server_calls_no_class_but_a_module_of_torch(
    files: Path, publish: Publish, ran: Path
) -> None:
    state_dict(files, "subprocess:Popen", args=["mkdir", str(ran)])
    out = publish().export("triton", out="out", trust=["subprocess:Popen"])
    with pytest.raises(TypeError, match=r"subprocess:Popen is no subclass of torch.nn.Module"):
        ServedModel(out / "net" / "1")
    assert not ran.exists()
    state_dict(files, "os:mkdir", path=str(ran))
    out = publish().export("triton", out="out", trust=True)
    with pytest.raises(TypeError, match="os:mkdir is no subclass of torch.nn.Module"):
        ServedModel(out / "net" / "2")
    assert not ran.exists()


def test_a_class_that_the_user_names_is_called(files: Path, publish: Publish) -> None:
    state_dict(files, "torch.nn:Linear", in_features=3, out_features=2)
    version = publish()
    assert "weight" in version.load(trust=["torch.nn:Linear"])
    words = ["models", "export", "net", "--to", "triton", "--out", "out"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 1 and "--trust-type torch.nn:Linear" in refused.stderr
    done = CliRunner().invoke(main, [*words, "--trust-type", "torch.nn:Linear"])
    assert done.exit_code == 0, done.output
    answer = ServedModel(Path("out", "net", "1"))({"x": X})["y"]
    assert answer.shape == (4, 2)


def test_a_torchscript_program_needs_trust(files: Path, publish: Publish, ran: Path) -> None:
    import torch

    class Writer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.file = str(ran)

        @torch.jit.export
        def __getstate__(self) -> tuple[str, bool]:
            return self.file, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[str, bool]) -> None:
            self.file = state[0]
            self.training = state[1]
            torch.save("written by the load", self.file)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.jit.script(Writer()).save(str(files / "net.pt"))
    version = publish()
    with pytest.raises(ConfigError, match="net.pt is a program.*trust=True"):
        version.load()
    for server in ("triton", "mlserver", "kserve"):
        with pytest.raises(ConfigError, match="net.pt is a program.*--trust"):
            version.export(server, out="out")
    assert not ran.exists() and not Path("out").exists()
    version.load(trust=True)
    assert ran.exists(), "the attack works where the user trusts the publisher"


def test_a_saved_model_is_a_program_and_needs_trust(files: Path, publish: Publish) -> None:
    (files / "saved_model.pb").write_bytes(b"")
    version = publish()
    with pytest.raises(ConfigError, match="the SavedModel model is a program.*trust=True"):
        version.load()
    for server in ("triton", "tf-serving", "mlserver", "kserve"):
        with pytest.raises(ConfigError, match="is a program.*--trust"):
            version.export(server, out="out")


@pytest.mark.parametrize("name", ["last.ckpt", "net.pt"])
def test_a_lightning_checkpoint_makes_nothing(
    files: Path, publish: Publish, ran: Path, name: str
) -> None:
    import torch

    saved: dict[str, Any] = {
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"_class_path": "os.mkdir", "_instantiator": "os.mkdir"},
    }
    torch.save(saved, files / name)
    assert "hyper_parameters" in publish().load()
    torch.save({**saved, "hyper_parameters": Planted(ran)}, files / name)
    with pytest.raises(ConfigError, match="has more than tensors"):
        publish().load()
    assert not ran.exists()


def test_what_mlflow_would_import_is_not_read(files: Path, publish: Publish, ran: Path) -> None:
    onnx(files)
    (files / "own.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    (files / "MLmodel").write_text("flavors:\n  python_function:\n    loader_module: own\n")
    version = publish()
    assert [model.name for model in version.formats] == ["ONNX"]
    version.load()
    for server in ("triton", "mlserver"):
        out = version.export(server, out=server, **({"python": True} if server == "triton" else {}))
        assert not {"own.py", "MLmodel"} & {path.name for path in out.rglob("*")}
    assert not ran.exists()


def test_a_pickled_tokenizer_is_not_unpickled(files: Path, publish: Publish, ran: Path) -> None:
    bert(files)
    for name in ("tokenizer.pkl", "vocab.pkl"):
        (files / name).write_bytes(pickle.dumps(Planted(ran)))
    version = publish()
    assert version.load(path=".").processor is not None
    with pytest.raises(ConfigError, match="tokenizer.pkl is a pickle"):
        version.load(path="tokenizer.pkl")
    assert not ran.exists()


@pytest.mark.parametrize(
    "named",
    [
        {"config.json": {"auto_map": {"AutoModel": "own.Own"}}},
        {"config.json": {"text_config": {"auto_map": {"AutoModel": "own.Own"}}}},
        {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own.Own", None]}}},
        {"processor_config.json": {"auto_map": {"AutoProcessor": "own.Own"}}},
        {"config.json": {"attn_implementation": "own/kernel"}},
        {"config.json": {"_attn_implementation_internal": {"text": "own/kernel"}}},
        {"generation_config.json": {"_experts_implementation": "own/kernel"}},
    ],
)
def test_code_that_a_configuration_names_needs_trust(
    files: Path, publish: Publish, ran: Path, named: dict[str, dict[str, Any]]
) -> None:
    bert(files)
    (files / "own.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    for name, keys in named.items():
        before = json.loads((files / name).read_text()) if (files / name).exists() else {}
        (files / name).write_text(json.dumps({**before, **keys}))
    version = publish()
    with pytest.raises(ConfigError, match="names code of its own"):
        version.load()
    for server in ("triton", "mlserver", "kserve"):
        with pytest.raises(ConfigError, match="names code of its own"):
            version.export(server, out="out")
    assert not ran.exists() and not Path("out").exists()


def test_a_configuration_that_is_too_large_to_be_checked_needs_trust(
    files: Path, publish: Publish
) -> None:
    bert(files)
    tokenizer = {"filler": " " * MAX_JSON_BYTES, "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (files / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="too large to be checked .tokenizer_config.json"):
        publish().load()


def test_types_of_skops_are_trusted_by_name(files: Path, publish: Publish, ran: Path) -> None:
    import skops.io
    from sklearn.preprocessing import FunctionTransformer

    skops.io.dump(FunctionTransformer(os.mkdir), files / "net.skops")
    version = publish()
    with pytest.raises(ConfigError, match=r"types that skops does not trust by itself: \w+.mkdir"):
        version.load()
    for server in ("triton", "mlserver"):
        with pytest.raises(ConfigError, match="does not trust by itself"):
            version.export(server, out="out", trust=["os.getcwd"])
    assert not ran.exists() and not Path("out").exists()


def imported(place: Path, *names: str) -> list[str]:
    """Return the files of modules that a server imports from an exported directory."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT, str(place), *names],
        check=True,
        timeout=HANG_SECONDS,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("home", [".", "model", "numpy"])
def test_a_versions_modules_are_not_those_that_servers_import(
    files: Path, publish: Publish, ran: Path, home: str
) -> None:
    (files / home).mkdir(exist_ok=True)
    signature = bert(files / home)
    for name in ("__init__", "numpy", "torch", "served_model", "model"):
        (files / home / f"{name}.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    version = publish(signature=signature)
    place = version.export("triton", out="triton") / "net" / "1"
    # Triton imports the directory with the version's number as a package.
    code, served = imported(place, "model", "served_model", "numpy")[:2]
    assert Path(code) == (place / "model.py").resolve()
    assert Path(served) == (place / "served_model.py").resolve()
    place = version.export("mlserver", out="mlserver") / "net"
    imported(place, "served_model", "numpy", "torch")
    assert not ran.exists()
    inputs, outputs = signature
    found = ServedModel(place)(inputs)["logits"]
    np.testing.assert_allclose(found, outputs["logits"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["served_model.py", "numpy.py", "about.json", "model.py"])
def test_a_versions_files_do_not_replace_the_servers_code(
    files: Path, publish: Publish, ran: Path, name: str
) -> None:
    from onnx import load, save

    onnx(files)
    model = load(files / "double.onnx")
    save(model, files / "double.onnx", save_as_external_data=True, size_threshold=0, location=name)
    (files / "weights.bin").unlink()
    version = publish(signature=({"x": X}, {"y": X}))
    for server, options in (("triton", {"python": True}), ("mlserver", {})):
        out = version.export(server, out=server, **options)
        place = out / "net" / "1" if server == "triton" else out / "net"
        imported(place, "served_model", "numpy")
        assert b"class ServedModel" in (place / "served_model.py").read_bytes()
        assert json.loads((place / "about.json").read_text())["format"] == "ONNX"
        np.testing.assert_allclose(ServedModel(place)({"x": X})["y"], 2 * X)


def test_a_model_does_not_replace_its_settings(files: Path, publish: Publish, ran: Path) -> None:
    xgboost(files)
    booster = json.loads((files / "boost.json").read_text())
    (files / "boost.json").unlink()
    own = {"name": "net", "format": "state_dict", "model_class": "os:mkdir", "path": "x"}
    (files / "about.json").write_text(json.dumps({**booster, **own, "arguments": {}}))
    version = publish(signature=({"x": X}, {"y": X[:, 0]}))
    place = version.export("triton", out="triton") / "net" / "1"
    assert json.loads((place / "about.json").read_text())["format"] == "XGBoost"
    assert ServedModel(place)({"x": X})["y"].shape == (4,)
    # MLServer reads every file of this name, at any depth.
    (files / "about.json").rename(files / "model-settings.json")
    with pytest.raises(ConfigError, match="model-settings.json.*MLServer would read it"):
        publish(signature=({"x": X}, {"y": X[:, 0]})).export("mlserver", out="mlserver")
    assert not Path("mlserver").exists()
