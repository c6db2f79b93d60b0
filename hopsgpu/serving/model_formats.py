"""The formats of models, recognised by names of files and, where those do not tell, by content.

Nothing is loaded and nothing unpickled: of a file at most its first bytes or a list of the names in
it are read.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.error_messages import DAMAGED, ODD_JSON

SAVED_MODEL = "SavedModel"
TORCHSCRIPT = "TorchScript"
ONNX = "ONNX"
STATE_DICT = "state_dict"
SKOPS = "skops"
PICKLE = "pickle"
XGBOOST = "XGBoost"

# The file that names the class to which a state_dict belongs.
CLASS_FILE = "model_class.json"
_MOST_CLASS_FILE = 2**16
_SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
_SAVED_MODEL_PARTS = (*_SAVED_MODEL_FILES, "fingerprint.pb", "variables", "assets", "assets.extra")
_BY_SUFFIX = {".onnx": ONNX, ".skops": SKOPS}
_PICKLES = (".pkl", ".pickle", ".joblib")
_TORCH = (".pt", ".pth")
_XGBOOST = (".json", ".ubj")
# XGBoost writes these keys in either order, in JSON and in Universal Binary JSON.
_BOOSTER = re.compile(
    rb'\s*\{\s*("version"\s*:\s*\[[\d,\s]*\]\s*,\s*)?"learner"\s*:\s*\{'
    rb"|\{L\x00{7}(\x07learner|\x07version)",
)
_HEAD = 256
_ZIP, _PICKLE_HEAD = b"PK\x03\x04", b"\x80"
_CLASS_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

Opener = Callable[[str], BinaryIO]


@dataclass(frozen=True)
class ModelFormat:
    """A model among a version's files.

    Attributes:
        name: "SavedModel", "TorchScript", "ONNX", "state_dict", "skops", "pickle" or "XGBoost".
        path: path of the file within the version; of a SavedModel the directory, "." for the
            version's own.
        model_class: of a state_dict, the class that `model_class.json` names, as "module:Class"; or
            None.
    """

    __module__ = "hopsgpu"

    name: str
    path: str
    model_class: str | None = None

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
    for path in there:
        if any(is_saved_model_part(path, directory) for directory in inside):
            continue
        name = _format_of(path, opened)
        if name is not None:
            named = model_class(path, there, opened) if name == STATE_DICT else None
            found.append(ModelFormat(name, path, None if named is None else named.name))
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
    return sorted(path for path in paths if PurePosixPath(path).suffix.lower() in _PICKLES)


def pickle_warning(paths: Iterable[str]) -> str | None:
    """Return a warning for the publisher of pickles; None if there are none."""
    named = pickles(paths)
    if not named:
        return None
    return (
        f"{', '.join(named)}: whoever loads a pickle runs the code in it, and a later version of"
        " the library may not read it; for scikit-learn, publish what skops.io.dump writes"
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
    except ODD_JSON as error:
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
        )
    raise ConfigError(
        f"{url} has several models: {', '.join(map(str, fit))}; choose one by its path:"
        f" path={fit[0].path!r}"
    )


def _format_of(path: str, opened: Opener) -> str | None:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if suffix in _PICKLES:
        return PICKLE
    if suffix in _TORCH:
        with opened(path) as file:
            return _torch_format(file)
    if suffix in _XGBOOST:
        with opened(path) as file:
            return XGBOOST if _BOOSTER.match(file.read(_HEAD)) else None
    return None


def _torch_format(file: BinaryIO) -> str | None:
    """Return the format of one of torch's archives; None for one that torch.export wrote.

    What has no archive is torch's old format, a pickle, which is for tensors and Python objects
    alone; None for what is neither.
    """
    head = file.read(len(_ZIP))
    if head != _ZIP:
        return STATE_DICT if head.startswith(_PICKLE_HEAD) else None
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile:
        return None
    if "constants.pkl" in names:
        return TORCHSCRIPT
    return STATE_DICT if "data.pkl" in names else None
