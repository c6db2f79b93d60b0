"""Loads a model, and calls it with arrays by name; runs in a server, without hopsgpu.

`about.json` beside this file has the model's format and path, the names and types of its inputs and
outputs, and the class of a state_dict.
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
_SAFE_TORCH = (2, 6)
Arrays = Mapping[str, Any]
ArrayCall = Callable[[Sequence[Any]], Any]
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
    """A loaded model.

    Args:
        directory: the directory with `about.json`.
        files: the directory with the model's files; by default the same.
    """

    def __init__(self, directory: Path, files: Path | None = None) -> None:
        about = json.loads((directory / ABOUT).read_text())
        self.inputs: list[dict[str, Any]] = about["inputs"]
        self.outputs: list[dict[str, Any]] = about["outputs"]
        self._call = _LOADERS[about["format"]]((files or directory) / about["path"], about)

    def __call__(self, arrays: Arrays) -> dict[str, Any]:
        """Return the outputs by name for the inputs by name.

        Raises:
            ValueError: an input is missing, or the outputs differ from the signature.
        """
        names = [tensor["name"] for tensor in self.inputs]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ValueError(f"missing inputs: {', '.join(missing)}; expected: {', '.join(names)}")
        results = self._call([_input_array(arrays[t["name"]], t) for t in self.inputs])
        if isinstance(results, Mapping):
            results = [results[tensor["name"]] for tensor in self.outputs]
        elif not isinstance(results, (list, tuple)):
            results = [results]
        if len(results) != len(self.outputs):
            raise ValueError(f"the model has {len(results)} outputs, expected {len(self.outputs)}")
        return {
            tensor["name"]: _output_array(value, tensor)
            for tensor, value in zip(self.outputs, results)  # noqa: B905 - lengths are equal
        }


def _input_array(value: Any, tensor: Mapping[str, Any]) -> Any:
    array = np.array(value, dtype=TYPES[tensor["datatype"]], order="C")
    if tensor["datatype"] == "BYTES":
        # Triton's strings are bytes, KServe's are text, and models are trained with text.
        texts = [_text(item) for item in array.ravel()]
        array = np.array([*texts, None], dtype=object)[:-1].reshape(array.shape)
    # Triton has no tensors without dimensions.
    return array.reshape(()) if tensor["shape"] == [] else array


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _output_array(value: Any, tensor: Mapping[str, Any]) -> Any:
    """Return an output in the signature's type; raise ValueError if type or shape do not fit."""
    array, dtype, shape = np.asarray(value), np.dtype(TYPES[tensor["datatype"]]), tensor["shape"]
    if array.ndim != len(shape) or any(
        expected not in (-1, size)
        for expected, size in zip(shape, array.shape)  # noqa: B905 - lengths are equal
    ):
        raise ValueError(
            f"output {tensor['name']!r} has the shape {list(array.shape)}, and the signature says"
            f" {shape}: publish the signature of what the model itself returns"
        )
    # Do not change numbers silently.
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(
            f"output {tensor['name']!r} has the type {array.dtype}, and the signature says"
            f" {tensor['datatype']}: publish the signature of what the model itself returns"
        )
    return array.astype(dtype)


def _onnx(path: Path, about: dict[str, Any]) -> ArrayCall:
    session = importlib.import_module("onnxruntime").InferenceSession(str(path))
    file_inputs = [tensor.name for tensor in session.get_inputs()]
    file_outputs = [tensor.name for tensor in session.get_outputs()]
    inputs, outputs = _names(about["inputs"]), _names(about["outputs"])
    order = inputs if set(inputs) == set(file_inputs) else file_inputs
    requested = outputs if set(outputs) <= set(file_outputs) else file_outputs
    return lambda arrays: session.run(requested, dict(zip(order, arrays)))  # noqa: B905


