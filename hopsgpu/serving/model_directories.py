"""Models that are directories: those of Hugging Face's libraries, and weights in several files.

A directory is recognised by names of files and by JSON. What its JSON names as code is found here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable
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

Opener = Callable[[str], BinaryIO]

_INDEX = ".safetensors.index.json"
# A tokenizer's configuration lists its added tokens, and an index all tensors.
_MOST_JSON = 16 * 2**20
_SAFE = re.compile(r"(model(-\d{5}-of-\d{5})?|adapter_model)\.safetensors")
_PICKLED = re.compile(r"(pytorch_model(-\d{5}-of-\d{5})?|adapter_model)\.bin")
# Files that a Trainer saves to resume a training.
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler)[^/]*\.(pt|bin)|rng_state[^/]*\.pth|training_args\.bin"
    r"|trainer_state\.json"
)
_OTHER_WEIGHTS = re.compile(r"tf_model\.h5|flax_model\.msgpack")
# The formats whose directories have all that is below them.
_WHOLE = (DIFFUSERS, SENTENCE_TRANSFORMERS)
_KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")


class ModelDirectory(NamedTuple):
    """A model that consists of the files in a directory.

    Attributes:
        name: name of the format.
        path: path of the directory within the version, "." for its own; of weights in several
            files that of their index.
        files: paths of those of its files that would be models by themselves.
        trust_reason: why loading runs the publisher's code; None if it does not.
    """

    name: str
    path: str
    files: frozenset[str]
    trust_reason: str | None = None


def directories(paths: Collection[str], opened: Opener) -> list[ModelDirectory]:
    """Return the models that are directories, the outer before the inner.

    Args:
        paths: paths of all files of the version.
        opened: opens a file of the version for reading; the caller closes it.

    Raises:
        StoreError: a file cannot be read.
    """
    homes: dict[str, set[str]] = {}
    for path in paths:
        homes.setdefault(str(PurePosixPath(path).parent), set()).add(PurePosixPath(path).name)
    found: list[ModelDirectory] = []
    for home in sorted(homes, key=lambda one: (len(PurePosixPath(one).parts), one)):
        names = homes[home]
        if any(
            one.name in _WHOLE and PurePosixPath(home).is_relative_to(one.path) for one in found
        ):
            continue
        model = _directory(home, names, paths, opened)
        indexes = sorted(_in(home, name) for name in names if name.endswith(_INDEX))
        shards = [_shards(index, names, opened) for index in indexes]
        if model is not None and (model.name in _WHOLE or None not in shards):
            found.append(model)
        found += [one for one in shards if one and not (model and one.files <= model.files)]
    return found


def is_training_state(path: str) -> bool:
    """Return whether a file is needed only to resume a training of Hugging Face's Trainer."""
    return bool(_TRAINING_STATE.fullmatch(PurePosixPath(path).name))


def pickled_weights(paths: Iterable[str]) -> list[str]:
    """Return those files that are weights of Hugging Face's libraries in pickles."""
    return sorted(path for path in paths if _PICKLED.fullmatch(PurePosixPath(path).name))


def shard_names(index: str, content: bytes) -> set[str]:
    """Return the names of the files that an index of weights in several files lists.

    Args:
        index: path of the index, for the error.
        content: what is in it.

    Raises:
        ConfigError: it is damaged, or lists files that are not beside it.
    """
    try:
        names = set(json.loads(content)["weight_map"].values())
        outside = sorted(str(one) for one in names if PurePosixPath(one).name != one)
    except (AttributeError, *JSON_ERRORS) as error:
        raise ConfigError(f"{index} is not an index of weights: {error!r:.99}") from error
    if outside:
        raise ConfigError(
            f"{index} lists {outside[0]!r:.99}, which is not the name of a file beside it: publish"
            " the directory that save_pretrained writes, unchanged"
        )
    return names


def _directory(
    home: str, names: set[str], paths: Collection[str], opened: Opener
) -> ModelDirectory | None:
    def fields(name: str) -> dict[str, Any]:
        return _fields(_in(home, name), opened) if name in names else {}

    below = frozenset(path for path in paths if PurePosixPath(path).is_relative_to(home))
    if "_class_name" in fields("model_index.json"):
        return ModelDirectory(DIFFUSERS, home, below)
    if {"modules.json", "config_sentence_transformers.json"} <= names:
        return ModelDirectory(SENTENCE_TRANSFORMERS, home, below)
    safe = {name for name in names if _SAFE.fullmatch(name)}
    pickled = {name for name in names if _PICKLED.fullmatch(name)}
    parts = (_SAFE, _PICKLED, _TRAINING_STATE, _OTHER_WEIGHTS)
    files = frozenset(
        _in(home, name) for name in names if any(one.fullmatch(name) for one in parts)
    )
    if "peft_type" in fields("adapter_config.json"):
        return ModelDirectory(PEFT, home, files)
    config = fields("config.json")
    is_model = isinstance(config.get("model_type"), str) or isinstance(
        config.get("architectures"), list
    )
    if not is_model or not (safe or pickled):
        return None
    reason = None if safe else f"has no weights but pickles ({_in(home, min(pickled))})"
    configs = sorted(name for name in names if name.endswith("config.json"))
    for name in configs:
        if (key := _key_of_code(fields(name))) is not None:
            reason = f"names code of its own ({_in(home, name)}: {key})"
            break
    return ModelDirectory(TRANSFORMERS, home, files, reason)


def _shards(index: str, names: set[str], opened: Opener) -> ModelDirectory | None:
    with opened(index) as file:
        content = file.read(_MOST_JSON)
    try:
        listed = shard_names(index, content)
    except ConfigError as error:
        log.warning("%s", error)
        return None
    home = str(PurePosixPath(index).parent)
    if not listed <= names:
        log.warning("%s lists files that are missing: %s", index, ", ".join(sorted(listed - names)))
        return None
    return ModelDirectory(SAFETENSORS, index, frozenset(_in(home, name) for name in listed))


def _in(home: str, name: str) -> str:
    return name if home == "." else f"{home}/{name}"


def _fields(path: str, opened: Opener) -> dict[str, Any]:
    """Return the object that a file of JSON has; none if it has something else."""
    with opened(path) as file:
        content = file.read(_MOST_JSON)
    try:
        fields = json.loads(content)
    except JSON_ERRORS:
        return {}
    return fields if isinstance(fields, dict) else {}


def _key_of_code(fields: dict[str, Any]) -> str | None:
    """Return the first key, at any depth, by which a library would load the publisher's code."""
    # A list of what is left: the nesting of a hostile file may be as deep as Python permits.
    left: list[Any] = [fields]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            for key, one in value.items():
                # A kernel is a repository's name, from which compiled code would be downloaded.
                if key == "auto_map" or (key in _KERNEL_KEYS and "/" in str(one)):
                    return str(key)
            left += value.values()
    return None
