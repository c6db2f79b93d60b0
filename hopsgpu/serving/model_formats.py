"""The formats of models, recognised by names of files and, where those do not tell, by content.

Nothing is loaded and nothing unpickled. What is read of a file is bounded: its first bytes, a list
of the names in it, JSON, or the operations of a pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving.model_directories import (
    DIFFUSERS,
    PEFT,
    SAFETENSORS,
    SENTENCE_TRANSFORMERS,
    Opener,
    directories,
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
_MOST_CLASS_FILE = 2**16
_SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_SAVED_MODEL_PARTS = (*_SAVED_MODEL_FILES, "fingerprint.pb", "variables", "assets", "assets.extra")
_BY_SUFFIX = {".onnx": ONNX, ".skops": SKOPS}
_PICKLES = (".pkl", ".pickle", ".joblib")
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
_HEAD = 256
# The attribute in which Keras has a model's layers; it is written before the weights.
_HDF5_MAGIC, _HDF5_HEAD, _HDF5_MODEL = b"\x89HDF\r\n\x1a\n", 2**16, b"model_config"
# The length of the header, of which real ones use four bytes, and the begin of its JSON.
_SAFETENSORS = re.compile(rb".{5}\0{3}\{", re.DOTALL)
# Why loading a file of the format runs the publisher's code.
_TRUST_REASONS = {
    PICKLE: "is a pickle",
    PICKLED_MODULE: "is a whole module in a pickle (better publish module.state_dict())",
    TORCH_EXPORT: "may have pickles, which torch.export.load unpickles",
    KERAS: "names classes and functions, which Keras imports",
}
_CLASS_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# How a model can be used that a server, or load(), does not take.
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
        path: path of the file within the version; of a model that is a directory the directory's,
            "." for the version's own.
        model_class: of a state_dict, the class that `model_class.json` names, as "module:Class"; or
            None.
        trust_reason: why loading the model runs its publisher's code, so that `load` and `export`
            need `trust`; None if it does not.
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
    """The class of a state_dict, and how it is made: what `model_class.json` has.

    Attributes:
        name: "module:Class".
        arguments: keyword arguments of the constructor, as JSON values.
    """

    name: str
    arguments: Mapping[str, Any]


def recognised(paths: Iterable[str], opened: Opener) -> tuple[ModelFormat, ...]:
    """Return the models among a version's files, sorted by path.

    Args:
        paths: paths of all files of the version.
        opened: opens a file of the version for reading; the caller closes it.

    Raises:
        StoreError: a file cannot be read, or `model_class.json` is damaged.
    """
    there = sorted(paths)
    inside = [
        str(PurePosixPath(p).parent) for p in there if PurePosixPath(p).name in _SAVED_MODEL_FILES
    ]
    found = [ModelFormat(SAVED_MODEL, directory) for directory in dict.fromkeys(inside)]
    own = [p for p in there if not any(is_saved_model_part(p, directory) for directory in inside)]
    homes = directories(own, opened)
    found += [ModelFormat(one.name, one.path, None, one.trust_reason) for one in homes]
    taken = frozenset[str]().union(*(one.files for one in homes))
    for path in own:
        if path in taken:
            continue
        name = _format_of(path, opened)
        if name is not None:
            named = model_class(path, there, opened) if name == STATE_DICT else None
            reason = _TRUST_REASONS.get(name)
            found.append(ModelFormat(name, path, None if named is None else named.name, reason))
    return tuple(sorted(found, key=lambda one: one.path))


def is_saved_model_part(path: str, directory: str) -> bool:
    """Return whether a file belongs to the SavedModel in a directory."""
    file = PurePosixPath(path)
    return (
        file.is_relative_to(directory)
        and file.relative_to(directory).parts[0] in _SAVED_MODEL_PARTS
    )


def pickles(paths: Iterable[str]) -> list[str]:
    """Return those files that are pickles by their names, which run code when they are loaded."""
    files = list(paths)
    named = {path for path in files if PurePosixPath(path).suffix.lower() in _PICKLES}
    return sorted(named.union(pickled_weights(files)))


def pickle_warning(paths: Iterable[str]) -> str | None:
    """Return a warning for the publisher of pickles; None if there are none."""
    named = pickles(paths)
    if not named:
        return None
    return (
        f"{', '.join(named)}: whoever loads a pickle runs the code in it, and a later version of"
        " the library may not read it; for scikit-learn, publish what skops.io.dump writes, and for"
        " Hugging Face's libraries what save_pretrained(safe_serialization=True) writes"
    )


def model_class(path: str, paths: Collection[str], opened: Opener) -> ModelClass | None:
    """Return the class that a version names for a state_dict; None if it names none.

    Args:
        path: path of the state_dict. The file that names its class is beside it, or at the top.
        paths: paths of all files of the version.
        opened: opens a file of the version for reading; the caller closes it.

    Raises:
        StoreError: the file that names it is damaged.
    """
    beside = str(PurePosixPath(path).parent / CLASS_FILE)
    place = beside if beside in paths else CLASS_FILE
    if place not in paths:
        return None
    with opened(place) as file:
        content = file.read(_MOST_CLASS_FILE + 1)
    try:
        if len(content) > _MOST_CLASS_FILE:
            raise ValueError(f"it has more than {_MOST_CLASS_FILE} bytes")
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


def chosen(
    formats: Iterable[ModelFormat], path: str | None, accepted: Iterable[str] | None, url: str
) -> ModelFormat:
    """Return the model that is meant.

    Args:
        formats: from `recognised`.
        path: the path of the one that is meant; None if there is only one.
        accepted: names of the formats that can be used; None for all.
        url: URL of the version, for the error.

    Raises:
        ConfigError: there is none, or there are several, and the message names them.
    """
    there = tuple(formats)
    fit = [
        one
        for one in there
        if (accepted is None or one.name in accepted) and path in (None, one.path)
    ]
    if len(fit) == 1:
        return fit[0]
    known = ", ".join(map(str, there)) or "none"
    if not fit:
        wanted = "" if accepted is None else f" of {', '.join(accepted)}"
        at = "" if path is None else f" at {path!r}"
        raise ConfigError(
            f"{url} has no model{wanted}{at} that hopsgpu recognises; models: {known}"
            + "".join(f"; {one}: {advice(one)}" for one in there if one.name in _ADVICE)
        )
    raise ConfigError(
        f"{url} has several models: {', '.join(map(str, fit))}; choose one by its path:"
        f" path={fit[0].path!r}"
    )


def advice(model: ModelFormat) -> str:
    """Return how a model can be used that a server, or `load`, does not take."""
    return _ADVICE[model.name]


def _format_of(path: str, opened: Opener) -> str | None:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if suffix in _PICKLES:
        return PICKLE
    if suffix in _TORCH or suffix in _MAYBE_TORCH:
        with opened(path) as file:
            return torch_format(path, file, suffix in _TORCH)
    if suffix == ".keras":
        with opened(path) as file:
            return KERAS if is_keras_archive(file) else None
    if suffix in _HDF5:
        with opened(path) as file:
            head = file.read(_HDF5_HEAD)
        return KERAS if head.startswith(_HDF5_MAGIC) and _HDF5_MODEL in head else None
    if suffix == ".safetensors":
        with opened(path) as file:
            return SAFETENSORS if _SAFETENSORS.match(file.read(_HEAD)) else None
    if suffix in _XGBOOST:
        with opened(path) as file:
            return XGBOOST if _BOOSTER.match(file.read(_HEAD)) else None
    return None