def _torch_call(module: Any) -> ArrayCall:
    torch = importlib.import_module("torch")
    module.eval()

    def to_numpy(output: Any) -> Any:
        if isinstance(output, Mapping):
            return {name: to_numpy(value) for name, value in output.items()}
        if isinstance(output, (list, tuple)):
            return [to_numpy(value) for value in output]
        return output.detach().cpu().numpy()

    def call(arrays: Sequence[Any]) -> Any:
        with torch.no_grad():
            return to_numpy(module(*map(torch.from_numpy, arrays)))

    return call


def _torchscript(path: Path, about: dict[str, Any]) -> ArrayCall:
    return _torch_call(importlib.import_module("torch").jit.load(str(path), map_location="cpu"))


def _state_dict(path: Path, about: dict[str, Any]) -> ArrayCall:
    torch = importlib.import_module("torch")
    module, _, name = about["model_class"].partition(":")
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    # The publisher chose class and arguments: no other callable may get them.
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(f"{about['model_class']} is no subclass of torch.nn.Module")
    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        raise RuntimeError(
            f"torch {torch.__version__} can run code of a file in spite of weights_only=True"
            " (CVE-2025-32434): install torch 2.6 or later"
        )
    net = cls(**about["arguments"])
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return _torch_call(net)


def _pickled_module(path: Path, about: dict[str, Any]) -> ArrayCall:
    torch = importlib.import_module("torch")
    return _torch_call(torch.load(path, map_location="cpu", weights_only=False))


def _transformers(path: Path, about: dict[str, Any]) -> ArrayCall:
    """Return a call with inputs as keywords and named outputs."""
    torch = importlib.import_module("torch")
    model = load_pretrained(importlib.import_module("transformers"), path, about["is_trusted"])
    names, outputs = _names(about["inputs"]), _names(about["outputs"])

    def call(arrays: Sequence[Any]) -> Any:
        with torch.no_grad():
            results = model(**dict(zip(names, map(torch.from_numpy, arrays))))  # noqa: B905
        missing = [name for name in outputs if name not in results]
        if missing:
            raise ValueError(f"the model has no output {missing[0]!r}: it has {', '.join(results)}")
        # NumPy lacks bfloat16.
        return {
            name: (output.float() if output.dtype == torch.bfloat16 else output).cpu().numpy()
            for name, output in ((name, results[name]) for name in outputs)
        }

    return call


def load_pretrained(transformers: Any, path: Path, is_trusted: bool) -> Any:
    """Load a model from a directory, without the network.

    If it is trusted, code that the directory names may run, and pickles may be loaded.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model_class = _pretrained_class(transformers, config)
    options = {"local_files_only": True, "trust_remote_code": is_trusted}
    # By default transformers loads pickles if there are no other weights.
    return model_class.from_pretrained(
        path, **options, **({} if is_trusted else {"use_safetensors": True})
    )


def _pretrained_class(transformers: Any, config: Mapping[str, Any]) -> Any:
    """Return the class of a configuration's model, or an automatic class."""
    auto_classes = [name for name in config.get("auto_map") or () if name.startswith("AutoModel")]
    if auto_classes:
        # AutoModel lacks the head, which the saved weights have.
        return getattr(transformers, max(auto_classes, key=len))
    for name in config.get("architectures") or ():
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    return transformers.AutoModel


def _saved_model(path: Path, about: dict[str, Any]) -> ArrayCall:
    tf = importlib.import_module("tensorflow")
    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]
    names = _matching(_names(about["inputs"]), serve.structured_input_signature[1], "input")
    outputs = _names(about["outputs"])
    output_names = dict(zip(outputs, _matching(outputs, serve.structured_outputs, "output")))  # noqa: B905

    def call(arrays: Sequence[Any]) -> Any:
        results = serve(**dict(zip(names, map(tf.constant, arrays))))  # noqa: B905
        return {name: results[file_name].numpy() for name, file_name in output_names.items()}

    # The signature has no reference to the owner of its variables.
    call.loaded = loaded  # type: ignore[attr-defined]
    return call


