"""The manifest of a published version: `manifest.json` beside its files.

Schema 1 is one JSON object:

| field | value |
|---|---|
| schema | 1 |
| name, version | the model's name; an integer, 1 and up |
| time | time of the commit, UTC, RFC 3339 with milliseconds, by the publisher's clock |
| digest | the algorithm of the files' digests: "xxh3_128" |
| files | by path below the version, with `/`: {"bytes": size, "digest": hexadecimal} |
| framework | "tensorflow", "torch", "onnx", for a launch also "jax" or "sklearn"; or null |
| metrics | numbers by name; NaN and the infinities, which JSON lacks, as strings |
| signature, parameters, data | the publisher's JSON values, or null |
| tags | tags of the publish; `_tags` has the present tags |
| user | owner of the version, by the user name on the lake |
| run_id, application, code_digest | strings, or null |
| hopsgpu | the version of hopsgpu that wrote it |
| publication | an id of this publish |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hopsgpu.core.formats import utc_time
from hopsgpu.core.metrics import for_json
from hopsgpu.core.spec import check_name
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, FileFacts, check_list, read_facts
from hopsgpu.storage.error_messages import DAMAGED, JSON_ERRORS, UNSUPPORTED

SCHEMA = 1
FILE = "manifest.json"
LATEST = "latest"
_MAX_REPR = 99
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_TEXT_OR_NULL = (str, type(None))
# Types of a manifest's fields; a publisher's own field may have any JSON value.
_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "version": int,
    "time": str,
    "framework": _TEXT_OR_NULL,
    "metrics": dict,
    "signature": object,
    "tags": list,
    "run_id": _TEXT_OR_NULL,
    "application": _TEXT_OR_NULL,
    "user": str,
    "code_digest": _TEXT_OR_NULL,
    "parameters": object,
    "data": object,
    "hopsgpu": str,
    "publication": str,
    "files": dict,
}
# Patterns of the end of a file's path. TensorFlow's weights, for example, are in
# variables/variables.data-00000-of-00001.
_FRAMEWORKS = {
    "tensorflow": r"(^|/)saved_model\.pb|\.data-\d{5}-of-\d{5}|\.(keras|h5|tflite)",
    "torch": r"\.(pt|pth|pt2|distcp|safetensors)|(^|/)pytorch_model[^/]*\.bin",
    "onnx": r"\.onnx",
}


@dataclass(frozen=True, kw_only=True)
class VersionDescription:
    """A publisher's description of a version, as JSON values; checked at construction.

    Attributes:
        metrics: numbers by name, which `float()` accepts; NaN and the infinities become strings.
        signature: description of the model's inputs and outputs.
        tags: tags to point at the version; a single tag may be a plain string.
        run_id, application: the run that made the model, and its YARN application.
        user: owner of the version; by default the user name on the lake.
        framework: as in the schema; None derives it from the files.
        code_digest: digest of the training function.
        parameters: arguments of the training function.
        data: a reference to the training data.

    Raises:
        ConfigError: a value cannot be written as JSON, or a tag is invalid.
    """

    metrics: Mapping[str, Any] | None = None
    signature: Any = None
    tags: Iterable[str] | None = None
    run_id: str | None = None
    application: str | None = None
    user: str | None = None
    framework: str | None = None
    code_digest: str | None = None
    parameters: Any = None
    data: Any = None

    def __post_init__(self) -> None:
        if self.metrics is not None and not isinstance(self.metrics, Mapping):
            raise ConfigError(
                f"metrics={_short_repr(self.metrics)}: must be a mapping of names to numbers"
            )
        metrics = {
            _key("metrics", name): _json_value(f"metrics.{name}", _number(name, value))
            for name, value in (self.metrics or {}).items()
        }
        tags = (self.tags,) if isinstance(self.tags, str) else self.tags
        if tags is not None and not isinstance(tags, Iterable):
            raise ConfigError(
                f"tags={_short_repr(tags)}: must be a list of strings, such as ['candidate']"
            )
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "tags", tuple(dict.fromkeys(map(tag_name, tags or ()))))
        for name in ("signature", "parameters", "data"):
            object.__setattr__(self, name, _json_value(name, getattr(self, name)))
        for name in ("run_id", "application", "user", "framework", "code_digest"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={_short_repr(value)}: must be a string")


def tag_name(tag: object) -> str:
    """Return a tag, normalised; raise ConfigError for an invalid or reserved name."""
    name = check_name(tag, "tag")
    if name == LATEST or name.isdigit() or name[0] == "_":
        raise ConfigError(
            f"tag={tag!r}: must not be {LATEST!r} (the highest version), a number (the version of"
            " that number) or a name that begins with '_' (reserved for hopsgpu)"
        )
    return name


def framework_of(files: Mapping[str, FileFacts]) -> str | None:
    """Return the framework of the largest file whose name shows one, or None."""
    by_size = {
        (facts.bytes, path): framework
        for path, facts in files.items()
        for framework, end in _FRAMEWORKS.items()
        if re.search(f"({end})$", path)
    }
    return by_size[max(by_size)] if by_size else None


@dataclass(frozen=True)
class Manifest:
    """A manifest; `content` is all of it, as JSON values."""

    files: Mapping[str, FileFacts]
    content: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Return the content of the file; raise ConfigError if it has too many bytes."""
        content = json.dumps(self.content, indent=1, allow_nan=False).encode() + b"\n"
        return check_list(content, len(self.files))


