"""Load a model by the library of its format, without the user's code.

A pickle runs code when it is loaded, so that the caller must say that they trust it.
"""

from __future__ import annotations

import importlib
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.serving.model_formats import (
    ONNX,
    PICKLE,
    SAVED_MODEL,
    SKOPS,
    STATE_DICT,
    TORCHSCRIPT,
    XGBOOST,
    ModelFormat,
)

log = logging.getLogger(__name__)

Trust = bool | Iterable[str]


def check_trust(model: ModelFormat, trust: Trust) -> None:
    """Refuse, before anything is downloaded, what needs the caller's trust.

    Raises:
        ConfigError: the model is a pickle, and `trust` is not True.
    """
    if not isinstance(trust, bool) and (isinstance(trust, str) or not isinstance(trust, Iterable)):
        raise ConfigError(f"trust={trust!r:.99}: must be True, False or a list of names of types")
    if model.name == PICKLE and trust is not True:
        raise ConfigError(
            f"{model.path} is a pickle: to load it runs whatever code its publisher put into it; if"
            " you trust whoever may write to the model's directory, pass trust=True (--trust)"
        )


def accepted_types(path: Path, trust: Trust) -> list[str]:
    """Return the types in a skops file that skops does not trust by itself, and the caller does.

    Raises:
        ConfigError: the file has others, which the message names; or skops is not installed.
    """
    untrusted = sorted(_module("skops.io", path).get_untrusted_types(file=path))
    accepted = untrusted if trust is True else [] if trust is False else list(trust)
    unknown = sorted(set(untrusted) - set(accepted))
    if unknown:
        raise ConfigError(
            f"{path.name} has types that skops does not trust by itself: {', '.join(unknown)}; if"
            f" you trust them, pass trust={untrusted!r}"
        )
    return untrusted


def load_model(model: ModelFormat, directory: Path, trust: Trust = False) -> Any:
    """Return the model, loaded into this process.

    Args:
        model: which of the version's models.
        directory: the version's files.
        trust: True to unpickle whatever is there; for skops the names of the types to accept.

    Raises:
        ConfigError: its library is not installed, or it needs trust.
    """
    check_trust(model, trust)
    log.info("loads %s", model)
    return _LOADERS[model.name](directory / model.path, trust)


def _saved_model(path: Path, trust: Trust) -> Any:
    return _module("tensorflow", path).saved_model.load(str(path))


def _torchscript(path: Path, trust: Trust) -> Any:
    return _module("torch", path).jit.load(path, map_location="cpu")


def _onnx(path: Path, trust: Trust) -> Any:
    return _module("onnxruntime", path).InferenceSession(str(path))


def _state_dict(path: Path, trust: Trust) -> Any:
    torch = _module("torch", path)
    if trust is True:
        return torch.load(path, map_location="cpu", weights_only=False)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path.name} has more than tensors, so that to load it runs code: publish"
            " module.state_dict(), or, if you trust whoever may write to the model's directory,"
            f" pass trust=True ({str(error).splitlines()[0]})"
        ) from error


def _skops(path: Path, trust: Trust) -> Any:
    return _module("skops.io", path).load(path, trusted=accepted_types(path, trust))


def _pickle(path: Path, trust: Trust) -> Any:
    if path.suffix.lower() == ".joblib":
        return _module("joblib", path).load(path)
    try:
        load = importlib.import_module("joblib").load
    except ModuleNotFoundError:
        with path.open("rb") as file:
            return pickle.load(file)
    # It reads plain pickles too, and its own under any name.
    return load(path)


def _xgboost(path: Path, trust: Trust) -> Any:
    return _module("xgboost", path).Booster(model_file=path)


def _module(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != top:
            raise
        raise ConfigError(f"to load {path.name}, install {top}, which is not here") from error


_LOADERS: Mapping[str, Callable[[Path, Trust], Any]] = {
    SAVED_MODEL: _saved_model,
    TORCHSCRIPT: _torchscript,
    ONNX: _onnx,
    STATE_DICT: _state_dict,
    SKOPS: _skops,
    PICKLE: _pickle,
    XGBOOST: _xgboost,
}