def _names(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tensor["name"] for tensor in tensors]


def _matching(names: Sequence[str], file_names: Mapping[str, Any], what: str) -> list[str]:
    """Return the SavedModel's names of tensors, in the signature's order."""
    if set(names) <= set(file_names):
        return list(names)
    if len(names) == len(file_names) == 1:
        return list(file_names)
    raise ValueError(
        f"the signature names the {what}s {', '.join(names)}, and the SavedModel"
        f" {', '.join(sorted(file_names))}: publish a signature with these names"
    )


def _table(arrays: Sequence[Any]) -> Any:
    """Return an estimator's rows: the only input, or a column for each input."""
    return arrays[0] if len(arrays) == 1 and arrays[0].ndim > 1 else np.column_stack(arrays)


def _estimator_call(estimator: Any, about: Mapping[str, Any]) -> ArrayCall:
    """Return a call of the method of an estimator that fits the signature's outputs."""
    names = _names(about["inputs"])
    features = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    is_frame = len(features) == len(names) and set(features) == set(names)
    predict = estimator.predict
    if len(about["outputs"]) == 1:
        (output,) = about["outputs"]
        # Labels have one dimension, or are not floating-point numbers.
        has_probabilities = output["datatype"].startswith("FP") and len(output["shape"]) > 1
        predict = getattr(estimator, "predict_proba", predict) if has_probabilities else predict

    def call(arrays: Sequence[Any]) -> Any:
        if not is_frame:
            return predict(_table(arrays))
        frame = importlib.import_module("pandas").DataFrame(dict(zip(names, arrays)))  # noqa: B905
        return predict(frame[features])

    return call


def _skops(path: Path, about: dict[str, Any]) -> ArrayCall:
    estimator = importlib.import_module("skops.io").load(path, trusted=about["trusted"])
    return _estimator_call(estimator, about)


def _pickle(path: Path, about: dict[str, Any]) -> ArrayCall:
    try:
        load = importlib.import_module("joblib").load
    except ModuleNotFoundError:
        with path.open("rb") as file:
            return _estimator_call(pickle.load(file), about)
    # joblib reads plain pickles too.
    return _estimator_call(load(path), about)


def _xgboost(path: Path, about: dict[str, Any]) -> ArrayCall:
    xgboost = importlib.import_module("xgboost")
    booster = xgboost.Booster(model_file=str(path))
    objective = json.loads(booster.save_config())["learner"]["objective"]["name"]
    names, features = _names(about["inputs"]), booster.feature_names
    by_name = features is not None and len(names) == len(features) and set(names) == set(features)
    order = [names.index(feature) for feature in features] if by_name else range(len(names))

    def call(arrays: Sequence[Any]) -> Any:
        table = _table([arrays[index] for index in order])
        results = booster.predict(xgboost.DMatrix(table, feature_names=features))
        return _as_classifier(results, objective, about["outputs"])

    return call


def _as_classifier(results: Any, objective: str, outputs: Sequence[Mapping[str, Any]]) -> Any:
    """Return a booster's probabilities as XGBClassifier's predict or predict_proba does."""
    if len(outputs) != 1:
        return results
    (output,) = outputs
    labels = not output["datatype"].startswith("FP")
    if objective == "binary:logistic" and labels:
        return (results > 0.5).astype(np.int64)
    if objective == "binary:logistic" and len(output["shape"]) > 1:
        return np.column_stack([1 - results, results])
    if objective == "multi:softprob" and labels:
        return results.argmax(axis=1)
    return results


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], ArrayCall]] = {
    "ONNX": _onnx,
    "TorchScript": _torchscript,
    "state_dict": _state_dict,
    "pickled module": _pickled_module,
    "transformers": _transformers,
    "SavedModel": _saved_model,
    "skops": _skops,
    "pickle": _pickle,
    "XGBoost": _xgboost,
}