def compose(
    *,
    name: str,
    version: int,
    files: Mapping[str, FileFacts],
    about: VersionDescription,
    user: str,
    publication: str,
    time: float,
    hopsgpu: str,
) -> Manifest:
    """Return the manifest of a version. `publication` is an id of this publish."""
    content = {
        "schema": SCHEMA,
        "name": name,
        "version": version,
        "time": utc_time(time),
        "framework": about.framework or framework_of(files),
        "metrics": about.metrics,
        "signature": about.signature,
        "tags": about.tags,
        "run_id": about.run_id,
        "application": about.application,
        "user": user,
        "code_digest": about.code_digest,
        "parameters": about.parameters,
        "data": about.data,
        "hopsgpu": hopsgpu,
        "publication": publication,
        "digest": DIGEST,
        "files": {
            path: {"bytes": facts.bytes, "digest": facts.digest}
            for path, facts in sorted(files.items())
        },
    }
    return Manifest(dict(files), json.loads(json.dumps(content)))


def parse(file_content: bytes, url: str) -> Manifest:
    """Parse a manifest, which must belong to the model and version in its URL.

    Args:
        url: URL of the file, `<root>/<name>/<version>/manifest.json`.

    Raises:
        StoreError: the manifest is damaged, belongs to another version, or has a schema that this
            version of hopsgpu does not read.
    """
    name, number = url.rsplit("/", 3)[1:3]
    try:
        content = json.loads(file_content)
        schema, digest = content["schema"], content["digest"]
        if type(schema) is not int or not isinstance(digest, str):
            raise TypeError(f"schema {schema!r:.99}, digest {digest!r:.99}")
        if (schema, digest) == (SCHEMA, DIGEST):
            _check(content)
            if (content["name"], str(content["version"])) != (name, number):
                whose = f"{content['name']!r:.99} {content['version']!r:.99}"
                raise ValueError(f"it belongs to {whose}, not to {name!r} {number}")
            return Manifest(read_facts(content["files"], "digest"), content)
    except JSON_ERRORS as error:
        raise StoreError(f"{url} is damaged: it is not a manifest ({error!r})", DAMAGED) from error
    raise StoreError(
        f"{url} has schema {schema!r:.99} and digest {digest!r:.99}; this version of hopsgpu reads"
        f" schema {SCHEMA} and {DIGEST}: use the version that published the model, or a later one",
        UNSUPPORTED,
    )


def _check(content: Mapping[str, Any]) -> None:
    """Raise one of JSON_ERRORS if a field of schema 1 is missing, or has an impossible value."""
    for field, kinds in _FIELDS.items():
        if not isinstance(content[field], kinds):
            raise TypeError(f"{field} is {content[field]!r:.99}")
    for name, value in content["metrics"].items():
        if type(value) not in (int, float) and value not in _NO_NUMBERS:
            raise TypeError(f"metrics: {name!r:.99} is {value!r:.99}")


def _json_value(name: str, value: Any) -> Any:
    try:
        json_value = _json(name, value)
        json.dumps(json_value)
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be written as JSON ({error})") from error
    return json_value


def _json(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return for_json(value)
    if isinstance(value, Mapping):
        return {_key(name, key): _json(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(f"{name}[{index}]", item) for index, item in enumerate(value)]
    raise ConfigError(
        f"{name}={_short_repr(value)}: not a JSON value; must be a string, number, None, or a list"
        " or mapping (with strings as keys) of these"
    )


def _key(name: str, key: object) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(f"{name}: keys must be strings, not {_short_repr(key)}")


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str) and value in _NO_NUMBERS:  # from an earlier check
            return float(value)
        if isinstance(value, (str, bytes, bytearray, bool)):
            raise TypeError(f"a {type(value).__name__}")
        if hasattr(value, "detach"):
            # torch warns if a tensor that still has a gradient, such as a loss, is converted.
            value = value.detach()
        return value if type(value) is int else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"metrics: {name!r} is {_short_repr(value)}; must be a number, or a value that float()"
            f" accepts ({error})"
        ) from error


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's repr may fail in any way
        return f"<{type(value).__name__}, whose repr failed: {type(error).__name__}>"
    return text if len(text) < _MAX_REPR else text[: _MAX_REPR - 1] + "…"
