"""Models that are directories: those of Hugging Face's libraries, and weights in several files.

Directories are recognised by file names and by JSON, which also shows code of the publisher's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from hopsgpu.errors import ConfigError
from hopsgpu.storage.error_messages import JSON_ERRORS

log = logging.getLogger(__name__)

TRANSFORMERS = "transformers"
PEFT = "PEFT"
DIFFUSERS = "diffusers"
SENTENCE_TRANSFORMERS = "sentence-transformers"
SAFETENSORS = "safetensors"

# Opens a file of a version for reading; the caller closes the file.
Opener = Callable[[str], BinaryIO]

_INDEX = ".safetensors.index.json"
# A tokenizer's configuration lists its added tokens, and an index all tensors.
MAX_JSON_BYTES = 16 * 2**20
_SAFE_WEIGHTS = re.compile(r"(model(-\d{5}-of-\d{5})?|adapter_model)\.safetensors")
_PICKLED_WEIGHTS = re.compile(r"(pytorch_model(-\d{5}-of-\d{5})?|adapter_model)\.bin")
# Files that a Trainer saves to resume a training.
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler)[^/]*\.(pt|bin)|rng_state[^/]*\.pth|training_args\.bin"
    r"|trainer_state\.json"
)
_OTHER_WEIGHTS = re.compile(r"tf_model\.h5|flax_model\.msgpack")
# Formats of which all files below the directory are part of the model.
_WHOLE_DIRECTORIES = (DIFFUSERS, SENTENCE_TRANSFORMERS)
# Part of the keys whose value may name a repository with compiled code.
_KERNEL_KEY = "_implementation"
# Keys of files and directories, which older versions of the library open wherever they are.
_FILE_KEY = re.compile(r"(.*_)?(file|path|dir)s?|transformers_weights")
# A key of another model, which the library would look for on this machine and in the network.
_OTHER_MODEL_KEY = "audio_tokenizer_name_or_path"


class ModelDirectory(NamedTuple):
    """A model that consists of the files in a directory.

    Attributes:
        name: name of the format.
        path: path of the directory within the version, "." for the version's own directory; for
            sharded weights the path of their index.
        files: paths of its files that would otherwise be recognised as models.
        trust_reason: why the load runs the publisher's code; None if it does not.
    """

    name: str
    path: str
    files: frozenset[str]
    trust_reason: str | None = None


def find_model_directories(paths: Collection[str], open_file: Opener) -> list[ModelDirectory]:
    """Return the models that are directories, outer directories first.

    Raises:
        StoreError: a file cannot be read.
    """
    homes: dict[str, set[str]] = {}
    for path in paths:
        homes.setdefault(str(PurePosixPath(path).parent), set()).add(PurePosixPath(path).name)
    models: list[ModelDirectory] = []
    for home in sorted(homes, key=lambda path: (len(PurePosixPath(path).parts), path)):
        names = homes[home]
        whole_directories = (model.path for model in models if model.name in _WHOLE_DIRECTORIES)
        if any(PurePosixPath(home).is_relative_to(path) for path in whole_directories):
            continue
        model = _recognise_directory(home, names, paths, open_file)
        indexes = sorted(_join(home, name) for name in names if name.endswith(_INDEX))
        sharded = [_sharded_weights(index, names, open_file) for index in indexes]
        if model is not None and (model.name in _WHOLE_DIRECTORIES or None not in sharded):
            models.append(model)
        models += [s for s in sharded if s and not (model and s.files <= model.files)]
    return models


def is_training_state(path: str) -> bool:
    """Return whether only Hugging Face's Trainer needs a file, to resume a training."""
    return bool(_TRAINING_STATE.fullmatch(PurePosixPath(path).name))


def pickled_weights(paths: Iterable[str]) -> list[str]:
    return sorted(path for path in paths if _PICKLED_WEIGHTS.fullmatch(PurePosixPath(path).name))


def shard_names(index: str, content: bytes) -> set[str]:
    """Return the names of the files that an index of sharded weights lists.

    Raises:
        ConfigError: the index is damaged, or lists files in other directories.
    """
    try:
        names = set(json.loads(content)["weight_map"].values())
        outside = sorted(str(name) for name in names if PurePosixPath(name).name != name)
    except (AttributeError, *JSON_ERRORS) as error:
        raise ConfigError(f"{index} is not an index of weights: {error!r:.99}") from error
    if outside:
        raise ConfigError(
            f"{index} lists {outside[0]!r:.99}, which is not the name of a file beside it: publish"
            " the directory that save_pretrained writes, unchanged"
        )
    return names


