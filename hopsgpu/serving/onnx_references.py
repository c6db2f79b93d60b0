"""The files to which an ONNX model refers, found without loading the model.

The file is walked as protocol buffers, so the package onnx is not needed. Weights in files of their
own may be anywhere in a model: in a constant of a node, of a branch, or of a function.

Source: https://github.com/onnx/onnx, onnx/onnx.proto and docs/ExternalData.md.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError
from hopsgpu.storage.names import is_path_below

# The message in each field that can lead to a reference, by the field's number.
FIELDS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        **{5: "TensorProto", 10: "TensorProto", 6: "GraphProto", 11: "GraphProto"},
        **{22: "SparseTensorProto", 23: "SparseTensorProto"},
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: "StringStringEntryProto"},
}
_ENTRY = "StringStringEntryProto"
_KEY, _VALUE, _LOCATION = 1, 2, b"location"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# A model of 100,000 nodes has two million fields.
_MAX_FIELDS = 20_000_000
# The limit of Protocol Buffers' own parsers.
_MAX_DEPTH = 100
# Longer than any path that is accepted.
_MAX_TEXT = 2**13


def referenced_files(model: Path) -> tuple[str, ...]:
    """Return the files with a model's weights, as paths from the model's directory, sorted.

    Raises:
        ConfigError: the model refers to a file that is not in its directory, or below it; or the
            model is damaged.
        OSError: the model cannot be read.
    """
    try:
        names = {location.decode() for location in _locations(model)}
    except ValueError as error:
        raise ConfigError(f"{model.name} is not an ONNX model: {error}") from error
    for name in sorted(names):
        if not is_path_below(name) or not (model.parent / name).is_file():
            raise ConfigError(
                f"{model.name} refers to {name!r:.99}, which is no file of the version in the"
                " model's directory or below it: publish the model with all files that it needs"
            )
    return tuple(sorted(names))


def _locations(model: Path) -> Iterator[bytes]:
    with model.open("rb") as file:
        if not model.stat().st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield from _locations_in(content)


def _locations_in(content: mmap.mmap) -> Iterator[bytes]:
    open_messages = [("ModelProto", _fields(content, 0, len(content)))]
    remaining = _MAX_FIELDS
    while open_messages:
        message, fields = open_messages[-1]
        field = next(fields, None)
        remaining -= 1
        if remaining < 0 or len(open_messages) > _MAX_DEPTH:
            raise ValueError("it has too many fields, or is nested too deep")
        if field is None:
            open_messages.pop()
            continue
        number, begin, end = field
        inner = FIELDS.get(message, {}).get(number)
        if inner == _ENTRY:
            entry = list(_fields(content, begin, end))
            texts = {name: content[at : min(to, at + _MAX_TEXT)] for name, at, to in entry}
            if len(texts) < len(entry):
                raise ValueError("an entry has two keys or values")
            if texts.get(_KEY) == _LOCATION:
                yield texts.get(_VALUE, b"")
        elif inner is not None:
            open_messages.append((inner, _fields(content, begin, end)))


def _fields(content: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of the fields of bytes in a message; skip other fields."""
    while at < end:
        tag, at = _varint(content, at, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, at = _varint(content, at, end)
            continue
        if wire_type == _BYTES:
            size, at = _varint(content, at, end)
            if size <= end - at:
                yield number, at, at + size
        elif wire_type in _FIXED_SIZES:
            size = _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"a field has the wire type {wire_type}")
        at += size
        if at > end:
            raise ValueError("a field is cut off")


def _varint(content: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Return a number, and the position after it."""
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        if at >= end:
            break
        byte = content[at]
        value |= (byte & 0x7F) << 7 * count
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number is cut off, or too long")
