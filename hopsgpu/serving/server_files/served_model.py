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
            ValueError: an input is missing, or what the model returned is not what the signature
                says.
        """
        names = [tensor["name"] for tensor in self.inputs]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ValueError(f"missing inputs: {', '.join(missing)}; expected: {', '.join(names)}")
        given = [_given(arrays[one["name"]], one) for one in self.inputs]
        found = self._call(given)
        if isinstance(found, Mapping):
            found = [found[one["name"]] for one in self.outputs]
        elif not isinstance(found, (list, tuple)):
            found = [found]
        if len(found) != len(self.outputs):
            raise ValueError(f"the model has {len(found)} outputs, expected {len(self.outputs)}")
        return {
            one["name"]: _returned(value, one)
            for one, value in zip(self.outputs, found)  # noqa: B905 - lengths are equal
        }


def _given(value: Any, said: Mapping[str, Any]) -> Any:
    """Return an input as the model wants it."""
    array = np.array(value, dtype=TYPES[said["datatype"]], order="C")
    if said["datatype"] == "BYTES":
        # Triton's strings are bytes, KServe's are text, and models have learned text.
        texts = [_text(one) for one in array.ravel()]
        array = np.array([*texts, None], dtype=object)[:-1].reshape(array.shape)
    # Triton has no tensor without dimensions.
    return array.reshape(()) if said["shape"] == [] else array


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _returned(value: Any, said: Mapping[str, Any]) -> Any:
    """Return an output as the signature says; raise ValueError if it is something else."""
    found, wanted, shape = np.asarray(value), np.dtype(TYPES[said["datatype"]]), said["shape"]
    if found.ndim != len(shape) or any(
        size not in (-1, there)
        for size, there in zip(shape, found.shape)  # noqa: B905 - lengths are equal
    ):
        raise ValueError(
            f"output {said['name']!r} has the shape {list(found.shape)}, and the signature says"
            f" {shape}: publish the signature of what the model itself returns"
        )
    # Numbers that become others without a word are worse than an error.
    if not np.can_cast(found.dtype, wanted, "same_kind"):
        raise ValueError(
            f"output {said['name']!r} has the type {found.dtype}, and the signature says"
            f" {said['datatype']}: publish the signature of what the model itself returns"
        )
    return found.astype(wanted)


def _onnx(path: Path, said: dict[str, Any]) -> Raw:
    session = importlib.import_module("onnxruntime").InferenceSession(str(path))
    names = [one.name for one in session.get_inputs()]
    own = _names(said["inputs"])
    order = own if set(own) == set(names) else names
    there = [one.name for one in session.get_outputs()]
    outputs = _names(said["outputs"])
    wanted = outputs if set(outputs) <= set(there) else there
    return lambda given: session.run(wanted, dict(zip(order, given)))  # noqa: B905


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


def _pickled_module(path: Path, said: dict[str, Any]) -> Raw:
    torch = importlib.import_module("torch")
    return _torch_call(torch.load(path, map_location="cpu", weights_only=False))


def _transformers(path: Path, said: dict[str, Any]) -> Raw:
    """Return a call with the inputs as keywords, of a model whose outputs have names."""
    torch = importlib.import_module("torch")
    model = pretrained(importlib.import_module("transformers"), path, said["is_trusted"])
    names, outputs = _names(said["inputs"]), _names(said["outputs"])

    def call(given: Sequence[Any]) -> Any:
        with torch.no_grad():
            found = model(**dict(zip(names, map(torch.from_numpy, given))))  # noqa: B905
        missing = [name for name in outputs if name not in found]
        if missing:
            raise ValueError(f"the model has no output {missing[0]!r}: it has {', '.join(found)}")
        # NumPy has no bfloat16, in which the weights may be.
        return {
            name: (one.float() if one.dtype == torch.bfloat16 else one).cpu().numpy()
            for name, one in ((name, found[name]) for name in outputs)
        }

    return call


def pretrained(transformers: Any, path: Path, is_trusted: bool) -> Any:
    """Return the model of a directory, without the network.

    Args:
        transformers: the library.
        path: the directory.
        is_trusted: whether code that the directory names may run, and pickles may be loaded.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    made = _pretrained_class(transformers, config)
    given = {"local_files_only": True, "trust_remote_code": is_trusted}
    # By default transformers takes pickles where it finds no others.
    return made.from_pretrained(path, **given, **({} if is_trusted else {"use_safetensors": True}))