def _recognise_directory(
    home: str, names: set[str], paths: Collection[str], open_file: Opener
) -> ModelDirectory | None:
    def fields(name: str) -> dict[str, Any]:
        return _read_object(_join(home, name), open_file) if name in names else {}

    below = frozenset(path for path in paths if PurePosixPath(path).is_relative_to(home))
    if "_class_name" in fields("model_index.json"):
        return ModelDirectory(DIFFUSERS, home, below)
    if {"modules.json", "config_sentence_transformers.json"} <= names:
        return ModelDirectory(SENTENCE_TRANSFORMERS, home, below)
    safe = {name for name in names if _SAFE_WEIGHTS.fullmatch(name)}
    pickled = {name for name in names if _PICKLED_WEIGHTS.fullmatch(name)}
    parts = (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _TRAINING_STATE, _OTHER_WEIGHTS)
    files = frozenset(
        _join(home, name) for name in names if any(pattern.fullmatch(name) for pattern in parts)
    )
    # The file may name another directory, whose model transformers would load instead.
    if "adapter_config.json" in names:
        return ModelDirectory(PEFT, home, files)
    config = fields("config.json")
    is_model = isinstance(config.get("model_type"), str) or isinstance(
        config.get("architectures"), list
    )
    if not is_model or not (safe or pickled):
        return None
    reason = None if safe else f"has no weights but pickles ({_join(home, min(pickled))})"
    configs = sorted(name for name in names if name.endswith("config.json"))
    for name in configs:
        place = _join(home, name)
        with open_file(place) as file:
            if len(file.read(MAX_JSON_BYTES + 1)) > MAX_JSON_BYTES:
                reason = f"has a configuration that is too large to be checked ({place})"
                break
        if (key := _first_key(fields(name), _is_code_key)) is not None:
            reason = f"names code of its own ({place}: {key})"
            break
        if (key := _first_key(fields(name), _is_outside_key)) is not None:
            reason = f"names files outside its directory ({place}: {key})"
    return ModelDirectory(TRANSFORMERS, home, files, reason)


def _sharded_weights(index: str, names: set[str], open_file: Opener) -> ModelDirectory | None:
    with open_file(index) as file:
        content = file.read(MAX_JSON_BYTES)
    try:
        listed = shard_names(index, content)
    except ConfigError as error:
        log.warning("%s", error)
        return None
    home = str(PurePosixPath(index).parent)
    if not listed <= names:
        log.warning("%s lists files that are missing: %s", index, ", ".join(sorted(listed - names)))
        return None
    return ModelDirectory(SAFETENSORS, index, frozenset(_join(home, name) for name in listed))


def _join(home: str, name: str) -> str:
    return name if home == "." else f"{home}/{name}"


def _read_object(path: str, open_file: Opener) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file has no object."""
    with open_file(path) as file:
        content = file.read(MAX_JSON_BYTES)
    try:
        fields = json.loads(content)
    except JSON_ERRORS:
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_code_key(key: str, value: Any) -> bool:
    """Return whether a key makes a library load the publisher's code."""
    # The name of a repository, from which a library would download compiled code.
    return key == "auto_map" or (_KERNEL_KEY in key and any("/" in t for t in _texts(value)))


def _is_outside_key(key: str, value: Any) -> bool:
    """Return whether a key makes a library open a file that is not in the model's directory."""
    if key == _OTHER_MODEL_KEY:
        return bool(value)
    places = map(PurePosixPath, _texts(value) if _FILE_KEY.fullmatch(key) else ())
    return any(place.is_absolute() or ".." in place.parts for place in places)


def _first_key(fields: dict[str, Any], is_wanted: Callable[[str, Any], bool]) -> str | None:
    """Return the first wanted key at any depth, or None."""
    for value in _values(fields):
        if isinstance(value, dict):
            for key, item in value.items():
                if is_wanted(key, item):
                    return str(key)
    return None


def _texts(value: Any) -> Iterator[str]:
    return (item for item in _values(value) if isinstance(item, str))


def _values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it."""
    # No recursion: a hostile file may be nested too deep.
    pending = [value]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, (list, dict)):
            pending += item.values() if isinstance(item, dict) else item
