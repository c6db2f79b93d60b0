"""Recognition of models' formats by file names and, where necessary, by content.

Nothing is loaded or unpickled. A bounded part of a file is read: its first bytes, the list of names
in an archive, JSON, or the operations of a pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving.model_directories import (
    DIFFUSERS,
    PEFT,
    SAFETENSORS,
    SENTENCE_TRANSFORMERS,
    Opener,
    find_model_directories,
    pickled_weights,
)
from hopsgpu.serving.torch_files import (
    CHECKPOINT,
    KERAS,
    LIGHTNING,
    PICKLE,
    PICKLED_MODULE,
    STATE_DICT,
    TORCH_EXPORT,
    TORCHSCRIPT,
    is_keras_archive,
    torch_format,
)
from hopsgpu.storage.error_messages import DAMAGED, JSON_ERRORS

SAVED_MODEL = "SavedModel"
ONNX = "ONNX"
SKOPS = "skops"
XGBOOST = "XGBoost"

# The file that names the class to which a state_dict belongs.
CLASS_FILE = "model_class.json"
_MAX_CLASS_FILE = 2**16
_SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_SAVED_MODEL_PARTS = (*_SAVED_MODEL_FILES, "fingerprint.pb", "variables", "assets", "assets.extra")
_PICKLES = (".pkl", ".pickle", ".joblib")
_BY_SUFFIX = {".onnx": ONNX, ".skops": SKOPS, **dict.fromkeys(_PICKLES, PICKLE)}
# A file with one of these suffixes may be a pickle that torch did not write.
_TORCH = (".pt", ".pth", ".tar")
_MAYBE_TORCH = (".pt2", ".ckpt", ".bin")
_HDF5 = (".h5", ".hdf5")
_XGBOOST = (".json", ".ubj")
# XGBoost writes these keys in either order, in JSON and in Universal Binary JSON.
_BOOSTER = re.compile(
    rb'\s*\{\s*("version"\s*:\s*\[[\d,\s]*\]\s*,\s*)?"learner"\s*:\s*\{'
    rb"|\{L\x00{7}(\x07learner|\x07version)",
)
_HEAD_BYTES = 256
# Keras writes this attribute, with the model's layers, before the weights.
_HDF5_MAGIC, _HDF5_HEAD_BYTES, _HDF5_MODEL = b"\x89HDF\r\n\x1a\n", 2**16, b"model_config"
# The length of the header (8 bytes, of which 5 may be used) and the start of its JSON.
_SAFETENSORS = re.compile(rb".{5}\0{3}\{", re.DOTALL)
# A program is loaded by running parts of it, such as the initialisation of tables or
# `__setstate__`, which may open any file.
_PROGRAM = "is a program, which can read and write files"
# Why the load of a file of the format runs the publisher's code.
_TRUST_REASONS = {
    SAVED_MODEL: _PROGRAM,
    TORCHSCRIPT: _PROGRAM,
    PICKLE: "is a pickle",
    PICKLED_MODULE: "is a whole module in a pickle (better publish module.state_dict())",
    TORCH_EXPORT: "may have pickles, which torch.export.load unpickles",
    KERAS: "names classes and functions, which Keras imports",
}
_CLASS_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# Alternatives for models that a server, or load(), does not accept.
_ADVICE = {
    CHECKPOINT: "publish model.state_dict(), with model_class.json, or ONNX",
    LIGHTNING: "publish module.state_dict(), with model_class.json, or ONNX",
    PICKLED_MODULE: "publish module.state_dict(), with model_class.json",
    TORCH_EXPORT: "publish ONNX or TorchScript",
    KERAS: "publish the SavedModel that model.export(directory) writes",
    SAFETENSORS: "publish what save_pretrained writes, or a state_dict with model_class.json",
    PEFT: (
        "download() it, and pass the directory to peft.AutoPeftModel.from_pretrained; or publish"
        " what model.merge_and_unload().save_pretrained writes, which is a whole model"
    ),
    DIFFUSERS: (
        "download() it, and pass the directory to diffusers.DiffusionPipeline.from_pretrained"
    ),
    SENTENCE_TRANSFORMERS: (
        "download() it, and pass the directory to sentence_transformers.SentenceTransformer"
    ),
}


@dataclass(frozen=True)
class ModelFormat:
    """A model among a version's files.

    Attributes:
        name: name of the format, such as "SavedModel", "state_dict" or "transformers";
            docs/serving.md lists all of them.
        path: path of the model's file or directory within the version; "." for the version's own
            directory.
        model_class: for a state_dict the class in `model_class.json`, as "module:Class"; or None.
        trust_reason: why a load runs code that the publisher chose, so that `load` and `export`
            need `trust`; None if it does not. For a `model_class`, `trust` is to name the class.
    """

    __module__ = "hopsgpu.types"

    name: str
    path: str
    model_class: str | None = None
    trust_reason: str | None = None

    def __str__(self) -> str:
        of = f" of {self.model_class}" if self.model_class else ""
        return f"{self.name}{of} ({self.path})"


@dataclass(frozen=True)
class ModelClass:
    """A state_dict's class, as "module:Class", and keyword arguments, from `model_class.json`."""

    name: str
    arguments: Mapping[str, Any]


