"""Load a model, and call it with arrays by name; runs in a server, without hopsgpu.

`about.json` beside this file says what the model is: its format and path, the names and types of
its inputs and outputs, and, of a state_dict, its class.
"""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ABOUT = "about.json"
Arrays = Mapping[str, Any]
Raw = Callable[[Sequence[Any]], Any]
# NumPy's types by the names of the Open Inference Protocol.
TYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "object",
}


class ServedModel:
    """A model that is loaded, and its inputs and outputs.

    Args:
        about: directory with `about.json`.
        files: directory with the model's files; by default the same.
    """

    def __init__(self, about: Path, files: Path | None = None) -> None:
        said = json.loads((about / ABOUT).read_text())
        self.inputs: list[dict[str, Any]] = said["inputs"]
        self.outputs: list[dict[str, Any]] = said["outputs"]
        self._call = _LOADERS[said["format"]]((files or about) / said["path"], said)

    def __call__(self, arrays: Arrays) -> dict[str, Any]:
        """Return the outputs by name for the inputs by name.

        Raises:
            ValueError: an input is missing, or the model returned another number of outputs.
        """
        names = [tensor["name"] for tensor in self.inputs]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ValueError(f"missing inputs: {', '.join(missing)}; expected: {', '.join(names)}")
        given = [
            np.ascontiguousarray(arrays[one["name"]], dtype=TYPES[one["datatype"]])
            for one in self.inputs
        ]
        found = self._call(given)
        if isinstance(found, Mapping):
            found = [found[one["name"]] for one in self.outputs]
        elif not isinstance(found, (list, tuple)):
            found = [found]
        if len(found) != len(self.outputs):
            raise ValueError(f"the model has {len(found)} outputs, expected {len(self.outputs)}")
        return {
            one["name"]: np.asarray(value, dtype=TYPES[one["datatype"]])
            for one, value in zip(self.outputs, found)  # noqa: B905 - lengths are equal
        }


def _onnx(path: Path, said: dict[str, Any]) -> Raw:
    session = importlib.import_module("onnxruntime").InferenceSession(str(path))
    names = [one.name for one in session.get_inputs()]
    outputs = [one["name"] for one in said["outputs"]]
    return lambda given: session.run(outputs, dict(zip(names, given)))  # noqa: B905


def _torch_call(module: Any) -> Raw:
    torch = importlib.import_module("torch")
    module.eval()

    def numbers(found: Any) -> Any:
        if isinstance(found, Mapping):
            return {name: numbers(value) for name, value in found.items()}
        if isinstance(found, (list, tuple)):
            return [numbers(value) for value in found]
        return found.detach().cpu().numpy()

    def call(given: Sequence[Any]) -> Any:
        with torch.no_grad():
            return numbers(module(*map(torch.from_numpy, given)))

    return call


def _torchscript(path: Path, said: dict[str, Any]) -> Raw:
    return _torch_call(importlib.import_module("torch").jit.load(str(path), map_location="cpu"))


def _state_dict(path: Path, said: dict[str, Any]) -> Raw:
    torch = importlib.import_module("torch")
    module, _, name = said["model_class"].partition(":")
    made: Any = importlib.import_module(module)
    for part in name.split("."):
        made = getattr(made, part)
    net = made(**said["arguments"])
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return _torch_call(net)


def _saved_model(path: Path, said: dict[str, Any]) -> Raw:
    tf = importlib.import_module("tensorflow")
    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]
    names = [one["name"] for one in said["inputs"]]

    def call(given: Sequence[Any]) -> Any:
        found = serve(**dict(zip(names, map(tf.constant, given))))  # noqa: B905
        return {name: value.numpy() for name, value in found.items()}

    # The signature holds no reference to what its variables belong to.
    call.loaded = loaded  # type: ignore[attr-defined]
    return call


def _table(given: Sequence[Any]) -> Any:
    """Return the rows that estimators take: the only input, or one column for each."""
    return given[0] if len(given) == 1 else np.column_stack(given)


def _skops(path: Path, said: dict[str, Any]) -> Raw:
    estimator = importlib.import_module("skops.io").load(path, trusted=said["trusted"])
    return lambda given: estimator.predict(_table(given))


def _pickle(path: Path, said: dict[str, Any]) -> Raw:
    if path.suffix.lower() == ".joblib":
        estimator = importlib.import_module("joblib").load(path)
    else:
        with path.open("rb") as file:
            estimator = pickle.load(file)
    return lambda given: estimator.predict(_table(given))


def _xgboost(path: Path, said: dict[str, Any]) -> Raw:
    xgboost = importlib.import_module("xgboost")
    booster = xgboost.Booster(model_file=str(path))
    return lambda given: booster.predict(xgboost.DMatrix(_table(given)))


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], Raw]] = {
    "ONNX": _onnx,
    "TorchScript": _torchscript,
    "state_dict": _state_dict,
    "SavedModel": _saved_model,
    "skops": _skops,
    "pickle": _pickle,
    "XGBoost": _xgboost,
}