def _pretrained_class(transformers: Any, config: Mapping[str, Any]) -> Any:
    """Return the class of a configuration's model, or the automatic class that finds it."""
    own = [name for name in config.get("auto_map") or () if name.startswith("AutoModel")]
    if own:
        # AutoModel itself has no head, with which the weights were saved.
        return getattr(transformers, max(own, key=len))
    for name in config.get("architectures") or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModel


def _saved_model(path: Path, said: dict[str, Any]) -> Raw:
    tf = importlib.import_module("tensorflow")
    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]
    names = _matching(_names(said["inputs"]), serve.structured_input_signature[1], "input")
    outputs = _names(said["outputs"])
    there = dict(zip(outputs, _matching(outputs, serve.structured_outputs, "output")))  # noqa: B905

    def call(given: Sequence[Any]) -> Any:
        found = serve(**dict(zip(names, map(tf.constant, given))))  # noqa: B905
        return {name: found[own].numpy() for name, own in there.items()}

    # The signature holds no reference to what its variables belong to.
    call.loaded = loaded  # type: ignore[attr-defined]
    return call


def _names(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    return [one["name"] for one in tensors]


def _matching(named: Sequence[str], own: Mapping[str, Any], what: str) -> list[str]:
    """Return the model's own names of tensors, in the signature's order."""
    if set(named) <= set(own):
        return list(named)
    if len(named) == len(own) == 1:
        return list(own)
    raise ValueError(
        f"the signature names the {what}s {', '.join(named)}, and the SavedModel"
        f" {', '.join(sorted(own))}: publish a signature with these names"
    )


def _table(given: Sequence[Any]) -> Any:
    """Return the rows that estimators take: the only input, or one column for each."""
    return given[0] if len(given) == 1 and given[0].ndim > 1 else np.column_stack(given)


def _estimator_call(estimator: Any, said: Mapping[str, Any]) -> Raw:
    """Return a call of an estimator of scikit-learn that returns what the signature says."""
    names = _names(said["inputs"])
    learned = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    is_frame = len(learned) == len(names) and set(learned) == set(names)
    predict = estimator.predict
    if len(said["outputs"]) == 1:
        (output,) = said["outputs"]
        # Labels have one dimension; several at once are no floating-point numbers.
        shares = output["datatype"].startswith("FP") and len(output["shape"]) > 1
        predict = getattr(estimator, "predict_proba", predict) if shares else predict

    def call(given: Sequence[Any]) -> Any:
        if not is_frame:
            return predict(_table(given))
        frame = importlib.import_module("pandas").DataFrame(dict(zip(names, given)))  # noqa: B905
        return predict(frame[learned])

    return call


def _skops(path: Path, said: dict[str, Any]) -> Raw:
    estimator = importlib.import_module("skops.io").load(path, trusted=said["trusted"])
    return _estimator_call(estimator, said)


def _pickle(path: Path, said: dict[str, Any]) -> Raw:
    try:
        load = importlib.import_module("joblib").load
    except ModuleNotFoundError:
        with path.open("rb") as file:
            return _estimator_call(pickle.load(file), said)
    # It reads plain pickles too, whatever their names.
    return _estimator_call(load(path), said)


def _xgboost(path: Path, said: dict[str, Any]) -> Raw:
    xgboost = importlib.import_module("xgboost")
    booster = xgboost.Booster(model_file=str(path))
    objective = json.loads(booster.save_config())["learner"]["objective"]["name"]
    names, learned = _names(said["inputs"]), booster.feature_names
    by_name = learned is not None and len(names) == len(learned) and set(names) == set(learned)
    order = [names.index(one) for one in learned] if by_name else range(len(names))

    def call(given: Sequence[Any]) -> Any:
        table = _table([given[at] for at in order])
        found = booster.predict(xgboost.DMatrix(table, feature_names=learned))
        return _as_classifier(found, objective, said["outputs"])

    return call


def _as_classifier(found: Any, objective: str, outputs: Sequence[Mapping[str, Any]]) -> Any:
    """Return what XGBClassifier's predict and predict_proba do of a booster's probabilities."""
    if len(outputs) != 1:
        return found
    (output,) = outputs
    labels = not output["datatype"].startswith("FP")
    if objective == "binary:logistic" and labels:
        return (found > 0.5).astype(np.int64)
    if objective == "binary:logistic" and len(output["shape"]) > 1:
        return np.column_stack([1 - found, found])
    if objective == "multi:softprob" and labels:
        return found.argmax(axis=1)
    return found


_LOADERS: dict[str, Callable[[Path, dict[str, Any]], Raw]] = {
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