def recognise_formats(paths: Iterable[str], open_file: Opener) -> tuple[ModelFormat, ...]:
    """Return the models among a version's files, sorted by path.

    Raises:
        StoreError: a file cannot be read, or `model_class.json` is damaged.
    """
    all_paths = sorted(paths)
    files = map(PurePosixPath, all_paths)
    saved = dict.fromkeys(str(file.parent) for file in files if file.name in _SAVED_MODEL_FILES)
    models = [ModelFormat(SAVED_MODEL, home, None, _PROGRAM) for home in saved]
    other_paths = [p for p in all_paths if not any(is_saved_model_part(p, home) for home in saved)]
    model_directories = find_model_directories(other_paths, open_file)
    models += [ModelFormat(d.name, d.path, None, d.trust_reason) for d in model_directories]
    in_directories = frozenset[str]().union(*(d.files for d in model_directories))
    for path in other_paths:
        name = None if path in in_directories else _format_of(path, open_file)
        if name is not None:
            model = ModelFormat(name, path, None, _TRUST_REASONS.get(name))
            if name == STATE_DICT:
                model = with_class(model, read_model_class(path, all_paths, open_file))
            models.append(model)
    return tuple(sorted(models, key=lambda model: model.path))


def with_class(model: ModelFormat, model_class: ModelClass | None) -> ModelFormat:
    """Return a state_dict's format with the class that is named for it."""
    if model_class is None:
        return replace(model, model_class=None, trust_reason=None)
    reason = f"names a class to call, {model_class.name} ({CLASS_FILE})"
    return replace(model, model_class=model_class.name, trust_reason=reason)


def is_saved_model_part(path: str, directory: str) -> bool:
    """Return whether a file belongs to the SavedModel in a directory."""
    file = PurePosixPath(path)
    return (
        file.is_relative_to(directory)
        and file.relative_to(directory).parts[0] in _SAVED_MODEL_PARTS
    )


def pickle_warning(paths: Iterable[str]) -> str | None:
    """Return a warning for the publisher of files that are pickles by their names, or None."""
    files = list(paths)
    pickles = {path for path in files if PurePosixPath(path).suffix.lower() in _PICKLES}
    pickles.update(pickled_weights(files))
    if not pickles:
        return None
    return (
        f"{', '.join(sorted(pickles))}: whoever loads a pickle runs the code in it, and a later"
        " version of the library may not read it; for scikit-learn, publish what skops.io.dump"
        " writes, and for Hugging Face's libraries what"
        " save_pretrained(safe_serialization=True) writes"
    )


def read_model_class(path: str, paths: Collection[str], open_file: Opener) -> ModelClass | None:
    """Return the class in the `model_class.json` beside a state_dict, or at the top; or None.

    Raises:
        StoreError: the file is damaged.
    """
    beside = str(PurePosixPath(path).parent / CLASS_FILE)
    place = beside if beside in paths else CLASS_FILE
    if place not in paths:
        return None
    with open_file(place) as file:
        content = file.read(_MAX_CLASS_FILE + 1)
    try:
        if len(content) > _MAX_CLASS_FILE:
            raise ValueError(f"it has more than {_MAX_CLASS_FILE} bytes")
        fields = json.loads(content)
        name, arguments = fields["class"], fields.get("arguments", {})
        if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
            raise ValueError(f"class is {name!r:.99}")
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments is {arguments!r:.99}")
    except JSON_ERRORS as error:
        raise StoreError(
            f'{place} must be like {{"class": "package.module:Class", "arguments": {{}}}}'
            f" ({error})",
            DAMAGED,
        ) from error
    return ModelClass(name, arguments)


def choose_format(
    formats: Iterable[ModelFormat], path: str | None, accepted: Iterable[str] | None, url: str
) -> ModelFormat:
    """Return the model with a path, or the only one, among models of accepted formats.

    Raises:
        ConfigError: no model matches, or several do.
    """
    models = tuple(formats)
    matching = [
        model
        for model in models
        if (accepted is None or model.name in accepted) and path in (None, model.path)
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(map(str, models)) or "none"
    if not matching:
        wanted = "" if accepted is None else f" of {', '.join(accepted)}"
        at = "" if path is None else f" at {path!r}"
        raise ConfigError(
            f"{url} has no model{wanted}{at} that hopsgpu recognises; models: {names}"
            + "".join(f"; {model}: {advice(model)}" for model in models if model.name in _ADVICE)
        )
    raise ConfigError(
        f"{url} has several models: {', '.join(map(str, matching))}; choose one by its path:"
        f" path={matching[0].path!r}"
    )


def advice(model: ModelFormat) -> str:
    return _ADVICE[model.name]


def _format_of(path: str, open_file: Opener) -> str | None:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if suffix in _TORCH or suffix in _MAYBE_TORCH:
        with open_file(path) as file:
            return torch_format(path, file, suffix in _TORCH)
    if suffix == ".keras":
        with open_file(path) as file:
            return KERAS if is_keras_archive(file) else None
    if suffix in _HDF5:
        with open_file(path) as file:
            head = file.read(_HDF5_HEAD_BYTES)
        return KERAS if head.startswith(_HDF5_MAGIC) and _HDF5_MODEL in head else None
    if suffix == ".safetensors":
        with open_file(path) as file:
            return SAFETENSORS if _SAFETENSORS.match(file.read(_HEAD_BYTES)) else None
    if suffix in _XGBOOST:
        with open_file(path) as file:
            return XGBOOST if _BOOSTER.match(file.read(_HEAD_BYTES)) else None
    return None
