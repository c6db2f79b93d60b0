"""Loads a model with the library of its format, without the user's code.

The load of some formats, such as pickles, runs code of the publisher's. The caller must say that
they trust the publisher.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hopsgpu.core.bounded_reads import read_file
from hopsgpu.errors import ConfigError
from hopsgpu.serving.model_directories import (
    MAX_JSON_BYTES,
    SAFETENSORS,
    TRANSFORMERS,
    shard_names,
)
from hopsgpu.serving.model_formats import (
    ONNX,
    SAVED_MODEL,
    SKOPS,
    XGBOOST,
    ModelFormat,
    advice,
)
from hopsgpu.serving.onnx_references import referenced_files
from hopsgpu.serving.torch_files import (
    CHECKPOINT,
    KERAS,
    LIGHTNING,
    PICKLE,
    PICKLED_MODULE,
    STATE_DICT,
    TORCH_EXPORT,
    TORCHSCRIPT,
)

log = logging.getLogger(__name__)

Trust = bool | Iterable[str]
# safetensors' modules, by the name of a framework in a manifest or a file.
_TENSOR_LIBRARIES = {
    "torch": "torch",
    "pt": "torch",
    "tensorflow": "tensorflow",
    "tf": "tensorflow",
    "jax": "flax",
    "flax": "flax",
    "np": "numpy",
    "numpy": "numpy",
}


class Pretrained(NamedTuple):
    """A model of Hugging Face's transformers, on the CPU, in evaluation mode.

    Attributes:
        processor: the tokenizer, image processor or processor; None if the version has none.
    """

    model: Any
    processor: Any


def check_loadable(model: ModelFormat) -> None:
    """Raise ConfigError, before anything is downloaded, for a format that hopsgpu cannot load."""
    if model.name not in _LOADABLE:
        raise ConfigError(f"load() does not load {model}: {advice(model)}")


def check_trust(model: ModelFormat, trust: Trust) -> None:
    """Raise ConfigError, before anything is downloaded, for a model that needs more `trust`."""
    if not isinstance(trust, bool) and (isinstance(trust, str) or not isinstance(trust, Iterable)):
        raise ConfigError(f"trust={trust!r:.99}: must be True, False or a list of names of types")
    if model.trust_reason is None or trust is True:
        return
    what = model.path if model.path != "." else f"the {model.name} model"
    if model.model_class is None:
        raise ConfigError(
            f"{what} {model.trust_reason}: to load it runs whatever code its publisher put into it;"
            " if you trust whoever may write to the model's directory, pass trust=True (--trust)"
        )
    if trust is False or model.model_class not in trust:
        raise ConfigError(
            f"{what} {model.trust_reason}: if you trust this class with whatever arguments the"
            f" publisher names, pass trust={[model.model_class]!r} (--trust-type"
            f" {model.model_class})"
        )


def accepted_types(path: Path, trust: Trust) -> list[str]:
    """Return the types in a skops file that skops does not trust by itself.

    Raises:
        ConfigError: the caller does not trust one of them; or skops is not installed.
    """
    untrusted = sorted(_import_library("skops.io", path).get_untrusted_types(file=path))
    accepted = untrusted if trust is True else [] if trust is False else list(trust)
    unknown = sorted(set(untrusted) - set(accepted))
    if unknown:
        raise ConfigError(
            f"{path.name} has types that skops does not trust by itself: {', '.join(unknown)}; if"
            f" you trust them, pass trust={untrusted!r}"
        )
    return untrusted


def load_model(
    model: ModelFormat, directory: Path, trust: Trust = False, framework: str | None = None
) -> Any:
    """Load a model into this process.

    Args:
        trust: True to run the publisher's code; or the names of types of skops, or of the class of
            a state_dict, to accept.
        framework: the manifest's, for tensors of a safetensors file that names none.

    Raises:
        ConfigError: its library is not installed, or it needs trust.
    """
    check_trust(model, trust)
    log.info("loads %s", model)
    path = directory / model.path
    if model.name == SAFETENSORS:
        return _safetensors(path, framework)
    return _LOADERS[model.name](path, trust)


def _saved_model(path: Path, trust: Trust) -> Any:
    return _import_library("tensorflow", path).saved_model.load(str(path))


def _torchscript(path: Path, trust: Trust) -> Any:
    return _import_library("torch", path).jit.load(path, map_location="cpu")


def _onnx(path: Path, trust: Trust) -> Any:
    # Not every onnxruntime refuses weights in files outside the directory.
    referenced_files(path)
    return _import_library("onnxruntime", path).InferenceSession(str(path))


def _state_dict(path: Path, trust: Trust) -> Any:
    torch = _import_library("torch", path)
    if trust is True:
        return _load_pickled(path, trust)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path.name} has more than tensors, so that to load it runs code: publish"
            " module.state_dict(), or, if you trust whoever may write to the model's directory,"
            f" pass trust=True ({str(error).splitlines()[0]})"
        ) from error


def _load_pickled(path: Path, trust: Trust) -> Any:
    return _import_library("torch", path).load(path, map_location="cpu", weights_only=False)


def _torch_export(path: Path, trust: Trust) -> Any:
    _import_library("torch", path)
    return importlib.import_module("torch.export").load(path)


def _keras(path: Path, trust: Trust) -> Any:
    return _import_library("keras", path).saving.load_model(path, safe_mode=False)


def _safetensors(path: Path, framework: str | None) -> Any:
    """Return tensors by name; for an index the tensors of all files that it lists."""
    safetensors = _import_library("safetensors", path)
    files = [path]
    if path.suffix == ".json":
        names = shard_names(path.name, read_file(path, MAX_JSON_BYTES))
        files = [path.parent / name for name in sorted(names)]
    tensors: dict[str, Any] = {}
    for file in files:
        with safetensors.safe_open(file, framework="numpy") as open_file:
            library_name = (open_file.metadata() or {}).get("format")
        library = _TENSOR_LIBRARIES.get(library_name or framework or "")
        if library is None:
            library = "numpy" if importlib.util.find_spec("torch") is None else "torch"
        if library != "numpy":
            _import_library(library, path)
        tensors |= importlib.import_module(f"safetensors.{library}").load_file(file)
    return tensors


def _transformers(path: Path, trust: Trust) -> Pretrained:
    """Load a directory without the network, and without code that is not trusted."""
    transformers = _import_library("transformers", path / "config.json")
    # Imported here, because it imports NumPy.
    from hopsgpu.serving.server_files.served_model import load_pretrained

    model = load_pretrained(transformers, path, trust is True)
    has_processor = any(
        (path / f"{name}.json").exists()
        for name in ("tokenizer_config", "processor_config", "preprocessor_config", "tokenizer")
    )
    if not has_processor:
        return Pretrained(model, None)
    processor = transformers.AutoProcessor.from_pretrained(
        path, local_files_only=True, trust_remote_code=trust is True
    )
    return Pretrained(model, processor)


def _skops(path: Path, trust: Trust) -> Any:
    return _import_library("skops.io", path).load(path, trusted=accepted_types(path, trust))


def _pickle(path: Path, trust: Trust) -> Any:
    if path.suffix.lower() not in (".pkl", ".pickle", ".joblib"):
        return _load_pickled(path, trust)
    if path.suffix.lower() == ".joblib":
        return _import_library("joblib", path).load(path)
    try:
        load = importlib.import_module("joblib").load
    except ModuleNotFoundError:
        with path.open("rb") as file:
            return pickle.load(file)
    # joblib reads plain pickles too.
    return load(path)


def _xgboost(path: Path, trust: Trust) -> Any:
    return _import_library("xgboost", path).Booster(model_file=path)


def _import_library(name: str, path: Path) -> Any:
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
    CHECKPOINT: _state_dict,
    LIGHTNING: _state_dict,
    PICKLED_MODULE: _load_pickled,
    TORCH_EXPORT: _torch_export,
    KERAS: _keras,
    SKOPS: _skops,
    PICKLE: _pickle,
    XGBOOST: _xgboost,
    TRANSFORMERS: _transformers,
}
# The loader of safetensors has another argument, the manifest's framework.
_LOADABLE = (*_LOADERS, SAFETENSORS)
